"""Compiles what a graph will launch, all at once: left to the first run, Triton compiles one kernel after another.

Most of a compilation runs outside of Python's lock, or in processes of its own, so threads are enough.
"""

from __future__ import annotations

import contextlib
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

from sfast_ext import environment
from sfast_ext.kernels.backend import health, nvrtc, size_prediction, triton_runtime
from sfast_ext.kernels.backend.size_prediction import Call, Launch, Size

logger = logging.getLogger("sfast_ext")

MOST_THREADS = 16
_PAUSE = 3.0  # seconds that a first call takes, and a few calls of the plan it makes
_LOOK = 0.1  # seconds between looks at whether they are over
# what this process has compiled already: (device, key of the launch)
_done: set[Any] = set()
# kernels that did not compile, by device: their first launch tells for certain
_failed: dict[torch.device, dict[str, str]] = {}
_caches = threading.Lock()

_Task = tuple[str, Callable[[], None]]
"""What is to be compiled, for the log, and how."""


@functools.lru_cache(maxsize=None)
def get_ready() -> threading.Thread | None:
    """Have a thread do what compilers do once in a process before they compile or look up anything: Triton takes half a
    second for a hash over its own files, mostly outside of Python's lock. Whether Triton works at all is tried there
    too. None where no GPU is there to compile for."""
    if not triton_runtime.AVAILABLE or triton_runtime.INTERPRETED or not torch.cuda.is_available():
        return None
    thread = threading.Thread(target=_load_compilers, name="sfast: compilers", daemon=True)
    thread.start()
    return thread


def _load_compilers() -> None:
    for home in ("triton.runtime.cache", "triton.compiler.compiler"):  # since 3.5, and before
        with contextlib.suppress(Exception):
            importlib.import_module(home).triton_key()
    with contextlib.suppress(Exception):  # who asks next meets it, and tells
        device = torch.device("cuda", torch.cuda.current_device())
        if triton_runtime.hopper(device):
            nvrtc.bindings()
        environment.triton_runs_on(device)


class Later:
    """Compiles what further sizes of picture may ask for, beside all else and one after another.

    First kernels in CUDA C++, into the user's cache. Then those of Triton, whose compiler needs Python's lock for a
    part of its time: these wait until first calls are over.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Task] = deque()
        self._patient: deque[_Task] = deque()  # what needs Python's lock
        self._due = 0.0  # when that may begin
        self._met: set[Any] = set()  # what this process has compiled or queued
        self._thread: threading.Thread | None = None  # while there is work
        self._lock = threading.Lock()

    def hold(self) -> None:
        """A first call begins, or goes on: leave Python's lock to it."""
        self._due = time.monotonic() + _PAUSE

    def add(
        self,
        compiled: Iterable[Launch],
        device: torch.device,
        calls: Iterable[Call] = (),
        latent: Size | None = None,
    ) -> None:
        """Queue the siblings of launches that were compiled, and what `calls` would launch for other sizes of the
        latent than the given one; of these nothing where that is None."""
        compiled, calls = list(compiled), list(calls)
        with self._lock:
            self._met.update(_variant(launch, device) for launch in compiled)
            self._queue(compiled, device)
            if calls and latent is not None:
                for size in size_prediction.further(latent):
                    look = functools.partial(self._look_at, calls, latent, size, device)
                    self._patient.append((f"what a latent of {size[0]}x{size[1]} asks for", look))
                self.hold()
            if (self._waiting or self._patient) and self._thread is None:
                # no daemon, even if its starter is one: inside of NVRTC where Python ends, it might crash the process
                thread = threading.Thread(target=self._work, name="sfast: further sizes", daemon=False)
                thread.start()
                self._thread = thread

    def _look_at(self, calls: list[Call], latent: Size, size: Size, device: torch.device) -> None:
        found = size_prediction.launched(size_prediction.resized(calls, latent, size), device)
        with self._lock:
            self._queue(found.values(), device)

    def _queue(self, launches: Iterable[Launch], device: torch.device) -> None:
        """Those that were not met, and siblings. The caller has the lock."""
        for launch in launches:
            source = isinstance(launch.kernel, nvrtc.Source)
            siblings = launch.kernel.siblings(launch.constants) if source else ()
            for wanted in (launch, *(launch._replace(constants=constants) for constants in siblings)):
                variant = _variant(wanted, device)
                if variant in self._met:
                    continue
                self._met.add(variant)
                name = f"{getattr(wanted.kernel, 'name', wanted.kernel)} for {wanted.constants}"
                task = functools.partial(_keep if source else _warm_up, wanted, device)
                (self._waiting if source else self._patient).append((name, task))

    def _work(self) -> None:
        while True:
            with self._lock:
                # Python waits for it where it ends: for one compilation, not for all of them
                if not (self._waiting or self._patient) or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                queue = self._waiting or (self._patient if time.monotonic() >= self._due else None)
                name, task = queue.popleft() if queue else ("", None)
            if task is None:
                time.sleep(_LOOK)
                continue
            try:
                task()
            except Exception:
                logger.debug("%s: left to the first launch", name, exc_info=True)


