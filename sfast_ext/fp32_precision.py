"""The precision in which torch multiplies float32 on a GPU: in full, or rounded to TF32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _precision(raw: Callable[[], str]) -> str:
    found = raw()
    return "ieee" if found == "none" else found  # none is what was never set


_getter = getattr(torch._C, "_get_fp32_precision_getter", None)
RAW: tuple[Callable[[], Any], Callable[[], Any]]
"""The settings of matrix products and of convolutions, as torch keeps them: other values may mean the same."""

if _getter is None:
    RAW = read_matmul, read_conv = torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32
else:
    # the older getters raise if a program has used the newer setters
    RAW = functools.partial(_getter, "cuda", "matmul"), functools.partial(_getter, "cuda", "conv")
    read_matmul, read_conv = functools.partial(_precision, RAW[0]), functools.partial(_precision, RAW[1])
"""The precision of matrix products and of convolutions, to be compared with `==`."""


def matmul_in_tf32() -> bool:
    """Whether the operands of matrix products in float32 may be rounded to TF32."""
    return read_matmul() in (True, "tf32")


def matmul_as_conv() -> bool:
    """Whether a convolution in float32 may be computed by matrix products: both are rounded to TF32, as WebUIs have it,
    or neither. By torch's own defaults convolutions alone are."""
    return bool(read_matmul() == read_conv())
