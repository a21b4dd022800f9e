"""A convolution's epilogue in one pass, NHWC: bias, residual and scale."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    cdiv,
    channels_inner,
    channels_outer,
    constexpr,
    jit,
    launch_kernel,
    pdl_wait,
    tl,
)


def reference(x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float = 1.0) -> Tensor:
    """(x + bias[None, :, None, None] + residual) * scale, channels last: x, residual (N, C, H, W), bias (C,).

    Computes in float32 (float64 if x is) and rounds once, to x's dtype.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        y = y + bias.to(y.dtype).reshape(-1, *[1] * (x.dim() - 2))
    if residual is not None:
        y = y + residual.to(y.dtype)
    return channels_outer(channels_inner((y * scale).to(x.dtype)))


_ROWS, _BLOCK = 16, 64  # a tile; the channels of Stable Diffusion's UNets are multiples of 64


@jit(do_not_specialize=["rows"])
def bias_add_kernel(
    x, bias, residual, out, rows, channels, scale, HAS_BIAS: constexpr, HAS_RESIDUAL: constexpr, ROWS: constexpr,
    BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    mask = (row < rows)[:, None] & inside[None, :]
    at = row[:, None] * channels + channel[None, :]
    y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (y * scale).to(out.dtype.element_ty), mask=mask)


_THREADS = 256
_MAX_ELEMENTS = 2**32  # csrc/bias_add.cu counts accesses in 32 bits


def constants(pack: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/bias_add.cu."""
    return {"TYPE": cuda_tier.TYPES[dtype], "PACK": pack}


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, count, channels, scale = args
    return [*tensors, ctypes.c_longlong(count), ctypes.c_int(channels), ctypes.c_float(scale)], _THREADS, 0


_OPERANDS = ("x", "bias", "residual", "out", "count", "channels", "scale")
_SOURCE = nvrtc.Source("bias_add", _prepared, _OPERANDS)


@kernel(reference, portable=True, triton_functions=(bias_add_kernel,), cuda_sources=(_SOURCE,))
def launch(x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float = 1.0) -> Tensor:
    """`reference` in one launch.

    x and residual (N, C, ...) are made channels last, bias (C,) contiguous; float16, bfloat16 or float32, in CUDA C++
    one dtype for all operands. C up to 4,194,240 in Triton; fewer than 2**32 elements in CUDA C++.
    """
    channels = x.shape[1]
    triton, reason = cuda_tier.tier((_SOURCE,), x, bias, residual)
    require(reason)
    if (bias is not None and bias.shape != (channels,)) or (residual is not None and residual.shape != x.shape):
        raise Declined("a bias or a residual of another shape")
    if not channels or (channels > MAX_GRID_YZ * _BLOCK if triton else x.numel() >= _MAX_ELEMENTS):
        raise Declined("no channels, or too many elements")
    inner = channels_inner(x)
    rest = [None if bias is None else bias.contiguous(), None if residual is None else channels_inner(residual)]
    out = torch.empty(inner.shape, dtype=x.dtype, device=x.device)
    count = inner.numel() // channels
    if count and not triton:
        given = constants(cuda_tier.pack(channels, inner, *rest), x.dtype)
        grid = (cdiv(inner.numel(), _THREADS * given["PACK"]),)
        launch_kernel(_SOURCE, grid, inner, *rest, out, inner.numel(), channels, float(scale), **given)
    elif count:
        launch_kernel(
            bias_add_kernel,
            (cdiv(count, _ROWS), cdiv(channels, _BLOCK)),
            inner,
            *(inner if tensor is None else tensor for tensor in rest),
            out,
            count,
            channels,
            float(scale),
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return channels_outer(out)
