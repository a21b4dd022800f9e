"""When memory that the C library keeps of what was freed goes back to the system."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
import torch
from fuzz.nets import SmallNet

from sfast_ext import Config, Hooks
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.report import Report

ON, OFF = Config(allow_cpu=True, drop_slower=False), Config(allow_cpu=True, enabled=False)
PIECES, PIECE = 1500, 100 << 10
"""Smaller than what glibc takes from the system one by one, and so many that it would be noticed."""


@pytest.fixture
def trims(monkeypatch):
    """How often memory was given back."""
    found = []
    monkeypatch.setattr(system_memory, "trim", lambda: found.append(1))
    return found


def used(attachment, *nets):
    """Both have a plan."""
    for net in nets:
        attachment.follow(net, ON, keep=nets)
        with torch.no_grad():
            for _ in range(2):
                net(torch.randn(2, 4, 8, 8), torch.tensor([5, 7]), torch.randn(2, 7, 8))
    assert all(each.plans for each in attachment.accelerators())


@pytest.fixture
def attachment():
    made = Attachment(lambda module: Hooks(), Report())
    used(made, SmallNet().eval(), SmallNet().eval())
    yield made
    made.release()


def test_after_the_extension_is_switched_off(attachment, trims):
    first = attachment.accelerators()[0].module
    attachment.follow(first, OFF)
    assert trims == [1]
    attachment.follow(first, OFF)
    attachment.release()
    # there was nothing to free
    attachment.follow(first, ON)
    attachment.follow(first, OFF)
    assert trims == [1]


def test_after_the_models_were_released(attachment, trims):
    attachment.release()
    attachment.release()
    assert trims == [1]


@pytest.mark.parametrize("stays", [False, True])
def test_after_plans_were_dropped_for_another_checkpoint_and_not_if_they_stay(attachment, trims, monkeypatch, stays):
    monkeypatch.setattr(gpu_room, "has_room_to_wait", lambda module: stays)
    for each in attachment.accelerators():
        monkeypatch.setattr(each, "give_memory_back", lambda: False)
    attachment.suspend()
    assert trims == ([] if stays else [1])


def test_after_one_of_several_models_is_gone(attachment, trims):
    first = attachment.accelerators()[0].module
    attachment.follow(first, ON)
    assert trims == [1]
    attachment.follow(first, ON)
    assert trims == [1]


def test_after_the_user_has_dropped_the_plans(attachment, trims):
    assert attachment.drop_plans() == 2 and attachment.drop_plans() == 0
    assert trims == [1]


def test_an_image_gives_nothing_back(attachment, trims):
    used(attachment, *[each.module for each in attachment.accelerators()])
    assert trims == []


def test_a_release_that_fails_hides_no_other(attachment, trims, monkeypatch):
    def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr(attachment.accelerators()[0], "release", fail)
    attachment.release()
    assert trims == [1] and attachment.accelerators() == []


GIVES_BACK = f"""
import gc, importlib.util, os, sys

spec = importlib.util.spec_from_file_location("system_memory", sys.argv[1])
system_memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(system_memory)

def resident_bytes():
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

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
system_memory.trim()
print(before - resident_bytes(), len(between))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_between_what_is_still_used_are_given_back():
    # what else a process has freed decides what the C library keeps: this one has done nothing before
    command = [sys.executable, "-c", GIVES_BACK, system_memory.__file__]
    given, between = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert given > PIECES * PIECE / 2 and between == PIECES


@pytest.mark.parametrize("found", ["another system", "another library", "no library"])
def test_elsewhere_nothing_happens(monkeypatch, found):
    class Library:
        def __init__(self, name):
            if found == "no library":
                raise OSError

    system_memory._malloc_trim.cache_clear()
    monkeypatch.setattr(sys, "platform", "win32" if found == "another system" else "linux")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    try:
        system_memory.trim()
        assert system_memory._malloc_trim() is None
    finally:
        system_memory._malloc_trim.cache_clear()
