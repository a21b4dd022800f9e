"""Gives back to the system what glibc or TCMalloc keeps of memory that was freed.

glibc keeps what lies between blocks in use, also where large tensors were. Each thread that allocates next to others
has a heap (man 3 mallopt: an arena), whose end glibc gives back only if it is longer than a threshold: 64 MB, once a
block of 32 MB was freed anywhere in the process, as any WebUI does. `malloc_trim` does not give back the ends of
threads' heaps: 16 threads that compile kept 0.4 GB so (glibc 2.36). TCMalloc, by which AUTOMATIC1111's webui.sh
replaces glibc's `malloc` if it is installed, keeps nearly all.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_HEAP = 64 << 20
"""Bytes of a thread's heap at most, on 64 bits."""
_BLOCK = 1 << 20
_DONT_NEED = 4
"""MADV_DONTNEED of Linux: the pages take no memory until they are written."""


def give_back() -> None:
    """Give back what any thread has freed, but for the ends of other threads' heaps of glibc. Takes 0.25 s for a GB,
    and 0.05 s if there is little. Does nothing with another allocator; raises nothing."""
    found = _glibc()
    if found is not None:
        found.waiting.malloc_trim(0)
        give_back_of_thread()
    elif (release := _tcmalloc()) is not None:
        release()


def give_back_of_thread() -> None:
    """Give back what this thread has freed. Takes 1 to 4 ms. Does nothing with another allocator than glibc's; raises
    nothing."""
    found = _glibc()
    if found is None:
        return
    library, blocks = found.quick, list[int]()
    for _ in range(_HEAP // _BLOCK):
        # at the end of the heap, or of what is free before it
        block = library.malloc(_BLOCK)
        if not block:
            break
        blocks.append(block)
        first, end = -(-block // mmap.PAGESIZE), (block + _BLOCK) // mmap.PAGESIZE
        library.madvise(first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE, _DONT_NEED)
    for block in blocks:
        library.free(block)


class _Glibc(NamedTuple):
    waiting: Any
    """For functions that take long: other threads go on."""
    quick: Any
    """For those that do not. They keep the GIL: to get it again takes 5 ms if another thread is busy."""


@functools.lru_cache(maxsize=1)
def _glibc() -> _Glibc | None:
    """glibc, on a system of 64 bits on which nothing replaces its `malloc`; else None."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return None
    with contextlib.suppress(OSError, AttributeError):
        waiting, quick, own = ctypes.CDLL(None), ctypes.PyDLL(None), ctypes.CDLL("libc.so.6")
        if _address(quick.malloc) != _address(own.malloc):
            return None
        waiting.malloc_trim.argtypes, waiting.malloc_trim.restype = (ctypes.c_size_t,), ctypes.c_int
        quick.malloc.argtypes, quick.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        quick.free.argtypes, quick.free.restype = (ctypes.c_void_p,), None
        quick.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        quick.madvise.restype = ctypes.c_int
        return _Glibc(waiting, quick)
    return None


@functools.lru_cache(maxsize=1)
def _tcmalloc() -> Callable[[], None] | None:
    """TCMalloc's function (gperftools/malloc_extension_c.h); None without it."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        release = ctypes.CDLL(None).MallocExtension_ReleaseFreeMemory
        release.argtypes, release.restype = (), None
        return release  # type: ignore[no-any-return]
    return None


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
