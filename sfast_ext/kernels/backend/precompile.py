"""Compiles the kernels of a graph ahead and in parallel: in the first run Triton would compile one after another.

Most of a compilation runs outside the GIL or in other processes, so threads are enough.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx

from sfast_ext import freed_memory, host_gpu
from sfast_ext.kernels.backend import health, nvrtc, size_prediction, triton_runtime
from sfast_ext.kernels.backend.size_prediction import Call, Launch, Size
from sfast_ext.report import advance

logger = logging.getLogger("sfast_ext")

_MAX_THREADS = 16
_PAUSE = 3.0  # seconds: from a step to the next image's first
_LOOK = 0.1  # seconds between polls for their end
# compiled in this process: (device, key of the launch)
_done: set[Any] = set()
# kernels that did not compile, by device; their first launch raises
_failed: dict[torch.device, dict[str, str]] = {}
_caches = threading.Lock()

_Task = tuple[str, Callable[[], None]]
"""(name for the log, function that compiles)."""


@functools.lru_cache(maxsize=None)
def get_ready(triton_runs_on: Callable[[torch.device], bool]) -> threading.Thread | None:
    """Start a thread for the compilers' one-time work in a process: Triton hashes its own files for half a second,
    mostly outside the GIL, and NVRTC is loaded if its kernels will run. It also asks whether Triton runs on the GPU,
    which has it tried. None without a GPU to compile for."""
    if triton_runtime.INTERPRETED or not torch.cuda.is_available():
        return None
    thread = threading.Thread(target=_load_compilers, args=(triton_runs_on,), name="sfast: compilers", daemon=True)
    thread.start()
    return thread


def _load_compilers(triton_runs_on: Callable[[torch.device], bool]) -> None:
    if triton_runtime.AVAILABLE:
        for home in ("triton.runtime.cache", "triton.compiler.compiler"):  # since 3.5, and before
            with contextlib.suppress(Exception):
                importlib.import_module(home).triton_key()
    with contextlib.suppress(Exception):  # the next caller meets and reports it
        device = host_gpu.device()
        if not triton_runtime.AVAILABLE or triton_runtime.hopper(device):
            nvrtc.bindings()
        if triton_runtime.AVAILABLE and not triton_runs_on(device):
            nvrtc.bindings()


class BackgroundCompiler:
    """Compiles, in one background thread, the variants of kernels that other image sizes may need.

    CUDA C++ kernels first, into the user's cache. Triton's compiler holds the GIL for part of its time, in which a
    WebUI's own Python takes several times as long, so its kernels wait until no image is made.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Task] = deque()
        self._needs_gil: deque[_Task] = deque()
        self._due = 0.0  # when those may begin
        self._seen: set[Any] = set()  # compiled or queued in this process
        self._thread: threading.Thread | None = None  # while there is work
        self._lock = threading.Lock()

    def defer(self) -> None:
        """Leave the GIL to an image, which begins or goes on now."""
        self._due = time.monotonic() + _PAUSE

    def add(
        self,
        compiled: Iterable[Launch],
        device: torch.device,
        calls: Iterable[Call] = (),
        latent: Size | None = None,
    ) -> None:
        """Queue the variants of launches that were compiled, and the launches of `calls` at other sizes of the latent.

        Args:
            compiled: launches that are compiled already.
            calls: of launch functions.
            latent: the size that `calls` are of; None queues nothing for other sizes.
        """
        compiled, calls = list(compiled), list(calls)
        with self._lock:
            self._seen.update(_compilation(launch, device) for launch in compiled)
            self._queue(compiled, device)
            if calls and latent is not None:
                for size in size_prediction.likely_sizes(latent):
                    # in the caller's context: it says whether Triton is used
                    here = contextvars.copy_context()
                    predict = functools.partial(here.run, self._predict, calls, latent, size, device)
                    self._needs_gil.append((f"launches for a latent of {size[0]}x{size[1]}", predict))
                self.defer()
            if (self._waiting or self._needs_gil) and self._thread is None:
                # not a daemon, even if its starter is one: killed inside NVRTC at exit, it might crash the process
                thread = threading.Thread(target=self._work, name="sfast: further sizes", daemon=False)
                thread.start()
                self._thread = thread

    def _predict(self, calls: list[Call], latent: Size, size: Size, device: torch.device) -> None:
        found = size_prediction.launched(size_prediction.resized(calls, latent, size), device)
        with self._lock:
            self._queue(found.values(), device)

    def _queue(self, launches: Iterable[Launch], device: torch.device) -> None:
        """Queue launches that were not seen before, and their variants. The caller holds the lock."""
        for launch in launches:
            source = isinstance(launch.kernel, nvrtc.Source)
            variants = launch.kernel.variants(launch.constants) if source else ()
            for wanted in (launch, *(launch._replace(constants=constants) for constants in variants)):
                compilation = _compilation(wanted, device)
                if compilation in self._seen:
                    continue
                self._seen.add(compilation)
                name = f"{getattr(wanted.kernel, 'name', wanted.kernel)} for {wanted.constants}"
                task = functools.partial(_compile_to_cache if source else _warm_up, wanted, device)
                (self._waiting if source else self._needs_gil).append((name, task))

    def _work(self) -> None:
        while True:
            with self._lock:
                # at exit Python waits for this thread: for one compilation, not for all
                if not (self._waiting or self._needs_gil) or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                queue = self._waiting or (self._needs_gil if time.monotonic() >= self._due else None)
                name, task = queue.popleft() if queue else ("", None)
            if task is None:
                time.sleep(_LOOK)
                continue
            try:
                task()
            except Exception:
                logger.debug("%s: left to the first launch", name, exc_info=True)


