"""What this machine has, and what will therefore be used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

from sfast_ext import host_gpu, reasons
from sfast_ext.reasons import Reason

TORCH: tuple[int, ...] = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version."""


@functools.lru_cache(maxsize=None)
def _triton_import_error() -> str | None:
    """Why Triton does not import, or None."""
    try:
        import triton
        import triton.language  # noqa: F401
    except Exception as exc:  # a broken wheel raises anything
        return f"{type(exc).__name__}: {exc}"
    return None


def has_triton() -> bool:
    """Whether Triton imports here."""
    return _triton_import_error() is None


def triton_error() -> str | None:
    """Why Triton does not import, or None."""
    return _triton_import_error()


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """Compute capability of the GPU, or None without one."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


@functools.lru_cache(maxsize=None)
def unserved(device: torch.device) -> Reason | None:
    """Why nothing is accelerated on a GPU; None if it is, and for other devices."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return reasons.ROCM()
    from sfast_ext.kernels.backend.triton_runtime import MIN_CAPABILITY

    has = torch.cuda.get_device_capability(device)
    return None if has >= MIN_CAPABILITY else reasons.OLD_GPU(*(f"{v[0]}.{v[1]}" for v in (has, MIN_CAPABILITY)))


def no_gpu() -> Reason | None:
    """Why nothing can be accelerated on this machine; None if a GPU is served."""
    if not torch.cuda.is_available():
        return reasons.NO_GPU()
    return unserved(host_gpu.device())


def in_short() -> str:
    """GPU, torch and kernels in a few words. Imports and tries nothing: it is for the start of a program."""
    gpu = torch.cuda.get_device_name(host_gpu.index()) if torch.cuda.is_available() else "CPU"
    triton = version("triton") or version("triton-windows")
    kernels = f"Triton {triton} and CUDA C++ kernels" if triton else "CUDA C++ kernels"
    if not torch.cuda.is_available():
        kernels = "PyTorch's own kernels"
    return f"{gpu}, torch {torch.__version__}, {kernels}"


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton kernels are used for tensors of this device; of some dtype at least, see `triton_refusal`. On a
    GPU the first call waits for a small kernel to be compiled and launched."""
    if not has_triton():
        return False
    from sfast_ext import kernels
    from sfast_ext.kernels.backend import trial

    if device.type == "cuda":
        refused = unserved(device) or triton_refusal(device) or triton_surpassed(device)
        return refused is None and trial.unsupported(device) is None
    return kernels.interpreted()


def triton_surpassed(device: torch.device) -> str | None:
    """Why Triton is not used on a GPU although it works there; None if it is used, and without Triton.

    Before 3.0 its kernels are slower than those in CUDA C++, and take longer to compile (docs/measurements.md).
    """
    from sfast_ext.kernels.backend import nvrtc, triton_runtime

    version = triton_runtime.VERSION
    if not version or version >= (3, 0) or not nvrtc.supported(device):
        return None
    return f"Triton {version[0]}.{version[1]} is older than 3.0, so kernels in CUDA C++ are used in its place"


def triton_refusal(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the installed Triton compiles nothing for a GPU, or nothing with values of one of these dtypes there; None
    if it does, and without Triton."""
    if not has_triton():
        return None
    from sfast_ext.kernels.backend import triton_runtime

    found = (triton_runtime.unsupported(device, dtype) for dtype in (None, *dtypes))
    return next((reason for reason in found if reason is not None), None)


def left_out(device: torch.device) -> list[str]:
    """What is put aside on a GPU although it is there, and why, a sentence each; as far as it was tried."""
    from sfast_ext.kernels.backend import nvrtc, trial

    reasons = [triton_surpassed(device), trial.tried(device), nvrtc.unsupported(device)]
    with contextlib.suppress(OSError, RuntimeError):  # the user has no home: nothing is kept
        reasons.append(nvrtc.uncached())
    return [f"{reason}." for reason in reasons if reason is not None]


