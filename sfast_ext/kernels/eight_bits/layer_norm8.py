"""Layer norm with an int8 result and a scale for each row (quantise_rows.py), of a sum as well (add_layer_norm8.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv, launch_kernel
from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.kernels.pointwise import layer_norm
from sfast_ext.kernels.pointwise.layer_norm import Operands


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(q (..., C) int8, scale (...) float32) of the layer norm of x (..., C), as `quantise_rows.reference` has them.

    Computes in float32 (float64 if x is): the norm is not rounded in between.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return quantise_rows.reference(layer_norm.reference(x, weight, bias, eps, compute))


def constants(columns: int, pack: int, dtype: torch.dtype, add: bool) -> dict[str, int] | None:
    """Compile-time parameters of csrc/layer_norm8.cu; None for rows that it does not take."""
    given = layer_norm.constants(columns, pack, dtype, dtype, add)
    return given and {name: value for name, value in given.items() if name != "OUT"}


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, rows, columns, eps = args
    numbers = ctypes.c_int(rows), ctypes.c_int(columns), ctypes.c_float(eps)
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


_OPERANDS = (
    "x",
    "residual",
    "shift",
    "post_bias",
    "weight",
    "bias",
    "out_sum",
    "out",
    "scales",
    "rows",
    "columns",
    "eps",
)
SOURCE = nvrtc.Source("layer_norm8", _prepared, _OPERANDS)


def accepts(operands: Operands) -> str | None:
    """Why the kernel does not take these operands; None if it does."""
    x, add = operands.x, operands.residual is not None
    if operands.residual is not None and operands.residual.shape != x.shape:
        return "a residual of another shape"
    reason = cuda_tier.accepts(SOURCE, *operands)
    if reason is None and (not x.dim() or constants(x.shape[-1], 1, x.dtype, add) is None):
        return "rows that are too long, or empty"
    return reason


def normalised(operands: Operands, eps: float) -> tuple[Tensor | None, Tensor, Tensor]:
    """(sum, q, scale) by one kernel; the sum is None without a residual.

    Raises:
        Declined: the operands are not taken.
    """
    require(accepts(operands))
    columns, add = operands.x.shape[-1], operands.residual is not None
    dense = [None if t is None else t.contiguous() for t in operands]
    x = dense[0]
    assert x is not None
    given = constants(columns, cuda_tier.pack(columns, *dense), x.dtype, add)
    assert given is not None  # of one element an access takes the least
    out_sum = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add else None
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    count = scale.numel()
    if count:
        grid = (cdiv(count, given["ROWS"]),)
        launch_kernel(SOURCE, grid, x, *dense[1:], out_sum, q, scale, count, columns, eps, **given)
    return out_sum, q, scale


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`reference` in one launch: rows stay in registers between the passes over them.

    x (..., C) is made contiguous; float16, bfloat16 or float32, one dtype for all operands; up to 8,192 columns.
    """
    return normalised(Operands(x, weight=weight, bias=bias), eps)[1:]
