"""Recording of the products of 8-bit integers that SDNQ computes by Triton kernels.

Its kernels have no rule for a subclass of `FakeTensorMode`, or are launched without an operator. So the call is
recorded, as the operations that SDNQ runs without Triton: the sums of integers are exact, and the scales and the bias
are applied in float32 in the same order. No library is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from sfast_ext import reasons
from sfast_ext.call_signature import NotOurs

_PACKAGE = "sdnq"
"""A package of this name, or one in the package of a host."""
# of torch._int_mm on a GPU: terms and columns are multiples of this, and rows are more
_MULTIPLE, _ROWS = 8, 16


def recorders() -> dict[FunctionType, Callable[..., Any]]:
    """The recorder for each function of SDNQ that the host has imported."""
    found: dict[FunctionType, Callable[..., Any]] = {}
    # one search in all names takes a tenth of the time of one in each, of which there are thousands
    if _PACKAGE not in "\n".join(list(sys.modules)):
        return found
    for home, module in [each for each in list(sys.modules.items()) if _PACKAGE in each[0]]:
        _, own, inner = f".{home}".rpartition(f".{_PACKAGE}.")
        for name, recorder in _FUNCTIONS.get(inner, {}).items() if own else ():
            function = getattr(module, name, None)
            if isinstance(function, FunctionType):
                found[function] = recorder
    return found


def _scaled(
    original: FunctionType, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """(M, K) and (K, N), scales (M, 1) and (1, N), a bias (N) or (M, N)."""
    if not _of_integers(a, b):
        return original(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        return original(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    sums = _sums(original, a, b).to(torch.float32).mul_(scale_a)
    return (sums.mul_(scale_b) if bias is None else torch.addcmul(bias, sums, scale_b)).to(out_dtype)


def _plain(original: FunctionType, a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.int32) -> Tensor:
    if not _of_integers(a, b):
        return original(a, b, out_dtype=out_dtype)
    return _sums(original, a, b).to(out_dtype)


def _with_bias(
    original: FunctionType, a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if bias is not None or not _of_integers(a, b):
        return original(a, b, bias=bias, out_dtype=out_dtype)
    return _sums(original, a, b).to(out_dtype or torch.int32)


def _of_integers(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.int8 and a.dim() == b.dim() == 2


def _sums(original: FunctionType, a: Tensor, b: Tensor) -> Tensor:
    (rows, terms), columns = a.shape, b.shape[1]
    if a.is_cuda and (terms % _MULTIPLE or columns % _MULTIPLE or rows <= _ROWS):
        raise NotOurs(reasons.CALL_NOT_RECORDED(f"{_PACKAGE}.{original.__name__}"))
    return torch._int_mm(a, b)


_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "kernel_wrappers": {"int_scaled_mm_func": _scaled, "int_mm_func": _plain},
    "kernels.triton_scaled_mm": {"sdnq_scaled_mm": _scaled},
    "kernels.triton_mm": {"sdnq_triton_mm": _with_bias},
}
"""By module of the package and name. A release has its Triton kernels as plain functions, or the functions of
`kernel_wrappers` choose an operator for them."""
