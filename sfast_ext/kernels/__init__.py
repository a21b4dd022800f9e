"""Fused operations, one a file: `reference` in plain PyTorch, `launch` in Triton with the same signature."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from sfast_ext.kernels import _triton


def pick(module: ModuleType, *, triton: bool) -> Callable[..., Any]:
    """The function of a kernel module to call: `launch`; where Triton is not wanted, `library` or else `reference`.

    A module whose launch does without Triton says so with NEEDS_TRITON = False and is always
    launched. A launch takes what its reference takes: what the kernel cannot do (no Triton, float64, a CPU)
    it hands to the reference.
    """
    if triton or not getattr(module, "NEEDS_TRITON", True):
        return module.launch
    return getattr(module, "library", module.reference)


def interpreted() -> bool:
    """Whether the kernels were imported under TRITON_INTERPRET=1: then they run on the CPU, for tests."""
    return _triton.INTERPRETED
