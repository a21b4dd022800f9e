"""How much system memory this process may still take."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from sfast_ext.hosts import system_memory

GIB = 1 << 30
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file")
V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """One with 10 GiB available, and no container."""
    there = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=10 * GIB))
    monkeypatch.setitem(sys.modules, "psutil", there)
    monkeypatch.setattr(system_memory, "_CGROUP_ROOT", tmp_path)


def contain(folder, names, limit, used, cached):
    for name, text in zip(names, (limit, used, f"anon 1\n{names[3]} {cached}\nother 7\n")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(str(text))


def test_without_a_container_it_is_the_machine_s():
    assert system_memory.available_bytes() == 10 * GIB and system_memory.has_room()


@pytest.mark.parametrize("names", [V1, V2])
def test_a_container_s_limit_counts_and_cached_files_do_not(tmp_path, names):
    contain(tmp_path, names, 8 * GIB, 6 * GIB, GIB)
    assert system_memory.available_bytes() == 3 * GIB and not system_memory.has_room()
    contain(tmp_path, names, 8 * GIB, 6 * GIB, 2 * GIB)
    assert system_memory.has_room()


def test_a_container_without_a_limit(tmp_path):
    contain(tmp_path, V2, "max", GIB, 0)
    contain(tmp_path, V1, (1 << 63) - 4096, GIB, 0)
    assert system_memory.available_bytes() == 10 * GIB


@pytest.mark.parametrize(("succeeds", "committable", "room"), [(1, 5, True), (1, 3, False), (0, 5, False)])
def test_what_windows_lets_a_process_commit(monkeypatch, succeeds, committable, room):
    def status(pointer):
        assert pointer._obj.dwLength == 64
        pointer._obj.ullAvailPageFile = committable * GIB
        return succeeds

    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=status)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(system_memory.os, "name", "nt")
    try:
        assert system_memory.available_bytes() == (committable * GIB if succeeds else 0)
        assert system_memory.has_room() == room
    finally:
        # before pytest makes a path of its own
        monkeypatch.undo()


def test_where_nothing_tells_there_is_no_room(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert system_memory.available_bytes() == 0 and not system_memory.has_room()
