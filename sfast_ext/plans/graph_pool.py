"""The graph pool: memory shared by all CUDA graphs of a device, with LRU eviction and a budget.

Graphs of one pool share their intermediate memory, so only one may run at a time. A replay holds the pool's lock and
waits, on its stream, for the last replay on another stream. Inputs and outputs are outside of the pool.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sfast_ext.kernels.backend.nvrtc import current_stream
from sfast_ext.kernels.backend.trial import paused
from sfast_ext.report import Report, logger
from sfast_ext.weights.banks import Banks

MB = 1 << 20
# Size of the first block, relative to the peak of live bytes. UNets need 1.09 to 1.19, as the allocator takes the
# smallest gap that fits. In a smaller block the largest values find no gap, and allocate further blocks of their size.
_FRAGMENTATION = 1.2
CAN_UPDATE_GRAPH = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")
"""Whether torch gives access to the captured graph, so that its nodes can be updated."""


class NoGraph(Exception):
    """A CUDA graph could not be captured. The message says why. The plan runs without one."""


class CapturedGraph:
    """A CUDA graph and the static tensors that it writes.

    `size` is the growth of the pool in bytes, `share` the graph's weight in `max_graphs`, `ms` the time of the capture
    without what waits for the GPU and frees memory before it, `launch_ms` that of its launches.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor], size: int) -> None:
        self.graph, self.outputs, self.size = graph, outputs, size
        self.share, self.ms, self.launch_ms = 1.0, 0.0, 0.0

    def free(self) -> None:
        """Destroy the graph and let go of its outputs.

        CUDAGraph.reset() is not called: the destructor calls it again, and in torch 2.1 this ends the process.
        """
        del self.graph
        self.outputs = []

    def handles(self) -> tuple[int, int]:
        """Driver handles of the captured graph and of the executable graph. Needs CAN_UPDATE_GRAPH."""
        return self.graph.raw_cuda_graph(), self.graph.raw_cuda_graph_exec()


