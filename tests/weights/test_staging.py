"""Copies from system memory through two pinned buffers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import numpy as np
import pytest
import torch
from pretended_card import GPU, pretended_card

from sfast_ext.weights import pinned_buffers, staging
from sfast_ext.weights.staging import Staging, is_dense

SHAPES = [(0,), (), (1,), (7,), (63, 1), (3, 5, 7), (129, 33), (2, 64, 3, 3), (100, 100), (5, 1, 2, 2)]


class Buffers(Staging):
    """Notes if one is filled too early. On a CPU a copy is made when it is called."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.log: list[tuple[str, int]] = []

    def _event(self):
        log, number = self.log, len(self.log)
        self.log.append(("made", number))

        class Event:
            def record(self, stream=None):
                assert stream == GPU
                log.append(("record", number))

            def synchronize(self):
                log.append(("synchronize", number))

        return Event()

    def _stream(self, device):
        return device


def laid(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values


@pytest.fixture
def card(monkeypatch):
    with pretended_card(monkeypatch, 1 << 30) as card:
        yield card


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("layouts", [("plain", "plain"), ("channels last", "plain"), ("plain", "channels last")])
@pytest.mark.parametrize("size", [64, 1000, 1 << 20])
def test_copies_are_exact(card, dtype, layouts, size):
    buffers = Buffers(size)
    sources = [laid((torch.randn(shape) * 50).to(dtype), layouts[0]) for shape in SHAPES]
    there = [laid(torch.full(shape, 1, dtype=dtype), layouts[1]).to(GPU) for shape in SHAPES]
    with buffers as copy:
        for to, source in zip(there, sources):
            strides = to.stride()
            copy(to, source)
            assert to.stride() == strides
    for to, source in zip(there, sources):
        assert torch.equal(to.to("cpu"), source)
    # a buffer is filled again after what was copied from it arrived: each is waited for in turn, after it was sent
    events = [event for event in buffers.log if event[0] != "made"]
    turns: list[list[tuple[str, int]]] = [[]]
    for event in events:
        turns[-1].append(event)
        if event[0] == "synchronize":
            turns.append([])
    for i, turn in enumerate(turns):
        *sent, last = turn if i < len(turns) - 1 else [*turn, ("synchronize", 1 - i % 2)]
        assert sent and set(sent) == {("record", i % 2)} and last == ("synchronize", 1 - i % 2)
    assert (len(turns) > 1) == (size < 1 << 20)


def test_a_source_without_gaps_that_is_not_known_is_copied_as_before(card):
    source = torch.randn(6, 4).t()
    assert not is_dense(source)
    to, buffers = torch.zeros(4, 6).to(GPU), Buffers(64)
    with buffers as copy:
        copy(to, source)
    assert torch.equal(to.to("cpu"), source) and buffers.log == []


def test_weights_made_under_inference_mode(card):
    with torch.inference_mode():
        source = torch.randn(100)
    to, buffers = torch.zeros(100).to(GPU), Buffers(64)
    with buffers as copy:
        copy(to, source)
    assert torch.equal(to.to("cpu"), source) and buffers.log


def test_weights_made_under_inference_mode_and_moved_outside_of_it(card):
    with torch.inference_mode():
        layer = torch.nn.Linear(10, 10, bias=False)
    # as `Module.to` does with another device: it passes for a normal tensor then, of which no view can be taken
    layer.weight.data = torch.randn(10, 10)
    to, buffers = torch.zeros(10, 10).to(GPU), Buffers(64)
    with buffers as copy:
        copy(to, layer.weight.detach())
    assert torch.equal(to.to("cpu"), layer.weight) and buffers.log


def test_without_memory_to_pin_it_copies_as_before(card, monkeypatch):
    def refuse(size):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinned_buffers, "_buffer", refuse)
    source, to = torch.randn(9), torch.zeros(9).to(GPU)
    with Staging() as copy:
        copy(to, source)
    assert torch.equal(to.to("cpu"), source)