def known_bad() -> list[str]:
    """What does not work here, and what happens instead, a sentence each."""
    if not torch.cuda.is_available():
        return ["There is no NVIDIA GPU that torch can use; nothing is accelerated."]
    device = host_gpu.device()
    reason = unserved(device)
    if reason is not None:
        return [f"Nothing is accelerated: {reason}."]
    missing = triton_refusal(device, torch.bfloat16) if has_triton() else f"Triton does not import ({triton_error()})"
    return [*([] if missing is None else [f"{missing}; {_without_triton(device)} instead."]), *left_out(device)]


def _without_triton(device: torch.device) -> str:
    from sfast_ext.kernels.backend import nvrtc

    return "kernels in CUDA C++ are used" if nvrtc.supported(device) else "PyTorch's own kernels are used"


def sums_in_half() -> bool:
    """Whether `Config.faster_sums` changes anything on this machine: whether its GPU is a GeForce."""
    if no_gpu() is not None:
        return False
    from sfast_ext.kernels.linear import mma_gemm

    return mma_gemm.half_sums_profitable(host_gpu.device())


def nvrtc_version() -> str | None:
    """The version of the NVRTC that torch brings, such as "12.8"; None if it was not found."""
    from sfast_ext.kernels.backend import nvrtc

    known = nvrtc.targets()
    return known[0] if known is not None else None


def nvrtc_file() -> str | None:
    """The NVRTC that is tried first, with its folder, but without what leads there: that may name the user."""
    from sfast_ext.kernels.backend import cuda_libraries

    first = next(iter(cuda_libraries.candidates(cuda_libraries.folders())), None)
    return None if first is None else f"{first.parent.name}/{first.name}"


def gpu_memory(device: torch.device | None = None) -> int | None:
    """Bytes of the memory of a GPU, by default the program's; None without one."""
    if not torch.cuda.is_available():
        return None
    of = device if device is not None and device.type == "cuda" else host_gpu.index()
    return int(torch.cuda.get_device_properties(of).total_memory)


SMALL_CARD = 10 << 30
"""Bytes of a card that counts as small."""


def is_small_card(device: torch.device | None = None) -> bool:
    """Whether a GPU, by default the program's, has little memory. False without one."""
    total = gpu_memory(device)
    return total is not None and total < SMALL_CARD


MAX_FOR_GRAPHS_MB = 4096


def graph_budget_mb(device: torch.device | None = None) -> int:
    """MB that CUDA graphs on a GPU, by default the program's, may take if nobody chose: a quarter of its memory, and no
    more than a large card has use for."""
    total = gpu_memory(device)
    return MAX_FOR_GRAPHS_MB if total is None else min(MAX_FOR_GRAPHS_MB, total >> 22)


def kept_in() -> Path:
    """The folder of what is kept on disk: compiled kernels, times, measurements.

    Raises:
        RuntimeError: the user has no home.
    """
    from sfast_ext.kernels.backend import nvrtc

    return nvrtc.folder()


@functools.lru_cache(maxsize=None)
def driver() -> str | None:
    """The version of NVIDIA's driver, such as "580.65.06"; None if it does not tell."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        said = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            failed = nvml.nvmlSystemGetDriverVersion(said, ctypes.c_uint(len(said)))
        finally:
            nvml.nvmlShutdown()
        return None if failed else said.value.decode("ascii", "replace")
    except (OSError, AttributeError):
        return None


def describe() -> dict[str, Any]:
    """Versions and devices, as JSON can carry."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver(),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "triton": version("triton") or version("triton-windows"),
        "triton_error": triton_error(),
        "nvrtc": nvrtc_version(),
        "xformers": version("xformers"),
        "compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("cl"),
        "gpu": None,
        "compute_capability": None,
        "known_bad": known_bad(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(host_gpu.index())
        found["gpu"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_memory_mb"] = properties.total_memory >> 20
        found["multiprocessors"] = properties.multi_processor_count
    return found
