"""Plans with other layers in 8 bits than the plans before have, as after layers were selected anew."""

# ruff: noqa: F811
from __future__ import annotations

import eight_bit_kernels
import pytest
from pretended_card import Card

from .test_resident import away, card, halves, kernels, started  # noqa: F401

SELECTIONS = [((), ("ff_out",)), (("ff_out",), ()), (("to_out",), ("ff_out",))]
"""Layers that are too inaccurate for the first plan, and for the second."""


@pytest.mark.parametrize(("first", "second"), SELECTIONS)
def test_plans_run_in_turns(
    card: Card, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    on = started(calls=0)
    for rows, kept in ((256, first), (512, second)):
        with monkeypatch.context() as patch:
            eight_bit_kernels.too_inaccurate(patch, kept)
            on.acc._context.model.eight_bits._selections.clear()
            for _ in range(3):
                assert on.error(rows) < 0.05
    for rows in (512, 256, 256, 512, 256, 512):
        if rows == 512:
            on.both(lambda m: m.blocks[0].ff_out.weight.mul_(-1.1))
        assert on.error(rows) < 0.05
    report = on.acc.report.as_dict()
    # nothing is made in turns: the first is made again once if it has what the second needs
    assert not report["reasons_since_start"] and on.count("captures") == (2 if second == () else 3)
    assert len(on.acc.plans) == 2 and on.count("errors") == 0 and on.count("weights_brought_back") < 3
    # what one of them reads stays on the GPU
    kept = {*first, *second}
    assert away(on) == len(halves(on.ours)) - 2 * len(kept)
    assert all(getattr(block, name).weight.is_cuda for block in on.ours.blocks for name in kept)