def test_with_a_single_thread_it_copies_as_before(card, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    source, to, buffers = torch.randn(9), torch.zeros(9).to(GPU), Buffers(64)
    with buffers as copy:
        copy(to, source)
    assert torch.equal(to.to("cpu"), source) and buffers.log == []


def test_with_a_numpy_that_torch_cannot_use_it_copies_as_before(card, monkeypatch):
    def refuse(self):
        raise RuntimeError("Numpy is not available")

    source, to, buffers = torch.randn(9), torch.zeros(9).to(GPU), Buffers(64)
    with monkeypatch.context() as patch, buffers as copy:
        patch.setattr(torch.Tensor, "numpy", refuse)
        copy(to, source)
    assert torch.equal(to.to("cpu"), source) and buffers._pool is None


def test_the_threads_end_with_it_whatever_happens(card):
    before, buffers = set(threading.enumerate()), Buffers(64)
    with contextlib.suppress(KeyError), buffers as copy:
        copy(torch.zeros(100).to(GPU), torch.randn(100))
        assert set(threading.enumerate()) > before
        raise KeyError
    assert set(threading.enumerate()) == before and not buffers._pieces


def test_what_a_thread_takes_is_bounded_and_all_is_taken_once():
    sizes = [0, 1, 5, staging._TASK_BYTES - 1, 3 * staging._TASK_BYTES + 7, 2, 2]
    sources = [np.arange(size, dtype=np.uint8) for size in sizes]
    copies = [(np.full_like(source, 0xAA), source) for source in sources]
    tasks = list(staging._tasks(copies))
    assert all(sum(len(to) for to, _ in task) < 2 * staging._TASK_BYTES for task in tasks)
    left = deque(tasks)
    staging._fill(left)
    assert not left
    assert all((to == source).all() for to, source in copies)
    assert sum(len(to) for task in tasks for to, _ in task) == sum(sizes)


def test_between_tensors_of_one_device_nothing_is_staged():
    source, to, buffers = torch.randn(9), torch.zeros(9), Buffers(64)
    with buffers as copy:
        copy(to, source)
    assert torch.equal(to, source) and buffers.log == []


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 32 << 20])
def test_on_a_gpu_the_sources_may_be_written_afterwards(size):
    shapes = [*SHAPES, (1280, 640, 3, 3), (2560, 1280), (1001, 999)] * 2
    sources = [torch.randn(shape, dtype=torch.float16) for shape in shapes]
    expected = [source.clone() for source in sources]
    there = [torch.full(shape, float("nan"), dtype=torch.float16, device="cuda") for shape in shapes]
    there = [laid(to, "channels last") if i % 2 else to for i, to in enumerate(there)]
    torch.cuda._sleep(20_000_000)
    with Staging(size) as copy:
        for to, source in zip(there, sources):
            copy(to, source)
    for source in sources:
        source.fill_(7)
    for to, values in zip(there, expected):
        assert torch.equal(to.cpu(), values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [64, 1000, 1 << 20])
@pytest.mark.parametrize("threads", [2, 5])
def test_what_leaves_the_gpu_is_exact(dtype, size, threads):
    torch.manual_seed(size)
    layouts = ("plain", "channels last")
    sources = [laid((torch.randn(shape) * 9).to(dtype), layout) for shape in SHAPES for layout in layouts]
    sources += [torch.randn(40, 30).to(dtype)[:, 3:20], torch.randn(9, 1).to(dtype).expand(9, 4)]
    buffers = [torch.full((size,), 0xAA, dtype=torch.uint8) for _ in range(2)]
    waits = []

    class Event:
        def synchronize(self):
            waits.append(size)

    made = staging._through(buffers, sources, threads, Event)
    for found, source in zip(made, sources, strict=True):
        assert torch.equal(found, source) and found.dtype == source.dtype
        if source.numel() and is_dense(source):
            assert found.stride() == source.stride() and found.data_ptr() != source.data_ptr()
    total = sum(source.nbytes for source in sources if is_dense(source))
    assert len(waits) >= total / size


def test_tensors_of_two_devices_leave_without_buffers(card, monkeypatch):
    values, pinned, empty = [torch.randn(50).to(GPU), torch.randn(50)], [], torch.empty

    def noted(*args, pin_memory=False, **kwargs):
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 64)
    monkeypatch.setattr(torch, "empty", noted)
    for found, value in zip(staging.to_system_memory(values), values, strict=True):
        assert torch.equal(found, value.to("cpu"))
    assert True not in pinned


@pytest.mark.parametrize("home, name", [(pinned_buffers, "_buffer"), (torch.Tensor, "numpy")])
def test_without_memory_to_pin_or_numpy_they_leave_without_buffers(card, monkeypatch, home, name):
    values, asked = [torch.randn(50).to(GPU), torch.randn(9, 9).to(GPU)], []

    def refuse(*_):
        asked.append(name)
        raise RuntimeError("refused")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 64)
    with monkeypatch.context() as patch:
        patch.setattr(home, name, refuse)
        made = staging.to_system_memory(values)
    assert asked and all(torch.equal(found, value.to("cpu")) for found, value in zip(made, values))


def test_on_a_cpu_nothing_is_staged():
    values = [torch.randn(5, 5), torch.randn(3)]
    assert all(map(torch.equal, staging.to_system_memory(values), values))
    assert staging.to_system_memory([]) == []
