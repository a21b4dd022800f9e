from __future__ import annotations

import gc
import weakref

import pytest

from sfast_ext import gc_pause
from sfast_ext.gc_pause import gc_paused


@pytest.fixture(scope="module", autouse=True)
def thawed():
    """As in a host, where nobody has frozen anything."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_often_as_python_does(monkeypatch):
    """Nobody has asked for fewer collections either."""
    monkeypatch.setattr(gc_pause, "_seen_frozen", False)
    threshold = gc.get_threshold()
    gc.set_threshold(700)
    yield
    gc.set_threshold(*threshold)


@pytest.fixture
def collections():
    """The generations that are collected."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


class Ring:
    def __init__(self) -> None:
        self.own = self


def kept(count: int) -> list[list[int]]:
    return [[i] for i in range(count)]


def test_nothing_is_collected_within(collections):
    with gc_paused():
        ring = weakref.ref(Ring())
        things = kept(200_000)
        assert not collections and ring() is not None and not gc.isenabled()
    assert gc.isenabled() and ring() is None and len(things) == 200_000


def test_what_was_made_brings_about_no_collection_of_all_there_is(collections):
    everything = 2
    with gc_paused():
        things = kept(len(gc.get_objects()))
    more = [kept(1000) for _ in range(30)]
    assert collections and everything not in collections
    del things, more


def test_what_was_made_is_collected_later():
    with gc_paused():
        ring = Ring()
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None


def test_one_in_another_leaves_collections_off(collections):
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled() and not collections
    assert gc.isenabled()


def test_where_they_were_off_they_stay_off(collections):
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled() and not collections
    finally:
        gc.enable()


def test_what_somebody_has_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > 0
        with gc_paused():
            pass
        assert gc.get_freeze_count() >= 0.9 * frozen and gc.isenabled()
    finally:
        gc.unfreeze()


def test_what_python_freezes_at_its_start_is_nobody_s_choice(monkeypatch):
    # as Python 3.12.3 does
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() + 375)
    for _ in range(5):
        gc.collect(1)
    with gc_paused():
        pass
    # no collection of all is due
    assert gc.get_count()[2] == 0


def test_what_is_frozen_is_counted_once(monkeypatch):
    asked = []

    def count():
        asked.append(1)
        return 1_000_000

    monkeypatch.setattr(gc, "get_freeze_count", count)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("thawed"))
    for _ in range(3):
        with gc_paused():
            pass
    assert len(asked) == 1


def test_survivors_are_moved_again_once_what_was_frozen_is_thawed(monkeypatch):
    monkeypatch.setattr(gc_pause, "LARGE", 1 << 60)
    assert gc_pause.freeze()
    with gc_paused():
        pass
    gc_pause.thaw()
    for _ in range(5):
        gc.collect(1)
    with gc_paused():
        pass
    # no collection of all is due
    assert gc.get_count()[2] == 0


def test_an_exception_ends_it():
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()