_later = Later()


def _variant(launch: Launch, device: torch.device) -> Any:
    """Equal for launches of which one compilation is enough."""
    kernel = launch.kernel
    if isinstance(kernel, nvrtc.Source):
        return kernel.name, nvrtc.architecture(device.index), tuple(sorted(launch.constants.items()))
    return device, size_prediction.key(launch)


def _keep(launch: Launch, device: torch.device) -> None:
    """Compile a kernel in CUDA C++ into the user's cache."""
    if launch.kernel.kept:  # else nobody would find it
        launch.kernel.compiled(nvrtc.architecture(device.index), launch.constants)


def _warm_up(launch: Launch, device: torch.device) -> None:
    """Compile a kernel of Triton, and what starts it, into its caches. The first launch loads it: a CUDA graph that
    another thread captures at the time would be spoilt."""
    _make_cache(launch.kernel, device)
    if _compile(launch, device, load=False) is None:
        _compile(launch, device, load=False)


def launches(graph: fx.Graph, device: torch.device | None = None) -> dict[Any, Launch]:
    """What the Triton kernels of a rewritten graph will launch on a device, by what makes Triton compile one anew.

    Told by the shapes and dtypes in the nodes' metadata; a node without them is left out.
    """
    return size_prediction.launched(size_prediction.calls(graph), device)


def precompile(graph: fx.Graph, device: torch.device) -> int:
    """Compile what `launches` finds and this process has not compiled yet, in threads; returns how many that were. What
    further sizes may ask for follows, while the caller goes on.

    What fails is left to the first launch, which then tells why.
    """
    if not triton_runtime.AVAILABLE or triton_runtime.INTERPRETED or device.type != "cuda":
        return 0
    _later.hold()
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
        return 0  # nor would anything else compile
    try:
        _later.add(compiled, device, calls, latent)
    except Exception:
        logger.debug("further sizes are left to their first launches", exc_info=True)
    return len(compiled)


def failed(device: torch.device) -> dict[str, str]:
    """The kernels that did not compile for a device in this process, with their reasons."""
    return dict(_failed.get(device, {}))


def _compile_all(wanted: dict[Any, Launch], device: torch.device) -> list[Launch]:
    """Those that were compiled."""
    with ThreadPoolExecutor(min(len(wanted), MOST_THREADS, os.cpu_count() or 1)) as pool:
        tried = list(pool.map(lambda launch: _compile(launch, device), wanted.values()))
    compiled = []
    for (key, launch), done in zip(wanted.items(), tried):
        if done if done is not None else _compile(launch, device):
            _done.add((device, key))
            compiled.append(launch)
    return compiled


def _make_cache(kernel: Any, device: torch.device) -> None:
    """What Triton keeps compilations of a kernel in: made when first asked for, by each thread, were it not there."""
    caches = getattr(kernel, "device_caches", None)
    if caches is not None and device.index is not None:
        with _caches:
            caches[device.index]


def _compile(launch: Launch, device: torch.device, load: bool = True) -> bool | None:
    """Whether it compiled; None where it was in another thread's way, and should be tried by itself."""
    try:
        with torch.cuda.device(device):
            compiled = launch.kernel.warmup(*launch.args, grid=(1,), **launch.constants)
            # loads it, and makes what starts it
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


def _make_launcher(compiled: Any) -> None:
    """What starts a kernel, without loading that: some versions of Triton have a C compiler make it, into a cache."""
    active = getattr(importlib.import_module("triton.runtime.driver").driver, "active", None)
    launcher: Callable[..., Any] | None = getattr(active, "launcher_cls", None)
    if launcher is not None:
        launcher(compiled.src, compiled.metadata)