class GraphPool:
    """The CUDA graphs of one device, least recently used first. `on_evict` tells an owner that its graph is gone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.spare: weakref.WeakSet[Banks] = weakref.WeakSet()
        """What plans have in memory and can fill again."""
        self._handle: Any = None
        # the memory of an evicted graph stays in the pool until the last graph is gone
        self._reserved = 0
        self._entries: OrderedDict[int, tuple[CapturedGraph, Callable[[], None]]] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None
        self._last_stream: int | None = None
        self._current: tuple[int, torch.cuda.Stream] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def holds_memory(self) -> bool:
        """Whether `make_room` would free any."""
        return bool(self._entries) or any(banks.held for banks in self.spare)

    @property
    def size(self) -> int:
        """The size of the pool in bytes."""
        return self._reserved

    def side_stream(self) -> torch.cuda.Stream:
        """The stream for warm-ups and captures."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def capture(
        self,
        run: Callable[[], list[torch.Tensor]],
        on_evict: Callable[[], None],
        report: Report,
        *,
        max_graphs: int,
        budget_mb: int,
        share: float = 1.0,
        expected: int = 0,
    ) -> CapturedGraph:
        """Capture `run`. Other graphs are evicted until it fits.

        Args:
            expected: the expected peak of live bytes. A new pool starts with a block for them.

        Raises:
            NoGraph: it does not fit, or cannot be captured.
        """
        with self.lock:
            # the shares of a model's parts sum to one, up to rounding
            while self._entries and share + sum(c.share for c, _ in self._entries.values()) > max_graphs + 1e-6:
                self._evict_oldest(report, f"there are {len(self._entries)}, {max_graphs} are allowed")
            while True:
                try:
                    with paused():
                        captured = self._capture(run, expected)
                except torch.cuda.OutOfMemoryError as exc:
                    report.count("out_of_memory")
                    if not self._entries:
                        raise NoGraph("the GPU has not enough free memory for a CUDA graph") from exc
                    # the memory is only freed with the last graph of the pool
                    self._evict_all(report, "out of memory while capturing a CUDA graph")
                    continue
                except Exception as exc:
                    raise NoGraph(f"{type(exc).__name__}: {exc}") from exc
                over = budget_mb and self._reserved > budget_mb * MB
                if over and self._entries:
                    captured.free()
                    self._evict_all(report, f"the pool is over its budget of {budget_mb} MB")
                    continue
                if over:
                    size = self._reserved // MB
                    captured.free()
                    self._drop_pool()
                    raise NoGraph(f"its CUDA graph needs {size} MB, the budget is {budget_mb} MB")
                captured.share = share
                self._entries[id(captured)] = (captured, on_evict)
                return captured

    def touch(self, captured: CapturedGraph) -> None:
        """Mark as used most recently."""
        self._entries.move_to_end(id(captured))

    def begin_use(self) -> torch.cuda.Stream:
        """Make the current stream wait for the last use of the pool, and return it. The caller holds the lock."""
        stream = self._current_stream()
        if self._last is not None and self._last_stream != stream.cuda_stream:
            stream.wait_event(self._last)
        return stream

    def end_use(self, stream: torch.cuda.Stream | None = None, captured: CapturedGraph | None = None) -> None:
        """Record that the current stream used the pool, for this graph. The caller holds the lock."""
        stream = stream or self._current_stream()
        if self._last is None:
            self._last = torch.cuda.Event()
        self._last.record(stream)
        self._last_stream = stream.cuda_stream
        if captured is not None:
            self.touch(captured)

    def _current_stream(self) -> torch.cuda.Stream:
        """The current stream. The last object is reused if it is the same stream: a new one takes microseconds."""
        raw = current_stream(self.device.index or 0)
        if self._current is None or self._current[0] != raw:
            self._current = raw, torch.cuda.current_stream(self.device)
        return self._current[1]

    def make_room(self, report: Report, why: str = "the GPU is out of memory", banks: float = math.inf) -> None:
        """Free the memory of graphs, and so many bytes of banks. Graphs are captured again at their next use, and banks
        are filled again."""
        with self.lock:
            if self._entries:
                self._evict_all(report, why)
            for each in list(self.spare):
                banks -= each.vacate(banks) if banks > 0 else 0
            torch.cuda.empty_cache()

    def drop(self, captured: CapturedGraph) -> None:
        """Free one graph, without telling its owner."""
        with self.lock:
            if self._entries.pop(id(captured), None) is None:
                return
            self._reset([captured])

    def status(self) -> dict[str, Any]:
        """For the report."""
        # without the lock, which a capture holds for long
        return {"graphs": len(self._entries), "memory_mb": round(self.size / MB, 1)}

    def _capture(self, run: Callable[[], list[torch.Tensor]], expected: int) -> CapturedGraph:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True) if CAN_UPDATE_GRAPH else torch.cuda.CUDAGraph()
        collecting, ended, began = gc.isenabled(), False, time.perf_counter()
        # a collection could run anybody's destructors on the capturing stream
        gc.disable()
        try:
            with torch.cuda.stream(self.side_stream()):
                with _own_random_state(self.device):
                    # thread_local: a live preview that decodes in another thread must not break the capture
                    graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                try:
                    if not self._entries:
                        self._reserve_arena(expected)
                    launching = time.perf_counter()
                    outputs = run()
                    launched = time.perf_counter()
                finally:
                    graph.capture_end()
                    ended = True
            if CAN_UPDATE_GRAPH:
                graph.instantiate()
        except BaseException:
            del graph
            end_allocation(self.device, self._handle, self.side_stream())
            if not ended:
                free_random_numbers(self.device, self.side_stream())
            if not self._entries:
                # the allocator forgets a pool in which no graph was captured
                self._drop_pool()
            raise
        finally:
            if collecting:
                gc.enable()
        grown = max(0, torch.cuda.memory_reserved(self.device) - before)
        self._reserved += grown
        captured = CapturedGraph(graph, outputs, grown)
        captured.ms, captured.launch_ms = 1000 * (time.perf_counter() - began), 1000 * (launched - launching)
        return captured

    def _reserve_arena(self, expected: int) -> None:
        """Start a new pool with one large block, which the allocator splits: many small ones would fragment."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if 0 < 2 * expected < free:
            torch.empty(int(_FRAGMENTATION * expected), dtype=torch.uint8, device=self.device)

    def _evict_oldest(self, report: Report, why: str) -> None:
        _, (captured, on_evict) = self._entries.popitem(last=False)
        report.count("evictions")
        report.event("graph pool", f"a CUDA graph is evicted: {why}")
        on_evict()
        self._reset([captured])

    def _evict_all(self, report: Report, why: str) -> None:
        report.count("evictions", len(self._entries))
        report.event("graph pool", f"{len(self._entries)} CUDA graphs are evicted: {why}")
        gone = list(self._entries.values())
        self._entries.clear()
        for _, on_evict in gone:
            on_evict()
        self._reset([captured for captured, _ in gone])

    def _reset(self, gone: list[CapturedGraph]) -> None:
        try:
            torch.cuda.synchronize(self.device)
            for captured in gone:
                captured.free()
        finally:
            # even after a failure: the next capture must not use a pool that no graph holds
            if not self._entries:
                self._drop_pool()

    def _drop_pool(self) -> None:
        # the allocator frees the memory of the old handle, as no graph holds it
        self._handle = None
        self._reserved = 0
        self._last = None
        self._last_stream = None
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """Replace the state of the default generator while a capture begins.

    A capture claims that state, so random numbers in another thread would raise until it ends. Plans draw none.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    if not hasattr(generator, "graphsafe_set_state"):
        yield
        return
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


