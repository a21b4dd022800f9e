"""What rounding to fewer bits moves a result by, and that correct plans are well within it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import rounding as benchmark
from sfast_ext import Config, accelerate
from sfast_ext.preparation import Interrupted
from sfast_ext.reasons import text
from sfast_ext.runtime import plan_builder, verify
from sfast_ext.runtime.verify import relative_error, rounded_otherwise

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def moved(function: Any, *args: torch.Tensor) -> torch.Tensor:
    (result,) = rounded_otherwise(lambda: function(*args))
    return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_is_rounded_to_the_nearest_of_fewer_bits(dtype):
    bits = verify._BITS[dtype]
    x = torch.randn(1000, dtype=torch.float64).to(dtype)
    y = moved(lambda x: x * 1, x)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert not (y.view(integers) & ((1 << bits) - 1)).any()
    apart = (y.double() - x.double()).abs() / x.double().abs()
    assert 0 < apart.max() <= 2.0 ** (bits - 1) * torch.finfo(dtype).eps
    # up as often as down: nothing shrinks from one layer to the next
    assert 0.4 < (y.abs() > x.abs()).sum() / (y != x).sum() < 0.6


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_few_bits_stays(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.75, INF, -INF, NAN], dtype=dtype)
    assert torch.equal(moved(lambda x: x * 1, x).nan_to_num(9), x.nan_to_num(9))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1), lambda x: x[:2], lambda x: x.expand(2, *x.shape), lambda x: x.contiguous(),
        lambda x: nn.functional.dropout(x, 0.5, training=False), lambda x: x.to(x.dtype), lambda x: x.detach(),
        lambda x: x.add_(0), lambda x: torch.mul(x, 1, out=x), lambda x: x.to(torch.int64), lambda x: [x][0],
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_arguments_are_left_alone(function, mode):
    x = torch.randn(4, 5)
    before = x.clone()
    with mode():
        moved(function, x)
    assert torch.equal(x, before)


def test_weights_and_constants_are_left_alone():
    layer = nn.Linear(8, 8)
    before = [p.detach().clone() for p in layer.parameters()]
    moved(lambda x: layer(x) + torch.full((8,), 0.1), torch.randn(3, 8))
    assert all(map(torch.equal, before, layer.parameters()))
    (constant,) = rounded_otherwise(lambda: torch.full((8,), 0.1))
    assert torch.equal(constant, torch.full((8,), 0.1))


@pytest.mark.parametrize("strided", [lambda x: x, lambda x: x.to(memory_format=torch.channels_last), lambda x: x.mT])
def test_large_values_are_rounded_part_by_part(strided, monkeypatch):
    x = strided(torch.randn(2, 3, 16, 16))
    whole = moved(lambda x: x * 1, x)
    monkeypatch.setattr(verify, "_CHUNK", 64)
    parts = moved(lambda x: x * 1, x)
    assert torch.equal(whole, parts) and not torch.equal(whole, x)


def test_it_is_the_same_each_time_and_takes_no_random_numbers():
    x, state = torch.randn(64), torch.get_rng_state()
    assert torch.equal(moved(torch.sin, x), moved(torch.sin, x))
    assert torch.equal(state, torch.get_rng_state())


def test_a_forward_that_does_not_run_so_says_nothing():
    def fails() -> Any:
        raise RuntimeError("not under a mode")

    def interrupted() -> Any:
        raise Interrupted("by the user")

    assert rounded_otherwise(fails) is None and rounded_otherwise(lambda: object()) is None
    with pytest.raises(Interrupted):
        rounded_otherwise(interrupted)


def test_float32_that_a_gpu_rounds_to_tf32_gives_up_its_bits(monkeypatch):
    class OnGpu:
        dtype, is_cuda = torch.float32, True

    monkeypatch.setattr(verify.fp32_precision, "matmul_in_tf32", lambda: False)
    monkeypatch.setattr(verify.fp32_precision, "read_conv", lambda: "ieee")
    assert verify._bits(OnGpu()) == verify._BITS[torch.float32]
    for precision in (True, "tf32"):
        monkeypatch.setattr(verify.fp32_precision, "read_conv", lambda precision=precision: precision)
        assert verify._bits(OnGpu()) == 13
    assert verify._bits(torch.ones(1)) == verify._BITS[torch.float32]


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("kernels", [False, True])
def test_correct_plans_are_well_within_what_rounding_moves(kernels, request):
    if kernels:
        request.getfixturevalue("kernels_on_the_cpu")
    # each model once: a CPU is slow in half precision
    found = list(benchmark.rows("cpu", ["tiny-sd15" if kernels else "tiny-sd encoder"]))
    assert len(found) > 3 and {row["dtype"] for row in found} == {"float16", "bfloat16", "float32"}
    above = [r for r in found if r["dtype"] != "float32" or r["error"] > verify.FLOORS[torch.float32]]
    assert max(row["ratio"] for row in above) < 0.8 < verify.MAX_NOISE
    assert all(row["noise"] > 0 for row in found)


def test_the_benchmark_prints_a_table(tmp_path, capsys, monkeypatch):
    file = tmp_path / "rounding.json"
    monkeypatch.setattr(benchmark, "HALF", ())
    assert benchmark.main(["--model", "tiny-sd encoder", "--json", str(file)]) == 0
    assert "tiny-sd encoder" in capsys.readouterr().out and '"ratio"' in file.read_text()


class Deep(nn.Module):
    """Layers enough for results to be apart."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=dtype) for _ in range(12))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.layer_norm(x + layer(nn.functional.silu(x)), (32,)) * self.scale
        return x


