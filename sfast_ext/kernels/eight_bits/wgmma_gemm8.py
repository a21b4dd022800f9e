"""Linear layers of 8-bit integers by Hopper's instructions: not supported yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SOURCES: tuple[Any, ...] = ()
"""What is launched in CUDA C++ (`nvrtc.Source`)."""


def accepts(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    *,
    geglu: bool = False,
) -> str | None:
    """Why `linear` and `geglu` do not take the operands; None if they do."""
    return "not supported"


def profitable(x: Tensor, weight: Tensor) -> bool:
    """Whether they are faster than `mma_gemm8`."""
    return False


def linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`linear8.reference`."""
    raise NotImplementedError


def geglu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gate_first: bool,
    approximate: str,
    dtype: torch.dtype,
) -> Tensor:
    """`geglu8.reference`."""
    raise NotImplementedError
