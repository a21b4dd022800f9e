"""Results in bfloat16 that differ by more than the tolerance are held against float32; a wrong plan does not pass."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from sfast_ext import Config, accelerate
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.runtime import plan_builder, plan_maker, plan_runner, verify
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import vaes
from sfast_ext.weights.arena import WeightArena

BF16, CPU = torch.bfloat16, torch.device("cpu")


def decoder(dtype: torch.dtype = BF16) -> Any:
    # the same weights in each dtype, which bfloat16 has rounded
    return vaes.random_vae("tiny-sd", dtype=BF16).to(dtype).decoder


def latent(dtype: torch.dtype = BF16) -> torch.Tensor:
    return vaes.part_input("decoder", 64, 64, dtype=dtype)


def distances() -> tuple[float, float]:
    """Of a plan from the original, and of the original from float32."""
    module, x = decoder(), latent()
    with torch.no_grad():
        theirs, wanted = module(x), decoder(torch.float32)(x.float())
    accelerator = accelerate(module, Config(allow_cpu=True, cuda_graphs=False))
    with torch.no_grad():
        module(x)
    (plan,) = accelerator.plans.values()
    assert plan.error is not None and plan.rounding_error is None
    return plan.error, relative_error([theirs.float()], [wanted])


@pytest.fixture(scope="module")
def apart() -> float:
    between, off = distances()
    assert 0 < between < 0.02 and off < 4 * between
    return between


def built(tolerance: float, dtype: torch.dtype = BF16, check: str = "first") -> tuple[Any, Any, torch.Tensor]:
    module, x = decoder(dtype), latent(dtype)
    accelerator = accelerate(module, Config(allow_cpu=True, cuda_graphs=False, tolerance=tolerance, check=check))
    with torch.no_grad():
        module(x)
    return accelerator, module, x


def test_the_forward_is_computed_in_float32() -> None:
    module, x = decoder(), latent()
    arena, call = WeightArena(module), flatten_call((x,), {}, CPU)
    with torch.no_grad():
        captured = capture(module.forward, call, [x], arena)
        (ours,) = plan_maker.exact(captured.graph_module, [x])
        wanted = decoder(torch.float32)(x.float())
    assert ours.dtype == torch.float32
    assert relative_error([ours], [wanted]) < 1e-5


def test_casts_and_tensors_that_a_forward_makes_are_in_float32_too() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x.float().to(BF16) + torch.ones(3, dtype=BF16) / 3).to(torch.float16)

    x = torch.full((3,), 1 / 3, dtype=BF16)
    captured = capture(forward, flatten_call((x,), {}, CPU), [x], WeightArena(torch.nn.Module()))
    (ours,) = plan_maker.exact(captured.graph_module, [x])
    assert torch.equal(ours, x.float() + 1 / 3)


def test_a_plan_that_only_rounds_otherwise_is_kept(apart: float) -> None:
    accelerator, module, x = built(0.95 * apart)
    (plan,) = accelerator.plans.values()
    assert plan.rounding_error == pytest.approx(apart) and plan.error is not None
    with torch.no_grad():
        module(x)
    assert accelerator.report.counter("eager_runs") == 1


def test_it_stays_if_each_call_is_compared(apart: float) -> None:
    accelerator, module, x = built(0.95 * apart, check="always")
    with torch.no_grad():
        for _ in range(2):
            module(x)
    assert len(accelerator.plans) == 1 and accelerator.report.as_dict()["reasons"] == {}


WRONG = [lambda y: y * 1.02, lambda y: y * 1.012, lambda y: y.roll(1, -1), lambda y: y * float("nan")]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_plan_is_rejected_all_the_same(apart: float, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_runner.PlanRunner.outputs
    # otherwise such a plan is rejected before
    monkeypatch.setattr(verify, "rounded_otherwise", lambda run: None)
    monkeypatch.setattr(plan_runner.PlanRunner, "outputs", lambda *args: [wrong(y) for y in right(*args)])
    accelerator, module, x = built(0.95 * apart)
    assert not accelerator.plans
    with torch.no_grad():
        module(x)
    (reason,) = accelerator.report.as_dict()["reasons"]
    assert "differs from the original" in reason


def test_a_tolerance_far_below_the_rounding_is_meant(apart: float) -> None:
    accelerator, _, _ = built(0.1 * apart)
    assert not accelerator.plans


def test_float32_has_no_such_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(plan_builder, "exact", lambda *args: asked.append(args))
    accelerator, _, _ = built(0.02, torch.float32)
    (plan,) = accelerator.plans.values()
    assert 0 < plan.error < 1e-4
    accelerator, _, _ = built(0.5 * plan.error, torch.float32)
    assert not accelerator.plans and not asked


def test_where_it_cannot_be_computed_the_plan_is_rejected(apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builder, "exact", lambda *args: None)
    accelerator, _, _ = built(0.95 * apart)
    assert not accelerator.plans


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_algorithms_are_not_timed_for_convolutions_that_run_once(monkeypatch, frozen: bool, fails: bool) -> None:
    module, x = decoder(), latent()
    graph = capture(module, flatten_call((x,), {}, CPU), [x], WeightArena(module)).graph_module
    seen, run_node = [], plan_maker.ExactRun.run_node

    def run(self: Any, n: Any) -> Any:
        seen.append(torch.backends.cudnn.benchmark)
        if fails:
            raise RuntimeError("injected")
        return run_node(self, n)

    monkeypatch.setattr(plan_maker.ExactRun, "run_node", run)
    monkeypatch.setattr(torch.backends, "flags_frozen", lambda: frozen)
    before = torch.backends.cudnn.benchmark
    try:
        torch._C._set_cudnn_benchmark(True)
        with pytest.raises(RuntimeError, match="injected") if fails else contextlib.nullcontext():
            plan_maker.exact(graph, [x])
        assert torch.backends.cudnn.benchmark and set(seen) == {frozen}
    finally:
        torch._C._set_cudnn_benchmark(before)