def test_what_is_below_the_floor_costs_no_run(monkeypatch):
    monkeypatch.setattr(verify, "rounded_otherwise", lambda run: pytest.fail("measured"))
    for dtype in DTYPES[1:3]:
        module = Deep(dtype)
        accelerator = accelerate(module, Config(allow_cpu=True))
        with torch.no_grad():
            module(torch.randn(4, 32, dtype=dtype))
        assert len(accelerator.plans) == 1


def test_further_plans_are_judged_by_the_least_noise_that_was_measured(monkeypatch):
    given = []
    measured = iter([[0.02], [0.01], None, [INF], [0.03]])

    def verified(new: Any) -> None:
        plan = new.plan
        given.append(plan.noise)
        found = next(measured)
        plan.noise = plan.noise if found is None else found

    monkeypatch.setattr(plan_builder, "verify_plan", verified)
    module = Deep()
    accelerate(module, Config(allow_cpu=True))
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 5):
            module(torch.randn(rows, 32, dtype=torch.float16))
    assert given == [None, [0.02], [0.01], [0.01], [0.01]]


def _judge(error: float, noise: Any, *, dtype: torch.dtype = torch.float16, plan: Any = None, **config: Any) -> Any:
    class OfAPlan:
        error = rounding_error = noise = None
        banks, rounds_inputs = (), False
        device = torch.device("cpu")

    reference = torch.linspace(-1, 1, 4001, dtype=torch.float64).to(dtype)
    plan, runs = plan or OfAPlan(), []

    def original() -> Any:
        runs.append(1)
        if noise is None:
            raise RuntimeError("not under a mode")
        return (reference.double() * (1 + noise)).to(dtype)

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(verify, "_give_up", lambda x: None)
        outputs = [(reference.double() * (1 + error)).to(dtype)]
        refused = verify.Comparison(plan, outputs, [reference], Config(**config), original).difference()
    return text(refused), len(runs), plan


@pytest.mark.parametrize(
    ("error", "noise", "refused", "runs"),
    [
        (0.0, 0.0, None, 0),
        (5e-4, 0.0, None, 0),  # one rounding in half precision
        (4e-3, 4e-3, None, 1),
        (4e-3, 5e-3, None, 1),
        (8e-3, 4e-3, "more than rounding explains (0.005)", 1),
        (1.8e-2, 5e-3, "more than rounding explains (0.006", 1),
        (1.5e-2, 0.5, None, 1),
        (2.5e-2, 0.5, "more than the tolerance of 0.02", 0),
        (1.5e-2, NAN, None, 1),  # nothing to judge by: the tolerance
        (1.5e-2, None, None, 1),
    ],
)
def test_a_difference_is_judged_by_what_rounding_moves(error, noise, refused, runs):
    told, ran, plan = _judge(error, noise)
    assert ran == runs
    assert (told is None) if refused is None else (refused in told)
    assert plan.error == pytest.approx(error, rel=0.1, abs=3e-4)


def test_the_tolerance_of_the_user_is_the_ceiling():
    assert _judge(4e-3, 4e-3, tolerance=0.003)[0] == "the accelerated step differs from the original by 0.004, " + (
        "more than the tolerance of 0.003"
    )
    assert _judge(4e-3, 4e-3, tolerance=0.1)[0] is None
    assert "more than rounding explains" in _judge(8e-2, 4e-3, tolerance=0.1)[0]


def test_a_later_comparison_is_judged_by_what_was_measured_or_measures_again():
    _, runs, plan = _judge(4e-3, 4e-3)
    told, runs, plan = _judge(4.5e-3, None, plan=plan)
    assert told is None and runs == 0
    told, runs, plan = _judge(8e-3, 8e-3, plan=plan)
    assert told is None and runs == 1
    told, runs, plan = _judge(1.6e-2, 8e-3, plan=plan)
    assert "more than rounding explains" in told and runs == 1


def test_each_result_is_judged_by_itself():
    class OfAPlan:
        error = rounding_error = noise = None
        banks, rounds_inputs = (), False
        device = torch.device("cpu")

    small, large = torch.randn(400), torch.randn(4000)
    results = [small, large]
    wrong = [small * 1.001, large]
    moves = [small * 1.00001, large * 1.01]
    told = verify.Comparison(OfAPlan(), wrong, results, Config(), lambda: moves).difference()
    assert "0.001, more than rounding explains" in str(told)
    assert relative_error(wrong, results) == pytest.approx(0.001, rel=1e-2)


def test_sums_in_half_precision_are_judged_by_the_tolerance(monkeypatch):
    class OnGpu:
        error = rounding_error = noise = None
        banks, rounds_inputs = (), False
        device = torch.device("cuda")

    for flag, geforce, chosen, lossy in (
        (False, True, True, True), (False, False, True, False), (False, True, False, False), (True, False, False, True),
    ):  # fmt: skip
        monkeypatch.setattr(verify, "_fp16_accumulation", lambda flag=flag: flag)
        monkeypatch.setattr(verify.mma_gemm, "half_sums_profitable", lambda device, geforce=geforce: geforce)
        told = _judge(1.5e-2, 1e-3, plan=OnGpu(), faster_sums=chosen)[0]
        assert (told is None) == lossy
        assert "tolerance" in _judge(3e-2, 1e-3, plan=OnGpu(), faster_sums=chosen)[0]
