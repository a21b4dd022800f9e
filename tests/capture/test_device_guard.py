"""Captures in threads that end, with a torch for CUDA and no GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from sfast_ext.capture import device_guard, fake_trace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def first_time():
    device_guard.outlive_threads.cache_clear()
    yield
    device_guard.outlive_threads.cache_clear()


def in_a_thread_that_ends(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@pytest.mark.parametrize(("built", "gpu", "asked"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_the_first_to_ask_is_a_thread_that_stays(monkeypatch, built, gpu, asked):
    threads = []

    def ensure():
        threads.append(threading.current_thread())

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", ensure, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for _ in range(2):
        in_a_thread_that_ends(fake_trace.fake_mode)
    assert len(threads) == asked
    assert all(thread.is_alive() and thread.daemon for thread in threads)


def test_a_torch_that_raises_holds_nobody_up(monkeypatch):
    def ensure():
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", ensure, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    in_a_thread_that_ends(device_guard.outlive_threads)


def test_captures_in_one_thread_after_another():
    # in a process of its own: with torch for CUDA 13.0 and no GPU, it was killed by the second
    program = """
        import threading, torch
        from sfast_ext.capture import fake_trace

        def capture():
            fake_trace.record(lambda x: (x + 1,), [torch.ones(3)])

        for _ in range(3):
            thread = threading.Thread(target=capture)
            thread.start()
            thread.join()
            print("captured")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["captured"] * 3, done.stderr