_pools: dict[torch.device, GraphPool] = {}
_pools_lock = threading.Lock()


def pool_of(device: torch.device) -> GraphPool:
    """The pool of a device, shared by all accelerators on it."""
    with _pools_lock:
        if device not in _pools:
            _pools[device] = GraphPool(device)
        return _pools[device]


def held() -> int:
    """The size of the pools of all devices in bytes."""
    with _pools_lock:
        return sum(pool.size for pool in _pools.values())


def make_room(report: Report, why: str, banks: float = math.inf) -> None:
    """Free the memory of all graphs, and so many bytes of banks on each device; see `GraphPool.make_room`."""
    with _pools_lock:
        pools = list(_pools.values())
    for pool in pools:
        pool.make_room(report, why, banks)


def end_allocation(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """Take the allocator out of a failed capture, and give up what the capture holds of its pool.

    CUDAGraph.capture_end raises before it does so if the driver has called the capture off. From then on empty_cache
    raises in torch 2.1, and the pool is never freed in later versions. Does nothing if the capture was ended.

    Args:
        pool: the handle that was passed to capture_begin.
        stream: the stream of the capture.
    """
    index = device.index or 0
    with torch.cuda.stream(stream):
        if _ended_here(index, pool):
            torch._C._cuda_releasePool(index, pool)


def free_random_numbers(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Give the default generator back, which capture_end leaves in the capture if it raises.

    Before torch 2.4 every random number would raise from then on. A capture of nothing that ends gives it back. Later
    versions need nothing, as a capture gets a separate generator there.
    """
    if hasattr(torch.Generator, "graphsafe_set_state"):
        return
    try:
        _capture_nothing(device, stream)
    except Exception:
        # what ended the capture is more than this
        logger.debug("the default generator may still be in the failed capture", exc_info=True)


def _capture_nothing(device: torch.device, stream: torch.cuda.Stream) -> None:
    one = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            one.zero_()  # torch warns of an empty graph
        finally:
            graph.capture_end()


def _ended_here(index: int, pool: Any) -> bool:
    """End the allocation on the current stream; false if that was done before."""
    # the second is its name before torch 2.8
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    end = end or getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    if end is None:
        return False
    try:
        end(index, pool)
        return True
    except RuntimeError:
        return False
    except TypeError:
        # torch 2.1 takes no pool, and counts one capture less whether there was one or not
        if not _in_capture():
            return False
    end(index)
    return True


def _in_capture() -> bool:
    """Whether the allocator believes so, in torch 2.1."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError as exc:
        return "captures_underway" in str(exc)
    return False
