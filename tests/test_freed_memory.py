"""What glibc and TCMalloc keep of memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sfast_ext import freed_memory

PIECES, PIECE = 1500, 100 << 10
"""Smaller than what glibc takes from the system one by one, and so many that it would be noticed."""
BEGIN = """
import ctypes, gc, importlib.util, os, sys, threading

spec = importlib.util.spec_from_file_location("freed_memory", sys.argv[1])
freed_memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(freed_memory)

def resident_bytes():
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
BETWEEN = f"""{BEGIN}
pieces, between = [], []
for _ in range({PIECES}):
    pieces.append(bytearray({PIECE}))
    between.append(bytearray(1000))
for piece in pieces:
    piece[::4096] = b"x" * len(piece[::4096])
pieces.clear()
del piece
gc.collect()
before = resident_bytes()
freed_memory.give_back()
print(before - resident_bytes(), len(between))
"""
OF_A_THREAD = f"""{BEGIN}
# as a tensor: from now on the ends of heaps stay up to 64 MB
large = bytearray(31 << 20)
del large
gc.collect()
told = []

def work():
    kept = bytearray(b"kept" * 20_000)
    pieces = [bytearray(100_000) for _ in range(500)]
    for piece in pieces:
        piece[::4096] = b"x" * len(piece[::4096])
    pieces.clear()
    del piece
    told.append(resident_bytes())
    library.malloc_trim(0)
    told.append(resident_bytes())
    freed_memory.give_back_of_thread()
    told.append(resident_bytes())
    freed_memory.give_back_of_thread()
    assert kept == b"kept" * 20_000
    assert sum(map(len, [bytearray(100_000) for _ in range(500)])) == 50_000_000

library = ctypes.CDLL(None)
worker = threading.Thread(target=work)
worker.start()
worker.join()
print(*told)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or sys.maxsize < 2**32, reason="another C library")


def told_by(script: str, **variables: str) -> list[int]:
    """What a new process says: what else one has freed decides what is kept."""
    command = [sys.executable, "-c", script, freed_memory.__file__]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **variables})
    return list(map(int, done.stdout.split()))


@glibc
def test_pages_between_what_is_still_used() -> None:
    given, between = told_by(BETWEEN)
    assert given > PIECES * PIECE / 2 and between == PIECES


@glibc
def test_the_end_of_a_thread_s_heap() -> None:
    freed, trimmed, given = told_by(OF_A_THREAD)
    # glibc's own function leaves most of it
    assert freed - trimmed < 20 << 20
    assert trimmed - given > 25 << 20


LARGE = f"""{BEGIN}
pieces = [bytearray(31 << 20) for _ in range(10)]
for piece in pieces:
    piece[::4096] = b"x" * len(piece[::4096])
pieces.clear()
del piece
gc.collect()
freed_memory.give_back_of_thread()
before = resident_bytes()
freed_memory.give_back()
print(before >> 20, resident_bytes() >> 20)
"""


def test_tcmalloc_in_the_place_of_glibc_s() -> None:
    """As AUTOMATIC1111's webui.sh starts the WebUI."""
    library = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    if library is None:
        pytest.skip("TCMalloc is not installed (libtcmalloc-minimal4)")
    kept, left = told_by(LARGE, LD_PRELOAD=library)
    assert kept > 300 > 100 > left


def test_tcmalloc_is_asked_for_what_it_keeps(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    class Library:
        def __init__(self, name: str | None) -> None:
            self.malloc = self.malloc_trim = None
            self.MallocExtension_ReleaseFreeMemory = Released()

    class Released:
        def __call__(self) -> None:
            asked.append(1)

    asked: list[int] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(freed_memory, "_glibc", lambda: None)
    freed_memory.give_back_of_thread()
    assert not asked
    freed_memory.give_back()
    assert asked == [1]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The C library is looked for again."""
    found = freed_memory._glibc, freed_memory._tcmalloc
    for find in found:
        find.cache_clear()
    yield
    for find in found:
        find.cache_clear()


@pytest.mark.parametrize("found", ["another system", "another library", "no library"])
def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch, forgotten: None, found: str) -> None:
    class Library:
        def __init__(self, name: str | None) -> None:
            if found == "no library":
                raise OSError

    monkeypatch.setattr(sys, "platform", "win32" if found == "another system" else "linux")
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, kind, Library)
    freed_memory.give_back()
    freed_memory.give_back_of_thread()
    assert freed_memory._glibc() is None and freed_memory._tcmalloc() is None


@glibc
def test_without_memory_it_does_what_it_can(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    found, freed = freed_memory._glibc(), []
    assert found is not None
    library = found.quick
    blocks = iter([library.malloc(freed_memory._BLOCK), None])

    class Short:
        malloc = staticmethod(lambda size: next(blocks))
        madvise = staticmethod(library.madvise)

        @staticmethod
        def free(block: int) -> None:
            freed.append(block)
            library.free(block)

    monkeypatch.setattr(freed_memory, "_glibc", lambda: found._replace(quick=Short()))
    freed_memory.give_back_of_thread()
    assert len(freed) == 1


@glibc
def test_another_allocator_is_left_to_itself(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    """As a library that is preloaded, which AUTOMATIC1111 does."""
    monkeypatch.setattr(freed_memory, "_address", lambda function, given=[]: given.append(1) or len(given))
    freed_memory.give_back()
    freed_memory.give_back_of_thread()
    assert freed_memory._glibc() is None


@glibc
def test_a_busy_thread_is_not_waited_for() -> None:
    """Each wait for the GIL would take 5 ms."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            freed_memory.give_back_of_thread()
            taken.append(time.perf_counter() - began)
    finally:
        stop.set()
        worker.join()
    # with the GIL given up it would be 192 times 5 ms at most, and 0.3 s as measured
    assert min(taken) < 0.1
