"""Keeps torch's guard for CUDA devices alive if torch has CUDA and there is no GPU.

There a fake mode replaces the guard by one that does nothing (`torch._C._ensureCUDADeviceGuardSet`). Torch, 2.11 at
least, keeps that one in the memory of the thread that enters a fake mode first. Once this thread has ended, entering
one reads freed memory, and the process ends. WebUIs make images in threads that come and go.
"""

from __future__ import annotations

import contextlib
import functools
import threading

import torch


@functools.lru_cache(maxsize=None)
def outlive_threads() -> None:
    """Let a thread that never ends be the first. Call it before a fake mode is entered."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None or not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    entered = threading.Event()

    def stay() -> None:
        with contextlib.suppress(Exception):  # the fake mode meets it again
            ensure()
        entered.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="sfast-device-guard", daemon=True).start()
    entered.wait()
