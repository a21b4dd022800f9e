"""The allocator comes out of a capture that could not be ended, in each form that torch's functions have had."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sfast_ext.plans.graph_pool import _own_random_state, end_allocation, free_random_numbers

GPU = torch.device("cuda", 1)
POOL = (0, 7)
NAMES = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool")


class Allocator:
    """Of torch: notes what is called, and believes itself in a capture or not."""

    def __init__(self, patch: pytest.MonkeyPatch, underway: int) -> None:
        self.underway = underway
        self.told: list[object] = []
        for name in NAMES:
            patch.delattr(torch._C, name, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(self.told.append(stream)))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)

    def release(self, device: int, pool: object) -> None:
        self.told.append(("release", device, pool))

    def end(self, device: int, pool: object) -> None:
        """From torch 2.2 on."""
        if not self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway -= 1
        self.told.append(("end", device, pool))

    def end_without_a_pool(self, device: int) -> None:
        """In torch 2.1."""
        self.underway -= 1
        self.told.append(("end", device))

    def empty_cache(self) -> None:
        """In torch 2.1."""
        if self.underway:
            raise RuntimeError("captures_underway == 0 INTERNAL ASSERT FAILED")


@pytest.mark.parametrize("name", NAMES[:2])
def test_it_is_ended_and_its_share_of_the_pool_released(name, monkeypatch):
    allocator = Allocator(monkeypatch, 1)
    monkeypatch.setattr(torch._C, name, allocator.end, raising=False)
    end_allocation(GPU, POOL, "side")
    assert allocator.told == ["side", ("end", 1, POOL), ("release", 1, POOL)] and allocator.underway == 0


@pytest.mark.parametrize("name", NAMES[:2])
def test_one_that_was_ended_is_left_alone(name, monkeypatch):
    allocator = Allocator(monkeypatch, 0)
    monkeypatch.setattr(torch._C, name, allocator.end, raising=False)
    end_allocation(GPU, POOL, "side")
    assert allocator.told == ["side"]


@pytest.mark.parametrize("underway", [0, 1])
def test_in_torch_2_1_it_is_asked_first(underway, monkeypatch):
    allocator = Allocator(monkeypatch, underway)
    monkeypatch.setattr(torch._C, NAMES[1], allocator.end_without_a_pool, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.empty_cache)
    end_allocation(GPU, POOL, "side")
    assert allocator.underway == 0
    assert allocator.told == ["side", *([("end", 1), ("release", 1, POOL)] if underway else [])]


def test_a_torch_that_has_no_such_function(monkeypatch):
    allocator = Allocator(monkeypatch, 1)
    end_allocation(GPU, POOL, "side")
    assert allocator.told == ["side"]


class Graph:
    """Notes what becomes of a capture."""

    def __init__(self, told: list[object]) -> None:
        self.told = told

    def capture_begin(self, capture_error_mode: str) -> None:
        self.told.append(capture_error_mode)

    def capture_end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("own", [True, False])
def test_the_default_generator_is_given_back_if_a_capture_claims_it(own, monkeypatch):
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(told))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    generator = type("Generator", (), {"graphsafe_set_state": None} if own else {})
    monkeypatch.setattr(torch, "Generator", generator)
    side = type("Stream", (), {"wait_stream": lambda _, other: told.append(other)})()
    free_random_numbers(torch.device("cpu"), side)
    assert told == ([] if own else ["default", "thread_local", "end"])


def test_what_ended_the_capture_is_not_hidden_by_a_generator_that_stays_in_it(monkeypatch):
    def broken(device):
        raise RuntimeError("injected")

    monkeypatch.setattr(torch, "Generator", type("Generator", (), {}))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "default_stream", broken)
    free_random_numbers(torch.device("cpu"), torch.device("cpu"))


@pytest.mark.gpu
def test_after_a_capture_that_the_driver_called_off_memory_and_random_numbers_work():
    device = torch.device("cuda", torch.cuda.current_device())
    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side), pytest.raises(RuntimeError):
        with _own_random_state(device):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        held = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
        try:
            with contextlib.suppress(RuntimeError):
                side.synchronize()
        finally:
            graph.capture_end()
    del graph, held
    end_allocation(device, pool, side)
    free_random_numbers(device, side)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)
    with torch.cuda.stream(side):
        assert torch.ones(3, device=device).sum().item() == 3
    assert torch.randn(1000, device=device).std().item() > 0.5
