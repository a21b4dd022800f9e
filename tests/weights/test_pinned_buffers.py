"""Buffers of pinned memory, which one copy after another takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_card import GPU, pretended_card

from sfast_ext.weights import pinned_buffers
from sfast_ext.weights.staging import BUFFER_BYTES, Staging, to_system_memory

MADE: list[int] = []


@pytest.fixture(autouse=True)
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pretended card, on which buffers are counted, with threads that copy; not in place of a GPU."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    MADE.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pretended_card(monkeypatch, 1 << 30):
        made = pinned_buffers._buffer
        monkeypatch.setattr(pinned_buffers, "_buffer", lambda size: MADE.append(size) or made(size))
        yield


def copied(size: int = 100) -> None:
    source, to = torch.randn(size), torch.zeros(size).to(GPU)
    with Staging() as copy:
        copy(to, source)
    assert torch.equal(to.to("cpu"), source)


class Arrival:
    """Notes whether it was waited for."""

    waited = False

    def synchronize(self) -> None:
        self.waited = True


def test_one_copy_after_another_takes_the_same_two() -> None:
    for _ in range(3):
        copied()
    assert len(MADE) == 2


def test_copies_from_the_gpu_take_them_too() -> None:
    copied()
    size = MADE[0]
    pinned_buffers.free()
    MADE.clear()
    values = [torch.randn(BUFFER_BYTES // 4).to(GPU), torch.randn(7).to(GPU)]
    for _ in range(2):
        assert all(map(torch.equal, to_system_memory(values), [value.to("cpu") for value in values]))
    assert MADE == [BUFFER_BYTES] * 2 and size != BUFFER_BYTES


def test_two_copies_at_once_have_buffers_of_their_own() -> None:
    source, to, other = torch.randn(9), torch.zeros(9).to(GPU), torch.zeros(9).to(GPU)
    with Staging() as first, Staging() as second:
        first(to, source)
        second(other, -source)
    assert torch.equal(to.to("cpu"), source) and torch.equal(other.to("cpu"), -source)
    assert len(MADE) == 4
    copied()
    assert len(MADE) == 4


def test_what_is_copied_from_them_is_waited_for() -> None:
    buffers, arrival = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)], Arrival()
    pinned_buffers.give_back(buffers, arrival)
    assert not arrival.waited
    assert pinned_buffers.take(8) is buffers and arrival.waited


def test_they_are_taken_in_and_out_of_inference_mode() -> None:
    source, to = torch.randn(9), torch.zeros(9).to(GPU)
    for mode in (True, False, True):
        with torch.inference_mode(mode), Staging() as copy:
            copy(to, source)
    values = [torch.randn(BUFFER_BYTES // 4).to(GPU)]
    pinned_buffers.free()
    with torch.inference_mode():
        pinned_buffers.give_back(pinned_buffers.take(BUFFER_BYTES) or [])
    with torch.no_grad():
        assert torch.equal(to_system_memory(values)[0], values[0].to("cpu"))


def test_what_was_sent_last_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Marked(Arrival):
        def record(self, stream: object = None) -> None:
            pass

        def synchronize(self) -> None:
            waited.append(self)

    made: list[Marked] = []
    monkeypatch.setattr(Staging, "_event", lambda self: made.append(Marked()) or made[-1])
    source, to = torch.randn(9), torch.zeros(9).to(GPU)
    staging = Staging()
    with staging as copy:
        copy(to, source)
        # the other buffer is next, and nothing is sent of it
        staging.deliver()
    waited.clear()
    pinned_buffers.take(MADE[0])
    assert waited == made[:1]


def test_those_of_another_size_are_not_taken() -> None:
    buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    pinned_buffers.give_back(buffers)
    taken = pinned_buffers.take(16)
    assert taken is not None and list(map(len, taken)) == [16, 16]


def test_a_copy_that_failed_leaves_none() -> None:
    with pytest.raises(RuntimeError, match="injected"), Staging() as copy:
        copy(torch.zeros(9).to(GPU), torch.randn(9))
        raise RuntimeError("injected")
    copied()
    assert len(MADE) == 4


@pytest.mark.parametrize("name", ["_host_emptyCache", "_accelerator_emptyHostCache"])
def test_free_has_torch_give_its_pinned_memory_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emptied = []
    for each in ("_host_emptyCache", "_accelerator_emptyHostCache"):
        monkeypatch.delattr(torch._C, each, raising=False)
    monkeypatch.setattr(torch._C, name, lambda: emptied.append(name), raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    pinned_buffers.give_back([torch.zeros(8, dtype=torch.uint8)] * 2)
    pinned_buffers.free()
    assert not pinned_buffers._spare and not emptied
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pinned_buffers.free()
    assert emptied == [name]


def test_free_with_a_torch_that_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("_host_emptyCache", "_accelerator_emptyHostCache"):
        monkeypatch.delattr(torch._C, each, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pinned_buffers.free()


@pytest.mark.gpu
def test_memory_goes_back_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None:
        pytest.skip("this torch does not tell what it has pinned")
    pinned_buffers.free()
    before = statistics().get("allocated_bytes.current", 0)
    to = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(4):
        with Staging() as copy:
            copy(to, torch.ones(BUFFER_BYTES, dtype=torch.uint8))
    assert bool((to == 1).all())
    # torch pins a few bytes itself
    assert 0 <= statistics()["allocated_bytes.current"] - before - 2 * BUFFER_BYTES < 1024
    pinned_buffers.free()
    assert statistics()["allocated_bytes.current"] - before < 1024
