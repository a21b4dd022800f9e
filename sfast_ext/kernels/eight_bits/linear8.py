"""A linear layer of 8-bit integers: scales, bias and a residual are applied to the sums of the product."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel
from sfast_ext.kernels.eight_bits import choice8, mma_gemm8, wgmma_gemm8
from sfast_ext.kernels.linear import mma_gemm

_choice = choice8.choices("linear, 8 bits")
_MOST_FEW = 16  # rows that PyTorch's product of integers does not take


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """x (..., K) and weight (N, K) in int8, x_scale (...) and weight_scale (N) in float32, bias (N), residual
    (..., N) -> (..., N): x_scale * weight_scale * (x @ weight.T) + bias + residual, rounded once to dtype.

    Computes in float32 (float64 if scales are). Does not overwrite the residual.
    """
    y = scaled(x, x_scale, weight, weight_scale, bias)
    return (y if residual is None else y + residual.to(y.dtype)).to(dtype)


def scaled(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x_scale * weight_scale * (x @ weight.T) + bias, in float32 (float64 if scales are)."""
    wide = x_scale.dtype
    return _of_sums(F.linear(x.to(wide), weight.to(wide)), x_scale, weight_scale, bias)


def _of_sums(sums: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    y = sums * x_scale[..., None] * weight_scale
    return y if bias is None else y + bias.to(y.dtype)


def fallback(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """`reference` by PyTorch's product of integers if it takes them. Does not overwrite the residual."""
    y = scaled_by_pytorch(x, x_scale, weight, weight_scale, bias)
    return (y if residual is None else y + residual).to(dtype)


def scaled_by_pytorch(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """`scaled` by PyTorch's product of integers if it takes them: on a GPU, more than 16 rows, sizes that are multiples
    of 8."""
    rows = x.numel() // max(x.shape[-1], 1)
    fits = x.is_cuda and rows > _MOST_FEW and x.shape[-1] % 8 == 0 and weight.shape[0] % 8 == 0
    if not fits or not _multiplies_integers(x.device):
        return scaled(x, x_scale, weight, weight_scale, bias)
    sums = torch._int_mm(x.reshape(rows, -1), weight.contiguous().t())
    return _of_sums(sums.view(*x.shape[:-1], -1), x_scale, weight_scale, bias)


@functools.lru_cache(maxsize=None)
def _multiplies_integers(device: torch.device) -> bool:
    """Whether this PyTorch multiplies 8-bit integers on a GPU: 2.1 does not under Windows."""
    try:
        ones = torch.ones(32, 32, dtype=torch.int8, device=device)
        return hasattr(torch, "_int_mm") and torch._int_mm(ones, ones).dtype == torch.int32
    except RuntimeError:
        return False


@kernel(reference, fallback=fallback, writes=5, any_source=True, cuda_sources=choice8.SOURCES)
def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """`reference`, by `wgmma_gemm8` on Hopper if that is profitable, else by `mma_gemm8`.

    dtype is float16 or bfloat16, which bias and residual have too; K a multiple of 64, N of 8; weight, scales and
    residual are contiguous. The residual, if there is one, is overwritten by the result. Other operands are declined,
    and the residual is not overwritten.
    """
    unfit = wgmma_gemm8.accepts(x, x_scale, weight, weight_scale, bias, residual, dtype)
    if unfit is None and wgmma_gemm8.profitable(x):
        return wgmma_gemm8.linear(x, x_scale, weight, weight_scale, bias, residual, dtype)
    also_unfit = mma_gemm8.accepts(x, x_scale, weight, weight_scale, bias, residual, dtype)
    if also_unfit is not None:
        raise Declined(f"on Hopper: {unfit or SLOWER}; on any card: {also_unfit}")
    ours = functools.partial(mma_gemm8.linear, x, x_scale, weight, weight_scale, bias, dtype)
    epilogue = mma_gemm.Epilogue(mma_gemm.PLAIN if residual is None else mma_gemm.RESIDUAL)
    tiles = mma_gemm8.tiles(x.numel() // x.shape[-1], weight, epilogue)
    return choice8.run(_choice, x, weight, bias, dtype, ours, tiles, residual)
