"""Which layers are quantised, by the error of each on a call's inputs."""

from __future__ import annotations

import math
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.eight_bits import quantise_rows, quantise_weights
from sfast_ext.passes import eight_bits_selection
from sfast_ext.passes.eight_bits_selection import LIMIT, Errors, Selection

from .support import randn
from .transformers import (
    HALF,
    PROMPT,
    TOKENS,
    Block,
    C,
    Wrapped,
    after_a_norm,
    after_an_attention,
    count,
    rewritten,
    traced,
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bit_kernels.available(monkeypatch, by_triton=True)


def outliers(m: Wrapped, x: Tensor) -> Any:
    """Some channels of what a norm writes are large."""
    return m.one(m.norm(x)).sin()


@pytest.mark.parametrize("factor", [1, 50, 400])
def test_layers_with_outliers_are_rotated_if_that_helps_and_kept_if_not(factor: float) -> None:
    torch.manual_seed(0)
    module = Wrapped(after_a_norm, 512)
    with torch.no_grad():
        module.norm.weight[5] *= factor
        # the outlier adds nothing: what is lost of the others is all there is
        module.one.weight[:, 5] = 0
    on = traced(module, randn(2, 160, 512))
    ops = rewritten(on)
    (errors,) = on.ctx.eight_bits.errors.values()
    assert ops["layer_norm8"] == (factor == 1) and ops["quantise_rows"] == (factor == 50)
    assert ops["linear8"] == (factor != 400)
    assert (errors.plain > LIMIT) == (factor != 1) and (errors.rotated > LIMIT) == (factor == 400)
    assert on.error() < 0.06
    if factor == 400:
        assert on.ctx.eight_bits.listed() == [("one", errors.least)]


def test_a_rotation_of_geglu_and_of_attentions() -> None:
    class Peaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.out = nn.Linear(64, 512), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.wide(x).chunk(2, -1)
            return self.out(value * F.gelu(gate))

    module = Peaks()
    with torch.no_grad():
        module.wide.weight[3] *= 20
        module.wide.weight[256 + 3] *= 20
    on = traced(module, randn(2, 160, 64))
    assert rewritten(on)["linear8"] == 1
    (rows,) = on.launches(quantise_rows)
    assert rows.kwargs == {"group": 256} and on.launches(quantise_weights)[0].args[4] == [256]
    assert on.error() < 0.05


def test_one_selection_for_all_plans() -> None:
    selection = Selection()
    module = Block().to(HALF)
    rewritten(traced(module, TOKENS, PROMPT, selection=selection))
    known = dict(selection.errors)
    selection.kept.add("ff_out")
    on = traced(module, randn(3, 150, C), randn(3, 7, 32), selection=selection)
    ops = rewritten(on)
    assert selection.errors == known and ops["linear8"] == 4 and ops["geglu8"] == 1
    assert on.error() < 0.05


def test_further_layers_are_kept_those_first_that_add_most_for_their_work() -> None:
    on = traced(Block(), TOKENS, PROMPT)
    rewritten(on)
    selection = on.ctx.eight_bits
    works = {name: error.work / (2 * 160 * C * C) for name, error in selection.errors.items()}
    assert works == {
        "attn1.to_q+to_k+to_v": 3, "attn1.to_out": 1, "attn2.to_q": 1, "attn2.to_out": 1, "ff_in": 8, "ff_out": 4,
    }  # fmt: skip
    order = sorted(works, key=lambda name: -(selection.errors[name].least ** 2) / works[name])
    for n in range(1, 6):
        selection.tightened = 0
        assert selection.tighten()
        assert selection.kept == {*order[:n]}
    selection.tightened = 0
    assert {name for name, _ in selection.listed()} == {*order[:5]}
    assert not selection.tighten()


@pytest.mark.parametrize(
    ("excess", "kept"),
    [
        (1.0, 10),  # a tenth at least
        (1.01, 12),
        (1.25, 43),  # (0.95 / 1.25)² of the squares may be left
        (2.0, 50),  # half of them at most
        (1e9, 50),
        (math.inf, 10),
        (math.nan, 10),
    ],
)
def test_as_many_are_kept_as_the_result_was_too_far_off(excess: float, kept: int) -> None:
    selection = Selection({f"{n}": Errors(0.01, 0.02, 0, 1000.0 - n) for n in range(100)})
    selection.excess = excess
    assert selection.tighten() and selection.kept == {str(n) for n in range(99, 99 - kept, -1)}
    # the second time it must do
    selection.excess = 1.1
    left = 100 - kept
    assert selection.tighten()
    assert abs(len(selection.kept) - kept - left * 0.5) <= 1


def test_a_large_layer_stays_where_small_ones_add_as_much() -> None:
    errors = {"large": Errors(0.02, 0.02, 0, 60e9), **{f"{n}": Errors(0.01, 0.01, 0, 3e9) for n in range(9)}}
    selection = Selection(dict(errors))
    while len(selection.kept) < 9:
        assert "large" not in selection.kept
        selection.excess, selection.tightened = 1.0, 0
        assert selection.tighten()
    assert "large" not in selection.kept and len(selection.kept) == 9


def test_values_that_are_not_finite_keep_a_layer() -> None:
    x = TOKENS.clone()
    x[0, 0, 0] = math.inf
    on, ops = count(after_an_attention, x)
    assert ops["linear8"] == 0
    # a number that JSON has
    assert on.ctx.eight_bits.listed() == [("attention.to_out", 1.0)]


def test_defaults_of_torch_do_not_matter() -> None:
    module = Block().to(HALF)
    on = traced(module, TOKENS, PROMPT)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert rewritten(on)["linear8"] == 5
    finally:
        torch.set_default_dtype(torch.float32)
    assert on.error() < 0.05


def test_a_layer_of_zeros_is_exact() -> None:
    module = Wrapped(after_a_norm)
    nn.init.zeros_(module.one.weight)
    on = traced(module, TOKENS)
    assert rewritten(on)["linear8"] == 1
    assert [tuple(error)[:2] for error in on.ctx.eight_bits.errors.values()] == [(0.0, 0.0)]
    assert on.error() < 1e-2


def test_a_call_of_values_that_are_not_finite_shows_no_layer_s_error() -> None:
    module = Block()
    black = traced(module, torch.full_like(TOKENS, math.nan), PROMPT)
    assert rewritten(black)["linear8"] == 0
    selection = black.ctx.eight_bits
    assert not selection.errors and not selection.kept and "not finite" in str(selection.obstacle)
    on = traced(module, TOKENS, PROMPT)
    selection.inputs = on.ctx.eight_bits.inputs
    on.ctx.eight_bits = selection
    assert rewritten(on)["linear8"] > 1 and selection.errors and not selection.kept


def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are: values are read at the end, and what comes from the CPU comes once."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"):
        real = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, *a, real=real, name=name: reads.append(name) or real(x, *a))
    sent: list[int] = []
    real_matrix = eight_bits_selection.hadamard
    monkeypatch.setattr(
        eight_bits_selection, "hadamard", lambda size, device: sent.append(size) or real_matrix(size, device)
    )
    module = Block().to(HALF)
    on = traced(module, TOKENS, PROMPT)
    reads.clear()
    rewritten(on)
    assert len(on.ctx.eight_bits.errors) == 6
    assert [name for name in reads if name != "__bool__"].count("tolist") == 1
    assert sorted(sent) == [64, 256]
