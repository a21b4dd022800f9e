"""Compiles what a graph will launch, all at once: left to the first run, Triton compiles one kernel after another.

Most of a compilation runs outside of Python's lock, or in processes of its own, so threads are enough.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels import _cuda, _triton

logger = logging.getLogger("sfast_ext")

MOST_THREADS = 16
_KERNELS = "sfast_ext.kernels."
# what this process has compiled already: (device, key of the launch)
_done: set[Any] = set()


@functools.lru_cache(maxsize=None)
def get_ready() -> threading.Thread | None:
    """Have a thread do what compilers do once in a process before they compile or look up anything: Triton takes half a
    second for a hash over its own files, mostly outside of Python's lock. None where no GPU is there to compile for."""
    if not _triton.AVAILABLE or _triton.INTERPRETED or not torch.cuda.is_available():
        return None
    thread = threading.Thread(target=_load_compilers, name="sfast: compilers", daemon=True)
    thread.start()
    return thread


def _load_compilers() -> None:
    for home in ("triton.runtime.cache", "triton.compiler.compiler"):  # since 3.5, and before
        with contextlib.suppress(Exception):
            importlib.import_module(home).triton_key()
    with contextlib.suppress(Exception):
        if _triton.hopper(torch.device("cuda", torch.cuda.current_device())):
            _cuda.bindings()


class Launch(NamedTuple):
    """A kernel and what it is compiled for: dtypes for its tensors, numbers, constants."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Later:
    """Compiles into the user's cache what further sizes of picture may ask for of kernels in CUDA C++, beside all else
    and one after another."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[_cuda.Source, str, dict[str, int]]] = deque()
        self._met: set[Any] = set()  # what this process has compiled or queued
        self._thread: threading.Thread | None = None  # while there is work
        self._lock = threading.Lock()

    def add(self, compiled: Iterable[Launch], device: torch.device) -> None:
        """Queue the siblings of launches that were compiled."""
        found = [(kernel, constants) for kernel, _, constants in compiled if isinstance(kernel, _cuda.Source)]
        if not found:
            return
        architecture = _cuda.architecture(device.index)
        with self._lock:
            self._met.update(_variant(source, architecture, constants) for source, constants in found)
            for source, given in found:
                for constants in source.siblings(given):
                    variant = _variant(source, architecture, constants)
                    if variant not in self._met:
                        self._met.add(variant)
                        self._waiting.append((source, architecture, constants))
            if self._waiting and self._thread is None:
                # no daemon, even if its starter is one: inside of NVRTC where Python ends, it might crash the process
                thread = threading.Thread(target=self._work, name="sfast: further sizes", daemon=False)
                thread.start()
                self._thread = thread

    def _work(self) -> None:
        while True:
            with self._lock:
                # Python waits for it where it ends: for one compilation, not for all of them
                if not self._waiting or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                source, architecture, constants = self._waiting.popleft()
            try:
                if source.kept:  # else nobody would find it
                    source.compiled(architecture, constants)
            except Exception:
                logger.debug("%s is left to its first launch for %s", source.name, constants, exc_info=True)


_later = Later()


def _variant(source: _cuda.Source, architecture: str, constants: dict[str, int]) -> Any:
    return source.name, architecture, tuple(sorted(constants.items()))


def launches(graph: fx.Graph, device: torch.device | None = None) -> dict[Any, Launch]:
    """What the Triton kernels of a rewritten graph will launch on a device, by what makes Triton compile one anew.

    Told by the shapes and dtypes in the nodes' metadata; a node without them is left out.
    """
    found: dict[Any, Launch] = {}
    met: set[Any] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not _launches_triton(node.target):
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        shapes = str((node.target, _described(args), _described(kwargs)))
        if shapes in met:
            continue
        met.add(shapes)
        try:
            with torch.no_grad(), _triton.collecting(device) as collected:
                node.target(*_stand_ins(args), **_stand_ins(kwargs))
        except Exception:
            continue  # compiled when it is first launched
        for kernel, operands, constants in collected:
            launch = Launch(kernel, tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in operands), constants)
            found.setdefault(_key(launch), launch)
    return found


