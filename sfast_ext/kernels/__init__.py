"""Fused operations, one per file: `launch`, in Triton or CUDA C++, and `reference`, the same in plain PyTorch.

`launch` is a kernel (`backend.registry.Kernel`), which nodes of a rewritten graph call. References are the oracles of
tests; for operands that it declines, as on a CPU without Triton's interpreter, a kernel calls its reference or a
library's fallback. No plan is made of references: if no kernel is supported for an operation, PyTorch's own stays as it
was recorded.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from sfast_ext.kernels.backend import registry, triton_runtime
from sfast_ext.kernels.backend.registry import Kernel

_ROOMS = ("attention", "conv", "eight_bits", "group_norm", "linear", "pointwise")


def registered() -> dict[str, Kernel[..., Any]]:
    """All kernels by name; imports the files of all rooms."""
    for room in _ROOMS:
        package = importlib.import_module(f"{__name__}.{room}")
        for file in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{file.name}")
    return registry.registered()


def interpreted() -> bool:
    """Whether the kernels were imported under TRITON_INTERPRET=1: they run on the CPU then, for tests."""
    return triton_runtime.INTERPRETED
