"""The precision in which torch multiplies float32 on a GPU: in full, or rounded to TF32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _precision(getter: Callable[[str, str], str], kind: str) -> str:
    found = getter("cuda", kind)
    return "ieee" if found == "none" else found  # none is what was never set


def _readers() -> tuple[Callable[[], Any], Callable[[], Any]]:
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32
    # the older getters raise where a program has used the newer setters
    return functools.partial(_precision, getter, "matmul"), functools.partial(_precision, getter, "conv")


read_matmul, read_conv = _readers()
"""The precision of matrix products and of convolutions, to be compared with `==`."""


def matmul_in_tf32() -> bool:
    """Whether the operands of matrix products in float32 may be rounded to TF32."""
    return read_matmul() in (True, "tf32")


def matmul_as_conv() -> bool:
    """Whether a convolution in float32 may be computed by matrix products: both are rounded to TF32, as WebUIs have it,
    or neither. By torch's own defaults convolutions alone are."""
    return bool(read_matmul() == read_conv())
