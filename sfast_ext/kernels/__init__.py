"""Fused operations, one per file: `launch` in Triton or CUDA C++, and `reference`, the same in plain PyTorch.

Each file declares a record (`backend.registry.Kernel`) and registers it. References are the oracles of tests; `launch`
calls its reference on a CPU without Triton's interpreter. No plan is made of references: where no kernel serves an
operation (`serves`), PyTorch's own stays as it was recorded.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import torch

from sfast_ext.kernels.backend import health, registry, triton_runtime
from sfast_ext.kernels.backend.registry import Kernel

_ROOMS = ("attention", "conv", "group_norm", "linear", "pointwise")


def serves(kernel: Kernel | ModuleType, device: torch.device, *, triton: bool) -> bool:
    """Whether a kernel, or the kernel of a file, may be launched on a device: it is not disabled, and what it needs is
    there, which is Triton (`triton`) or, on a device that all its sources run on, NVRTC."""
    record = registry.of(kernel)
    if record is None:
        raise ValueError(f"{kernel} has no kernel")
    there = triton or not record.needs_triton or _compiles(record, device)
    return there and health.usable(record, device)


def _compiles(kernel: Kernel, device: torch.device) -> bool:
    there = [source.available(device) for source in kernel.cuda_sources]
    return bool(there) and not interpreted() and (any(there) if kernel.any_source else all(there))


def registered() -> dict[str, Kernel]:
    """All kernels by name; imports the files of all rooms."""
    for room in _ROOMS:
        package = importlib.import_module(f"{__name__}.{room}")
        for file in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{file.name}")
    return registry.known()


def interpreted() -> bool:
    """Whether the kernels were imported under TRITON_INTERPRET=1: they run on the CPU then, for tests."""
    return triton_runtime.INTERPRETED
