"""Plans with 8-bit integers under an accelerator: when they are made, compared, made again and left."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Iterator
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor

from sfast_ext import Config, reasons
from sfast_ext.kernels.backend import health, nvrtc, triton_runtime
from sfast_ext.kernels.eight_bits import linear8
from sfast_ext.passes import eight_bits_selection
from sfast_ext.runtime import eight_bits, plan_builder, verify

from .eight_bits import HALF, LAYERS, OFF, ON, C, On, changed, outlier


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    eight_bit_kernels.available(monkeypatch)
    with torch.no_grad():
        yield
    health.clear()


def test_layers_are_quantised_and_said() -> None:
    on = On()
    on.call()
    errors = [on.error() for _ in range(3)]
    # half precision alone is 3e-3 off
    assert all(0.004 < error < 0.05 for error in errors)
    told = on.status()
    assert told["layers"] == LAYERS and told["kept"] == [] and told["reason"] is None
    # a byte for each value, and 12 for each row
    assert told["bytes"] == 2 * (16 * C * C + 12 * (3 + 1 + 8 + 1) * C)
    assert on.count("replays") + on.count("eager_runs") == 3 and on.count("errors") == 0
    assert on.acc.status()["weights"]["eight_bits_bytes"] == told["bytes"]


def test_off_is_exact_and_nothing_is_held() -> None:
    on = On(OFF)
    on.call()
    assert on.error() < 0.01
    assert on.status() == {"layers": 0, "kept": [], "bytes": 0, "reason": None}


def test_requests_switch_it_in_the_middle_of_an_image_and_off_gives_the_exact_bits_again() -> None:
    on = On(OFF)
    x = torch.randn(2, 128, 8).to(HALF)
    on.ours(x)
    exact = on.ours(x)
    on.acc.configure(ON)
    original = on.ours(x)
    coarse = on.ours(x)
    assert not torch.equal(coarse, exact) and verify.relative_error([coarse], [original]) < 0.05
    for _ in range(3):
        on.acc.configure(OFF)
        assert torch.equal(on.ours(x), exact)
        on.acc.configure(ON)
        assert torch.equal(on.ours(x), coarse)
    assert on.count("captures") == 2 and len(on.acc.plans) == 2


def test_plans_that_nobody_asks_for_any_more_are_dropped_with_their_memory() -> None:
    on = On()
    on.acc.new_generation()
    for _ in range(2):
        on.call()
    on.acc.configure(OFF)
    held = [on.status()["bytes"]]
    for _ in range(6):
        on.acc.new_generation()
        for _ in range(2):
            on.call()
        held.append(on.status()["bytes"])
    assert held[0] == held[2] > 0 and held[-1] == 0
    assert len(on.acc.plans) == 1


@pytest.mark.long(but=[0, 3, 4, 7])
@pytest.mark.parametrize("generations", [True, False])
@pytest.mark.parametrize("how", ["in place", "data", "rows", "replaced"])
def test_a_lora_whose_weight_changes_each_step(how: str, generations: bool) -> None:
    on = On()
    if generations:
        on.acc.new_generation()
    on.call()
    before = on.error()
    for step in range(6):
        on.both(changed(how, (1.7, 0.4, -1.3)[step % 3]))
        assert on.error() < 2 * before
    assert on.count("captures") == 1 and on.status()["layers"] == LAYERS


def test_weights_are_asked_for_at_the_first_call_of_a_generation_and_compared_if_they_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eight_bits, "SECOND_LOOK", 1000)
    compared = []
    real = verify.Comparison.difference
    monkeypatch.setattr(verify.Comparison, "difference", lambda self: compared.append(on.seed) or real(self))
    on = On()
    for generation in range(5):
        on.acc.new_generation()
        if generation in (2, 4):
            on.both(changed("in place", 2.0 if generation == 2 else 0.5))
        for _ in range(3):
            error = on.error()
            # what is compared is not used
            assert error < 0.05 and (error == 0) == (on.seed in compared)
    # the first with the plan; the third generation has other weights, the fifth those of the first again
    assert compared == [1, 7]


def test_weights_are_asked_for_now_and_then_without_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "CALLS_BETWEEN_CHECKS", 4)
    monkeypatch.setattr(eight_bits, "SECOND_LOOK", 1000)
    compared = []
    real = verify.Comparison.difference
    monkeypatch.setattr(verify.Comparison, "difference", lambda self: compared.append(on.seed) or real(self))
    on = On()
    for _ in range(6):
        on.call()
    on.both(changed("in place", 2.0))
    errors = [(on.seed + 1, on.error()) for _ in range(6)]
    assert len(compared) == 2 and max(error for _, error in errors) < 0.05
    # what is compared is not used
    assert [seed for seed, error in errors if error == 0] == [compared[1]]


@pytest.mark.parametrize("generations", [True, False])
def test_a_plan_is_compared_again_with_an_input_of_less_noise(generations: bool) -> None:
    on = On()
    if generations:
        on.acc.new_generation()
    errors = [on.error() for _ in range(20)]
    # the first call, which makes the plan, and the one after so many replays: the original's results
    assert [i for i, error in enumerate(errors) if error == 0] == [0, eight_bits.SECOND_LOOK + 1]


def test_nothing_is_compared_and_no_call_runs_twice_if_nobody_wants_it() -> None:
    on = On(Config(allow_cpu=True, eight_bits=True, tolerance=0.1, check="never"))
    for generation in range(3):
        on.acc.new_generation()
        on.both(changed("in place", 1.5 if generation else 1.0))
        for _ in range(5):
            on.call()
    on.plan.compare_again = True
    runs = []
    real = on.plan.run_eagerly
    on.plan.run_eagerly = lambda leaves: runs.append(1) or real(leaves)  # type: ignore[method-assign]
    assert 0 < on.error() < 0.05 and len(runs) == 1
    assert on.plan.error is None and on.status()["layers"] == LAYERS


def test_a_plan_that_is_too_far_off_at_the_second_look_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "SECOND_LOOK", 3)
    on = On()
    for _ in range(4):
        on.call()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "BUDGET", 1e-6)
        assert on.error() == 0
    assert not on.acc.plans and on.status()["reason"] is None
    on.call()
    assert 0 < on.error() < 0.05 and on.status()["layers"] == LAYERS


def test_another_checkpoint_in_place_has_its_layers_selected_anew() -> None:
    on = On(Config(allow_cpu=True, eight_bits=True))
    on.acc.new_generation()
    for _ in range(3):
        on.call()
    assert on.status()["layers"] == LAYERS
    on.both(outlier)
    on.acc.new_generation()
    errors = [on.error() for _ in range(6)]
    assert max(errors) < 0.04
    told = on.status()
    assert 0 < told["layers"] < LAYERS and [name for name, _ in told["kept"]] == sorted(
        [f"blocks.{i}.{name}" for i in (0, 1) for name in ("ff_in", "to_q+to_k+to_v")],
        key=lambda name: -dict(told["kept"])[name],
    )
    assert all(error > eight_bits_selection.LIMIT for _, error in told["kept"])
    assert on.count("errors") == 0


def test_further_layers_are_kept_if_the_whole_is_too_far_off_and_then_all() -> None:
    on = On(Config(allow_cpu=True, eight_bits=True, tolerance=1e-9))
    on.call()
    # no plan is within such a tolerance
    assert on.error() == 0 and not on.acc.plans
    assert on.status()["layers"] == 0 and on.status()["reason"]["code"] == "eight-bits"
    assert 0 < len(on.status()["kept"]) <= LAYERS


def test_the_limit_of_the_whole_is_twice_the_tolerance() -> None:
    on = On()
    on.call()
    error = on.plan.error
    assert error is not None
    for part, kept_none in ((0.55, True), (0.45, False)):
        on = On(Config(allow_cpu=True, eight_bits=True, tolerance=part * error))
        on.call()
        assert (on.status()["layers"] == LAYERS) == kept_none


def test_the_same_layers_for_other_sizes_and_small_ones_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = eight_bits_selection.errors_of
    monkeypatch.setattr(
        eight_bits_selection, "errors_of", lambda x, w, turn: asked.append(x.shape) or real(x, w, turn)
    )
    on = On()
    for rows in (256, 512, 128):
        on.call(rows)
        on.call(rows)
    assert len(asked) == LAYERS and len(on.acc.plans) == 3
    assert [len(plan.banks) for plan in on.acc.plans.values()] == [LAYERS, LAYERS, 0]
    assert on.error(128) < 0.01 < on.error(512) + 0.005
    held = {id(bank) for plan in on.acc.plans.values() for bank in plan.banks}
    assert len(held) == LAYERS


def test_a_kernel_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*operands: Any, **options: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(linear8.launch, "function", broken)
    on = On()
    on.call()
    assert on.error() < 0.01 and on.status()["layers"] == 0
    text = on.status()["reason"]["text"]
    assert "linear8" in text and "RuntimeError: injected" in text


def test_an_error_while_layers_are_selected_is_reported_and_the_exact_plan_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*operands: Any) -> None:
        raise ValueError("injected")

    monkeypatch.setattr(eight_bits_selection, "errors_of", broken)
    on = On()
    on.call()
    assert on.error() < 0.01 and on.count("eager_runs") == 1 and on.count("errors") == 1
    assert "injected" in on.status()["reason"]["text"]


def test_what_did_not_work_is_tried_again_after_some_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(eight_bits_selection, "errors_of", lambda *operands: 1 / 0)
        on = On()
        on.acc.new_generation()
        on.call()
    for _ in range(4):
        assert on.status()["reason"] is not None and on.error() < 0.01
        on.acc.new_generation()
    on.call()
    assert on.status()["reason"] is None and on.status()["layers"] == LAYERS


def test_after_a_success_the_next_failure_is_tried_again_as_soon_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    on = On()
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(eight_bits_selection, "errors_of", lambda *operands: 1 / 0)
            on.acc._model.eight_bits._selections.clear()
            on.acc._model.forget_plans("a test")
            on.call()
            assert on.status()["reason"] is not None and on.status()["layers"] == 0
        for _ in range(4):
            on.acc.new_generation()
        on.call()
        assert on.status()["reason"] is None and on.status()["layers"] == LAYERS


def test_the_layers_of_parts_are_added_up() -> None:
    on = On()
    on.acc.accelerate_parts([(str(i), block) for i, block in enumerate(on.ours.blocks)])
    x = torch.randn(2, 128, C).to(HALF)
    for block in on.ours.blocks:
        block(x)
    assert on.status()["layers"] == LAYERS and on.status()["reason"] is None


def test_what_is_said_of_a_model_in_float32() -> None:
    on = On()
    on.ours.float()
    on.ours(torch.randn(2, 128, 8))
    assert "the model is in float32" in on.status()["reason"]["text"]


def test_what_is_said_of_a_plan_that_is_too_far_off() -> None:
    on = On(Config(allow_cpu=True, eight_bits=True, tolerance=1e-9))
    on.call()
    text = on.status()["reason"]["text"]
    assert re.search(r"^8 bits are not used: they change the result by [0-9.]+, and 2e-09 is allowed$", text), text


@pytest.mark.parametrize(
    ("capability", "dtypes", "nvrtc_there", "words"),
    [
        ((7, 0), {torch.float16}, True, "compute capability 7.0"),
        ((7, 2), {torch.float16, torch.float32}, True, "compute capability 7.2"),
        ((7, 5), {torch.float16, torch.bfloat16}, True, "bfloat16"),
        ((7, 5), {torch.float16}, True, None),
        ((8, 0), {torch.bfloat16}, True, None),
        ((8, 6), {torch.float16}, False, "NVRTC"),
        ((9, 0), {torch.float16}, True, None),
        ((12, 0), {torch.bfloat16}, False, "NVRTC"),
        ((12, 0), {torch.bfloat16}, True, None),
    ],
)
def test_what_a_card_must_have(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtypes: Any, nvrtc_there: bool, words: str | None
) -> None:
    monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
    monkeypatch.setattr(nvrtc, "supported", lambda device: nvrtc_there)
    found = eight_bits.unsupported(torch.device("cuda", 0), dtypes)
    assert (found is None) if words is None else words in str(found)


def test_a_card_that_cannot_has_the_exact_plan_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builder, "unsupported", lambda device, dtypes: reasons.OLD_FOR_EIGHT_BITS("7.0", "7.5"))
    on = On(OFF)
    on.call()
    on.call()
    on.acc.configure(ON)
    # the plan that is there already
    assert on.error() < 0.01
    assert on.error() < 0.01 and on.count("captures") == 1 and len(on.acc.plans) == 1
    assert "7.5 or later" in on.status()["reason"]["text"]
    for _ in range(10):
        on.acc.new_generation()
    assert on.error() < 0.01 and on.count("captures") == 1


def test_copies_and_files_of_the_model_have_no_second_copy_of_weights() -> None:
    on = On()
    for _ in range(2):
        on.call()
    size = sum(p.nbytes for p in on.twin.parameters())
    for made in (copy.deepcopy(on.ours), pickle.loads(pickle.dumps(on.ours))):
        held = [t for m in made.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        assert sum(t.nbytes for t in held) == size and {t.dtype for t in held} == {HALF}
        assert not [t for m in made.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    assert {name: t.shape for name, t in on.ours.state_dict().items()} == {
        name: t.shape for name, t in on.twin.state_dict().items()
    }


def test_a_release_frees_everything() -> None:
    on = On()
    for _ in range(2):
        on.call()
    banks = on.acc.arena.banks
    assert len(banks) == LAYERS
    on.acc.release()
    gc.collect()
    assert len(banks) == 0
    assert all(torch.equal(a, b) for a, b in zip(on.ours.parameters(), on.twin.parameters()))
