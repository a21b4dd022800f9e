"""Plans with other layers in 8 bits than the plans before have, as after layers were selected anew."""

# ruff: noqa: F811
from __future__ import annotations

from typing import Any

import eight_bit_kernels
import pytest
from pretended_card import Card

from sfast_ext import reasons
from sfast_ext.runtime.plan_cache import PlanKey
from sfast_ext.runtime.plan_finder import Lookup
from sfast_ext.runtime.plan_runner import PlanRunner

from .eight_bits import On
from .test_resident import WEIGHTS, away, card, halves, kernels, started  # noqa: F401

OTHERS = tuple(name for name in WEIGHTS if not name.startswith("ff_"))
SELECTIONS = [((), ("ff_out",)), (("ff_out",), ()), (("to_out",), ("ff_out",))]
"""Layers that are too inaccurate for the first plan, and for the second."""


def selected(monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], second: tuple[str, ...]) -> On:
    """A plan for 256 rows, and then one for 512, for which layers are selected anew."""
    on = started(calls=0)
    for rows, kept in ((256, first), (512, second)):
        with monkeypatch.context() as patch:
            eight_bit_kernels.too_inaccurate(patch, kept)
            on.acc._context.model.eight_bits._selections.clear()
            for _ in range(3):
                assert on.error(rows) < 0.05
    return on


@pytest.mark.parametrize(("first", "second"), SELECTIONS)
def test_plans_run_in_turns(
    card: Card, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    on = selected(monkeypatch, first, second)
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


@pytest.mark.parametrize(("first", "second"), [(("ff_in", "ff_out"), OTHERS), ((*OTHERS, "ff_in"), ("ff_out",))])
def test_a_plan_gets_its_layers_although_another_reads_them_all(
    card: Card, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    on = selected(monkeypatch, first, second)
    # without 8 bits it would need all weights on the GPU, and each of the two would be made anew in turns
    for rows in (256, 512) * 3:
        assert on.error(rows) < 0.05
    assert on.count("captures") == 3 and all(plan.resident for plan in on.acc.plans.values())
    assert len(on.acc.plans) == 2 and not on.acc.report.as_dict()["reasons_since_start"]
    assert away(on) == len(halves(on.ours)) - 2 * len(second)


def test_a_plan_that_was_dropped_since_it_was_found(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    on = started(calls=2)
    run, dropped = PlanRunner.run, list[PlanKey]()

    def another_thread_first(runner: PlanRunner, lookup: Lookup, *rest: Any) -> Any:
        on.acc.drop_plan(lookup.key)
        dropped.append(lookup.key)
        return run(runner, lookup, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(PlanRunner, "run", another_thread_first)
        assert on.error() == 0.0
    # the original forward ran, and a plan is made again
    assert dropped and str(reasons.PLAN_DROPPED()) in on.acc.report.as_dict()["reasons_since_start"]
    for _ in range(2):
        assert on.error() < 0.05
    assert on.count("captures") == 2 and on.count("errors") == 0 and on.acc.plans.keys() == {*dropped}
