"""Plans of a model whose own products round their inputs to 8 bits: they may differ by as much as a last bit makes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import kitchen_standin
import pytest
import torch
from torch import fx, nn

from sfast_ext import Config, accelerate
from sfast_ext.plans.graph_facts import rounds_inputs
from sfast_ext.runtime.verify import Comparison, relative_error, rounded_otherwise

aten = torch.ops.aten


def refusal(error, moves=1.0, rounds=True, measured=True):
    """Of a plan that is off by `error`, of an original whose results a last bit moves by about `moves` / 10."""
    x = torch.linspace(1, 2, 4096)

    def original():
        if not measured:
            raise RuntimeError("not under a mode")
        return torch.sin(x * 2e5 * moves)

    wanted = torch.sin(x * 2e5 * moves)
    plan = SimpleNamespace(
        error=None, rounding_error=None, noise=None, banks=[], rounds_inputs=rounds, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(wanted.shape, generator=generator)
    outputs = wanted + noise * (error * wanted.norm() / noise.norm())
    return Comparison(plan, [outputs], [wanted], Config(tolerance=0.02), original).difference()


def test_the_original_of_these_tests_moves_as_they_say():
    x = torch.linspace(1, 2, 4096)
    (moved,) = rounded_otherwise(lambda: torch.sin(x * 2e5))
    assert 0.05 < relative_error([moved], [torch.sin(x * 2e5)]) < 0.2


@pytest.mark.parametrize("error", [0.0, 0.019, 0.021, 0.04, 0.06])
def test_a_plan_within_what_a_last_bit_makes_is_kept(error):
    assert refusal(error) is None


@pytest.mark.parametrize("error, options", [
    (0.04, {"rounds": False}), (0.06, {"moves": 0.1}), (0.04, {"measured": False}), (0.3, {}), (0.3, {"moves": 5}),
    (float("inf"), {}), (float("nan"), {}),
])  # fmt: skip
def test_any_other_is_dropped(error, options):
    assert refusal(error, **options) is not None


@pytest.mark.parametrize("error, noise, tolerance, kept", [
    (0.05, [0.1], 0.02, True), (0.05, [0.01, 0.1], 0.02, True), (0.05, [0.1], 0.005, False),
    (0.05, [0.03], 0.02, False), (0.05, None, 0.02, False), (0.05, [float("inf")], 0.02, False),
    (0.2, [0.5], 0.02, False), (0.01, None, 0.02, True),
])  # fmt: skip
def test_settings_that_change_nothing_keep_what_was_kept(error, noise, tolerance, kept):
    net, config = kitchen_standin.Net(), Config(allow_cpu=True, drop_slower=False)
    accelerator = accelerate(net, config)
    with torch.inference_mode():
        for _ in range(3):
            net(torch.randn(2, 4, 4, 4))
    (plan,) = accelerator.plans.values()
    plan.rounds_inputs, plan.error, plan.noise = True, error, noise
    accelerator.configure(replace(config, max_plans=9, tolerance=tolerance))
    assert (plan in accelerator.plans.values()) is kept
    accelerator.release()


def graph(make):
    root, found = nn.Module(), fx.Graph()
    root.register_buffer("codes", torch.zeros(4, 4, dtype=torch.int8))
    root.register_buffer("scale", torch.ones(()))
    x = found.placeholder("x")
    x.meta["val"] = torch.ones(2, 4)
    codes, scale = found.get_attr("codes"), found.get_attr("scale")
    codes.meta["val"], scale.meta["val"] = root.codes, root.scale

    def call(target, *args, dtype=torch.float32):
        node = found.call_function(target, args)
        node.meta["val"] = torch.empty(2, 4, dtype=dtype)
        return node

    found.output(make(x, codes, scale, call))
    return found


def product(x, codes, scale, call):
    """An operation of a library that takes the input as it is."""
    return call(kitchen_standin.product, x, codes, scale)


def of_codes(x, codes, scale, call):
    rounded = call(aten.to.dtype, call(aten.round.default, x), torch.int8, dtype=torch.int8)
    return call(aten._int_mm.default, rounded, call(aten.t.default, codes, dtype=torch.int8), dtype=torch.int32)


def of_float8(x, codes, scale, call):
    rounded = call(aten.to.dtype, x, torch.float8_e4m3fn, dtype=torch.float8_e4m3fn)
    return call(aten.mul.Tensor, rounded, scale)


def dequantised(x, codes, scale, call):
    wide = call(aten.mul.Tensor, call(aten.to.dtype, codes, torch.float32), scale)
    return call(aten.linear.default, x, wide)


def dequantised_transposed(x, codes, scale, call):
    wide = call(aten.mul.Tensor, call(aten.t.default, codes, dtype=torch.int8), scale)
    return call(aten.mm.default, x, wide)


def integers(dtype, cast):
    """Multiplies by another input, which is of whole numbers."""

    def make(x, codes, scale, call):
        with x.graph.inserting_after(x):
            mask = x.graph.placeholder("mask")
        mask.meta["val"] = torch.ones(2, 4, dtype=dtype)
        narrow = call(aten.to.dtype, mask, torch.int8, dtype=torch.int8)
        return call(aten.mul.Tensor, x, call(aten.to.dtype, narrow, torch.float32) if cast else narrow)

    return make


def of_mask(*steps):
    """Multiplies by a mask of 8 bits that tells something of the input."""

    def make(x, codes, scale, call):
        told = x
        for step, dtype in steps:
            told = call(step, told, dtype, dtype=dtype) if step is aten.to.dtype else call(step, told, 0, dtype=dtype)
        narrow = call(aten.to.dtype, told, torch.int8, dtype=torch.int8)
        return call(aten.mul.Tensor, x, narrow)

    return make


ABOVE, WIDE = (aten.gt.Scalar, torch.bool), (aten.to.dtype, torch.float32)
MASKS = {
    "a comparison": of_mask(ABOVE),
    "a comparison as a number": of_mask(ABOVE, WIDE, (aten.mul.Tensor, torch.float32)),
    "comparisons": of_mask(ABOVE, (aten.bitwise_and.Scalar, torch.bool)),
    "a sign": of_mask((aten.sign.default, torch.float32)),
    "an index": of_mask((aten.argmax.default, torch.int64)),
    "the input as it is": of_mask(),
}


def of_wide_codes(x, codes, scale, call):
    whole = call(aten.to.dtype, call(aten.round.default, x), torch.int32, dtype=torch.int32)
    rounded = call(aten.to.dtype, call(aten.clamp.default, whole, -127, 127, dtype=torch.int32), torch.int8,
                   dtype=torch.int8)  # fmt: skip
    return call(aten._int_mm.default, rounded, call(aten.t.default, codes, dtype=torch.int8), dtype=torch.int32)


def of_quotient(x, codes, scale, call):
    rounded = call(aten.to.dtype, call(aten.view.default, call(aten.div.Tensor, x, scale), [2, 4]), torch.int8,
                   dtype=torch.int8)  # fmt: skip
    return call(aten._int_mm.default, rounded, call(aten.t.default, codes, dtype=torch.int8), dtype=torch.int32)


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_that_tell_something_of_the_input_round_nothing(make):
    assert not rounds_inputs(graph(make))


@pytest.mark.parametrize("make", [product, of_codes, of_float8, of_wide_codes, of_quotient])
def test_products_that_round_their_inputs(make):
    assert rounds_inputs(graph(make))


@pytest.mark.parametrize("make", [
    dequantised, dequantised_transposed, lambda x, *_: x, *(integers(*each) for each in (
        (torch.int8, True), (torch.int8, False), (torch.bool, True), (torch.int64, False))),
])  # fmt: skip
def test_products_with_weights_that_are_widened_first_do_not(make):
    assert not rounds_inputs(graph(make))