def precompile(graph: fx.Graph, device: torch.device) -> int:
    """Compile what `launches` finds and this process has not compiled yet, in threads; returns how many that were. What
    further sizes may ask for follows, while the caller goes on.

    What fails is left to the first launch, which then tells why.
    """
    if not _triton.AVAILABLE or _triton.INTERPRETED or device.type != "cuda":
        return 0
    try:
        wanted = {key: launch for key, launch in launches(graph, device).items() if (device, key) not in _done}
        for launch in wanted.values():
            caches = getattr(launch.kernel, "device_caches", None)
            if caches is not None and device.index is not None:
                caches[device.index]  # made when first asked for: by each thread, were it not here by then
    except Exception:
        return 0
    if not wanted:
        return 0
    with ThreadPoolExecutor(min(len(wanted), MOST_THREADS, os.cpu_count() or 1)) as pool:
        tried = list(pool.map(lambda launch: _compile(launch, device), wanted.values()))
    compiled = [
        bool(done if done is not None else _compile(launch, device)) for launch, done in zip(wanted.values(), tried)
    ]
    _done.update((device, key) for key, done in zip(wanted, compiled) if done)
    try:
        _later.add([launch for launch, done in zip(wanted.values(), compiled) if done], device)
    except Exception:
        logger.debug("further sizes are left to their first launches", exc_info=True)
    return sum(compiled)


def _compile(launch: Launch, device: torch.device) -> bool | None:
    """Whether it compiled; None where it was in another thread's way, and should be tried by itself."""
    try:
        with torch.cuda.device(device):
            compiled = launch.kernel.warmup(*launch.args, grid=(1,), **launch.constants)
            # loads it, and builds the launcher, with a C compiler in some versions of Triton
            load: Callable[[], None] | None = getattr(compiled, "_init_handles", None)
            if load is not None:
                load()
        return compiled is not None
    except Exception as exc:
        if _disturbed(exc):
            return None
        logger.debug("%s is left to its first launch", launch.kernel, exc_info=True)
        return False


def _disturbed(exc: BaseException | None) -> bool:
    """Whether Python gave up parsing, "AST constructor recursion depth mismatch", as 3.11 may where threads do so."""
    while exc is not None and not isinstance(exc, SystemError):
        exc = exc.__cause__ or exc.__context__
    return exc is not None


def _launches_triton(target: Any) -> bool:
    home = getattr(target, "__module__", "")
    if not home.startswith(_KERNELS) or getattr(target, "__name__", "") != "launch":
        return False
    return getattr(sys.modules.get(home), "NEEDS_TRITON", True)


def _stand_ins(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, dict):
        return {name: _stand_ins(value) for name, value in x.items()}
    return type(x)(_stand_ins(item) for item in x) if type(x) in (list, tuple) else x


def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), x.stride()
    if isinstance(x, dict):
        return [(name, _described(value)) for name, value in x.items()]
    return [_described(item) for item in x] if isinstance(x, (list, tuple)) else x


def _key(launch: Launch) -> Any:
    """Equal for launches that share a compilation: of numbers Triton looks at some, and at what they are."""
    kernel = launch.kernel
    unlooked = set(getattr(kernel, "do_not_specialize", None) or ())  # names, or their places in older versions
    seen: list[Any] = []
    for place, (name, value) in enumerate(zip(kernel.arg_names, launch.args)):
        if type(value) is not int:
            seen.append(value if isinstance(value, torch.dtype) else type(value))
            continue
        wide = not -(2**31) <= value < 2**31
        plain = name in unlooked or place in unlooked
        seen.append(wide if plain else (wide, value == 1, value % 16 == 0))
    return id(kernel), tuple(seen), tuple(sorted(launch.constants.items()))