_background = BackgroundCompiler()


def defer() -> None:
    """A call is served now: what holds the GIL is compiled when there was none for some seconds."""
    _background.defer()


def _compilation(launch: Launch, device: torch.device) -> Any:
    """Equal for launches that share a compilation."""
    kernel = launch.kernel
    if isinstance(kernel, nvrtc.Source):
        return kernel.name, nvrtc.architecture(device.index), tuple(sorted(launch.constants.items()))
    return device, size_prediction.key(launch)


def _compile_to_cache(launch: Launch, device: torch.device) -> None:
    """Compile a CUDA C++ kernel into the user's cache."""
    if launch.kernel.kept:  # else the result would be lost
        launch.kernel.compiled(nvrtc.architecture(device.index), launch.constants)


def _warm_up(launch: Launch, device: torch.device) -> None:
    """Compile a Triton kernel and its launcher into Triton's caches, without loading it: loading would invalidate a
    CUDA graph capture of another thread."""
    _make_cache(launch.kernel, device)
    if _compile(launch, device, load=False) is None:
        _compile(launch, device, load=False)


def launches(graph: fx.Graph, device: torch.device | None = None) -> dict[Any, Launch]:
    """The launches of a rewritten graph's kernels on a device, by `size_prediction.key`.

    They follow from the shapes and dtypes in the nodes' metadata; nodes without are left out.
    """
    return size_prediction.launched(size_prediction.calls(graph), device)


def precompile(graph: fx.Graph, device: torch.device) -> int:
    """Compile, in threads, what `launches` finds and this process has not compiled; returns how many that were.
    Variants for other sizes follow in the background.

    A kernel that does not compile is left to its first launch, which raises.
    """
    if triton_runtime.INTERPRETED or device.type != "cuda":
        return 0
    _background.defer()
    try:
        calls, latent = size_prediction.calls(graph), size_prediction.latent(graph)
        found = size_prediction.launched(calls, device)
        wanted = {key: launch for key, launch in found.items() if (device, key) not in _done}
        for launch in wanted.values():
            _make_cache(launch.kernel, device)
    except Exception:
        return 0
    compiled = _compile_all(wanted, device) if wanted else []
    if wanted and not compiled:
        return 0  # nothing else would compile either
    try:
        _background.add(compiled, device, calls, latent)
    except Exception:
        logger.debug("further sizes are left to their first launches", exc_info=True)
    return len(compiled)


def failed(device: torch.device) -> dict[str, str]:
    """Kernels that did not compile for a device in this process, with their reasons."""
    return dict(_failed.get(device, {}))


def _compile_all(wanted: dict[Any, Launch], device: torch.device) -> list[Launch]:
    """The launches that compiled."""
    tried: list[bool | None] = []
    with ThreadPoolExecutor(min(len(wanted), _MAX_THREADS, os.cpu_count() or 1)) as pool:
        waiting = [pool.submit(_compile, launch, device) for launch in wanted.values()]
        try:
            for each in waiting:
                tried.append(each.result())
                advance(len(tried), len(waiting))
        finally:
            # the user may have interrupted it: what is not begun is left out
            for each in waiting:
                each.cancel()
    compiled = []
    for (key, launch), done in zip(wanted.items(), tried):
        if done if done is not None else _compile(launch, device):
            _done.add((device, key))
            compiled.append(launch)
    return compiled


def _make_cache(kernel: Any, device: torch.device) -> None:
    """Create Triton's cache of a kernel's compilations: its lazy creation is not thread-safe."""
    caches = getattr(kernel, "device_caches", None)
    if caches is not None and device.index is not None:
        with _caches:
            caches[device.index]


def _compile(launch: Launch, device: torch.device, load: bool = True) -> bool | None:
    """Whether it compiled; None if threads disturbed each other, and it should be tried again alone."""
    try:
        with torch.cuda.device(device):
            compiled = launch.kernel.warmup(*launch.args, grid=(1,), **launch.constants)
            # loads the kernel and builds its launcher
            handles: Callable[[], None] | None = getattr(compiled, "_init_handles", None)
            if handles is not None:
                if load:
                    handles()
                else:
                    _make_launcher(compiled)
        return compiled is not None
    except Exception as exc:
        if health.disturbed(exc):
            return None
        logger.debug("%s is left to its first launch", launch.kernel, exc_info=True)
        _failed.setdefault(device, {})[launch.owner] = health.describe(exc)
        return False
    finally:
        if not isinstance(launch.kernel, nvrtc.Source):
            # Triton's; see `nvrtc.build` for the others
            freed_memory.give_back_of_thread()


def _make_launcher(compiled: Any) -> None:
    """Build a kernel's launcher without loading the kernel: some versions of Triton compile it in C, into a cache."""
    active = getattr(importlib.import_module("triton.runtime.driver").driver, "active", None)
    launcher: Callable[..., Any] | None = getattr(active, "launcher_cls", None)
    if launcher is not None:
        launcher(compiled.src, compiled.metadata)
