"""The machine that a measurement belongs to."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from sfast_ext import environment

PACKAGE = Path(__file__).parents[2]


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise(where: torch.device) -> None:
    """Wait for the GPU, before a clock is read."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def free_memory(where: torch.device) -> None:
    """Give back what nothing holds any more, of a GPU to its driver."""
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=PACKAGE)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or _by_nvml()


def _by_nvml() -> str | None:
    """By the library that nvidia-smi asks, which may be there without it."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        told = ctypes.create_string_buffer(80)
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(told, len(told)):
            return None
    except (OSError, AttributeError):
        return None
    return told.value.decode(errors="replace") or None


def commit() -> str | None:
    """What SFAST_COMMIT says: a copy of the files may lie in another checkout. Else the commit of this checkout, `+`
    after it if files differ from it."""
    told = os.environ.get("SFAST_COMMIT")
    if told:
        return told
    found = _first_line("git", "rev-parse", "--short=12", "HEAD")
    if found is None:
        return None
    return found + ("+" if _first_line("git", "status", "--porcelain", "--untracked-files=no") else "")


def describe() -> dict[str, Any]:
    """What a result needs next to it to be understood."""
    found = environment.describe()
    return {
        "gpu": found["gpu"],
        "driver": found.get("driver") or driver(),
        "python": found["python"],
        "torch": found["torch"],
        "cuda": found["cuda"],
        "cudnn": found["cudnn"],
        "triton": found["triton"],
        "diffusers": environment.version("diffusers"),
        "commit": commit(),
    }
