"""Fused operations, one a file: `launch` in Triton or CUDA C++, and `reference`, the same in plain PyTorch.

A reference is the oracle of tests, and what `launch` does on a CPU without Triton's interpreter. No plan is made of
references: where no kernel serves an operation, PyTorch's own stays as it was recorded (`serves`).

A module may say of its launch: NEEDS_TRITON = False, where it does without; USES, the kernels that it may call in its
turn; WRITES, the argument whose memory the result takes.
"""

from __future__ import annotations

from types import ModuleType

import torch

from sfast_ext.kernels.backend import health, triton_runtime


def serves(module: ModuleType, device: torch.device, *, triton: bool) -> bool:
    """Whether a kernel may be launched on a device: it needs no Triton or there is one, and it is not put down."""
    return (triton or not getattr(module, "NEEDS_TRITON", True)) and health.usable(module, device)


def interpreted() -> bool:
    """Whether the kernels were imported under TRITON_INTERPRET=1: then they run on the CPU, for tests."""
    return triton_runtime.INTERPRETED
