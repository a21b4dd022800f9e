"""Values in 8 bits that gave way to others: they come back from system memory, unless what they are made of changed."""

from __future__ import annotations

import gc
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended_card import GPU, Card

from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.weights import banks as weights_banks
from sfast_ext.weights import resident as weights_resident
from sfast_ext.weights.banks import Bank

from .eight_bits import On, changed
from .test_resident import CARD, CHANGES, OFF, away, card, halves, kernels, started, uncounted  # noqa: F401


def give_way(on: On, most: float = math.inf) -> None:
    pool_of(GPU).make_room(on.acc.report, banks=most)


def quantised(on: On) -> int:
    """How many weights were quantised so far, and copied."""
    return int(on.acc.status()["weights"]["copied"])


def refused(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


def interrupted(*args: Any) -> Any:
    raise KeyboardInterrupt


def banks(on: On) -> list[Bank]:
    return on.acc.arena.resident.banks


def test_values_come_back_as_they_were(card: Card) -> None:  # noqa: F811
    on = started(calls=11)
    before, values = quantised(on), [[t.clone() for t in bank.tensors] for bank in banks(on)]
    for _ in range(3):
        give_way(on)
        assert on.status()["bytes"] == 0 and all(b.vacant and not b.ready for b in banks(on))
        for _ in range(2):
            assert on.error() < 0.05
        assert quantised(on) == before and all(b.ready for b in banks(on))
    assert all(torch.equal(a, b) for bank, was in zip(banks(on), values) for a, b in zip(bank.tensors, was))
    assert on.count("captures") == 1 and away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()


@pytest.mark.long(but=range(0, 99, 3))
@pytest.mark.parametrize("how", CHANGES)
def test_changes_are_followed_by_values_that_gave_way(card: Card, how: str) -> None:  # noqa: F811
    on = started(calls=11)
    for first in (False, False, True, True):
        if first:
            on.both(CHANGES[how])
            give_way(on)
        else:
            give_way(on)
            on.both(CHANGES[how])
        assert on.error() < 0.06, how
        # what was copied before the change does not come back with the next
        give_way(on)
        assert on.error() < 0.06, how
    assert on.count("captures") == 1 and on.count("errors") == 0, on.words()


@pytest.mark.parametrize("gave_way", [True, False])
def test_a_write_that_nothing_counts_is_read_while_the_plan_runs(
    card: Card, monkeypatch: pytest.MonkeyPatch, gave_way: bool  # noqa: F811
) -> None:
    monkeypatch.setattr(weights_resident, "AUDITED_BYTES", 0)
    # past the call that is compared again
    on = started(calls=14)
    if gave_way:
        give_way(on)
    on.both(uncounted)
    on.acc.new_generation()
    before, again = quantised(on), on.count("misspeculated")
    # of one call: the next one would find it as well
    assert on.error() < 0.06 and quantised(on) == before + 1 and on.count("misspeculated") == again + 1
    assert all(bank.ready for bank in banks(on)) and not on.acc.arena.resident.reads


def test_the_first_run_of_a_generation_does_not_wait_for_what_is_read(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    on, seen = started(calls=14), list[str]()
    run, read = PlanRunner.run, weights_resident.reading

    def reading(tensors: Any) -> Any:
        told = read(tensors)
        seen.append(f"begins to read {len(tensors)}")
        return lambda: [seen.append("waits"), told()][1]

    def runs(self: Any, *args: Any) -> Any:
        seen.append("runs")
        return run(self, *args)

    monkeypatch.setattr(weights_resident, "reading", reading)
    monkeypatch.setattr(PlanRunner, "run", runs)
    on.acc.new_generation()
    assert on.error() < 0.06
    assert seen == [f"begins to read {len(halves(on.ours))}", "runs", "waits"]


def test_values_come_back_to_blocks_of_their_own(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    on, vacant = started(calls=14), list[int]()
    give_way(on)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: vacant.append(sum(bank.vacant for bank in banks(on))))
    assert on.error() < 0.06
    # what the allocator holds free is given back before they get memory
    assert vacant[0] > 0


def begin_to_read(on: Any) -> None:
    """Values come back, and all weights are read meanwhile."""
    resident = on.acc.arena.resident
    resident.audit_all = True
    assert resident.due(on.acc.arena.banks.restore) == [] and resident.reads


def test_weights_that_are_read_meanwhile_are_told_of_by_the_next_question(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(weights_resident, "AUDITED_BYTES", 0)
    on = started(calls=11)
    resident = on.acc.arena.resident
    give_way(on)
    on.both(uncounted)
    begin_to_read(on)
    (due,) = resident.due()
    assert due.copies is not None and not resident.reads and resident.due() == [due]
    assert on.error() < 0.06 and due.copies is None


def test_what_was_read_for_a_call_that_was_interrupted_is_read_again(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(weights_resident, "AUDITED_BYTES", 0)
    on = started(calls=14)
    give_way(on)
    on.acc.new_generation()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PlanRunner, "run", interrupted)
        on.call()
    assert on.acc.arena.resident.reads
    on.both(uncounted)
    on.acc.new_generation()
    assert on.error() < 0.06


def test_what_was_read_before_a_generation_does_not_count_for_it(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(weights_resident, "AUDITED_BYTES", 0)
    on = started(calls=11)
    resident = on.acc.arena.resident
    give_way(on)
    begin_to_read(on)
    on.both(uncounted)
    resident.audit_all = True
    assert len(resident.due()) == 1 and not resident.reads


@pytest.mark.parametrize("check", ["first", "never"])
def test_what_another_thread_quantised_meanwhile_discards_a_result(
    card: Card, monkeypatch: pytest.MonkeyPatch, check: str  # noqa: F811
) -> None:
    monkeypatch.setattr(weights_resident, "AUDITED_BYTES", 0)
    on = started(replace(CARD, check=check), calls=14)
    give_way(on)
    on.both(uncounted)
    on.acc.new_generation()
    run, errors = PlanRunner.run, list[float]()

    def in_a_thread() -> None:
        with torch.no_grad(), card:
            errors.append(on.error())

    def run_both(*args: Any) -> Any:
        monkeypatch.setattr(PlanRunner, "run", run)
        result = run(*args)
        other = threading.Thread(target=in_a_thread)
        other.start()
        other.join()
        return result

    before = quantised(on)
    monkeypatch.setattr(PlanRunner, "run", run_both)
    assert on.error() < 0.06 and errors[0] < 0.06
    assert quantised(on) == before + 1 and on.count("errors") == 0, on.words()


def test_what_has_no_values_is_not_copied(card: Card) -> None:  # noqa: F811
    on = started(calls=11)
    bank = banks(on)[0]
    # as of one that is not filled yet
    bank.ready = False
    bank.rows.zero_()
    give_way(on)
    assert bank.copies is None and on.error() < 0.05


def test_no_more_gives_way_than_is_needed_and_the_largest_first(card: Card) -> None:  # noqa: F811
    on = started(calls=11)
    all_of_them, largest = on.status()["bytes"], max(bank.bytes for bank in banks(on))
    give_way(on, 0)
    assert on.status()["bytes"] == all_of_them and not on.plan.has_graph
    give_way(on, largest - 1)
    assert on.status()["bytes"] == all_of_them - largest
    give_way(on, largest + 1)
    assert sum(b.vacant for b in banks(on)) == 3 == sum(b.copies is not None for b in banks(on))
    before = quantised(on)
    # of these one came back, and one never went
    on.both(changed("in place", -1.5))
    assert on.error() < 0.06 and quantised(on) == before + 1 and on.status()["bytes"] == all_of_them
    assert on.count("errors") == 0, on.words()


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("what", ["room", "an error"])
def test_without_system_memory_they_are_quantised_again(
    card: Card, monkeypatch: pytest.MonkeyPatch, what: str  # noqa: F811
) -> None:
    on = started(calls=11)
    asked: list[int] = []
    if what == "room":
        monkeypatch.setattr(on.acc.arena.banks, "fits", lambda size: bool(asked.append(size)))
    else:
        monkeypatch.setattr(weights_banks, "to_system_memory", refused)
    size, before = on.status()["bytes"], quantised(on)
    give_way(on)
    assert on.status()["bytes"] == 0 and not any(bank.copies for bank in banks(on))
    assert asked == [size + weights_banks.COPIES_RESERVE] or what != "room"
    assert on.error() < 0.05 and quantised(on) == before + len(banks(on))
    assert on.count("errors") == 0, on.words()


def test_without_gpu_memory_they_stay_where_they_are(card: Card) -> None:  # noqa: F811
    on = started(calls=11)
    give_way(on)
    capacity, card.capacity = card.capacity, card.used + 20_000
    x = torch.randn(2, 8, 8).to("cuda", torch.bfloat16)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        on.ours(x)
    assert all(bank.vacant and bank.copies is not None for bank in banks(on))
    card.capacity = capacity
    before = quantised(on)
    assert on.error() < 0.05 and quantised(on) in (before, before + len(banks(on)))
    assert on.error() < 0.05 and away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("how", ["off", "released"])
def test_no_copy_is_left(card: Card, how: str) -> None:  # noqa: F811
    on = started(calls=11)
    give_way(on)
    on.call()
    assert all(bank.copies is not None for bank in banks(on))
    if how == "off":
        on.acc.configure(OFF)
    else:
        on.acc.release()
    gc.collect()
    held = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.int8
            and x.numel() >= 4096 and x.stride(-1)]  # fmt: skip
    assert not held and away(on) == 0
