"""Whether Triton works at all on a GPU, tried once with a small kernel. Triton also imports without a C compiler or
Python.h, but compiles nothing there: it builds its launchers in C."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sfast_ext.kernels.backend import health, triton_runtime
from sfast_ext.kernels.backend.triton_runtime import constexpr, jit, launch_kernel, pdl_wait, tl

logger = logging.getLogger("sfast_ext")

PATIENCE_S = 60.0
"""Seconds that a plan waits for the trial, which takes a fraction of one, or a few if C is compiled first."""

_VALUE = 20
_WHAT_TO_DO = "install a C compiler and Python's headers (python3-dev)"
_trials: dict[int, _Trial] = {}
_lock = threading.Lock()
# held by a trial and by captures: loading a kernel invalidates a CUDA graph capture of another thread
_quiet = threading.Lock()


@jit(do_not_specialize=["value"])
def trial_kernel(out, value, PDL: constexpr):
    pdl_wait(PDL)
    tl.store(out, value)


def unsupported(device: torch.device) -> str | None:
    """Why Triton compiles or runs nothing on a GPU, a sentence without its full stop; None if it does.

    The first to ask has one small kernel compiled and launched, in another thread; all wait for that, at most
    `PATIENCE_S`. None without Triton, in its interpreter, and for other devices.
    """
    if (
        not triton_runtime.AVAILABLE
        or triton_runtime.INTERPRETED
        or device.type != "cuda"
        or not torch.cuda.is_available()
    ):
        return None
    if torch.cuda.is_current_stream_capturing():
        return tried(device)  # a trial would wait for the end of the capture
    index = _index(device)
    with _lock:
        trial = _trials.get(index)
        if trial is None:
            trial = _trials[index] = _Trial(torch.device("cuda", index))
    return trial.result(PATIENCE_S)


def tried(device: torch.device) -> str | None:
    """What `unsupported` would say, if a trial was made already; None else. Nothing is tried or waited for."""
    trial = _trials.get(_index(device)) if _trials and device.type == "cuda" else None
    return None if trial is None else trial.result(0.0)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, no trial runs."""
    mine = _quiet.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        if mine:
            _quiet.release()


class _Trial:
    """One kernel, compiled and launched in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begun = device, time.monotonic()
        self._reason: str | None = None
        self._over = threading.Event()
        # no daemon: inside of a compiler when Python ends, it might crash the process
        threading.Thread(target=self._make, name="sfast: trial of Triton", daemon=False).start()

    def result(self, patience: float) -> str | None:
        """The reason why it failed, or None; waits for it so many seconds."""
        if self._over.wait(patience):
            return self._reason
        if time.monotonic() - self._begun < PATIENCE_S:
            return None
        return f"Triton compiles nothing here: its first kernel has not run after {PATIENCE_S:g} seconds"

    def _make(self) -> None:
        try:
            with _quiet:
                _try_twice(self._device)
        except Exception as exc:
            logger.debug("the trial of Triton failed", exc_info=True)
            self._reason = _words(exc)
        finally:
            self._over.set()


def _try_twice(device: torch.device) -> None:
    try:
        run(device)
    except Exception as exc:
        if not health.disturbed(exc):
            raise
        run(device)


def run(device: torch.device) -> None:
    """Compile the kernel, launch it and look at what it wrote.

    Raises:
        Exception: whatever the compiler or the launch raises; RuntimeError if it wrote something else.
    """
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        out = torch.zeros(1, dtype=torch.int32, device=device)
        launch_kernel(trial_kernel, (1,), out, _VALUE)
        if out.item() != _VALUE:
            raise RuntimeError("a kernel ran and wrote something else than it should")


def _words(exc: Exception) -> str | None:
    """Why nothing compiles or runs; None if Triton is not the cause: memory ran out, or others captured a graph."""
    text = str(exc)
    if isinstance(exc, torch.cuda.OutOfMemoryError) or "out of memory" in text or "captur" in text:
        return None
    if isinstance(exc, subprocess.CalledProcessError):
        command = exc.cmd if isinstance(exc.cmd, str) else exc.cmd[0]
        reason = f"{Path(command).name} ended with status {exc.returncode}"
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        if not header.is_file():
            reason += f", there is no {header}"
    else:
        reason = health.describe(exc)
    in_c = isinstance(exc, subprocess.CalledProcessError) or "C compiler" in text
    return f"Triton compiles nothing here: {reason}" + (f"; {_WHAT_TO_DO}" if in_c else "")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
