"""A linear layer of 8-bit integers with GEGLU: values and gates never reach global memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel, require
from sfast_ext.kernels.eight_bits import choice8, linear8, mma_gemm8, wgmma_gemm8
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.kernels.pointwise import geglu

_choice = choice8.choices("linear and GEGLU, 8 bits")


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """x (..., K) and weight (2N, K) in int8, scales as of `linear8.reference`, bias (2N) -> (..., N): value *
    gelu(gate) of the halves of the product, rounded once to dtype.

    gate_first, approximate: see `geglu.reference`.
    """
    return geglu.reference(linear8.scaled(x, x_scale, weight, weight_scale, bias), gate_first, approximate).to(dtype)


def fallback(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """`reference` by PyTorch's product of integers if it takes them."""
    product = linear8.scaled_by_pytorch(x, x_scale, weight, weight_scale, bias)
    return geglu.reference(product, gate_first, approximate).to(dtype)


@kernel(reference, fallback=fallback, any_source=True, cuda_sources=choice8.SOURCES)
def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gate_first: bool = False,
    approximate: str = "none",
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """`reference` in one launch, by `wgmma_gemm8` on Hopper if that is profitable, else by `mma_gemm8`; operands as of
    `linear8.launch`, N a multiple of 8."""
    require(None if approximate in ("none", "tanh") else "another approximation")
    unfit = wgmma_gemm8.accepts(x, x_scale, weight, weight_scale, bias, None, dtype, geglu=True)
    if unfit is None and wgmma_gemm8.profitable(x):
        return wgmma_gemm8.geglu(x, x_scale, weight, weight_scale, bias, gate_first, approximate, dtype)
    also_unfit = mma_gemm8.accepts_geglu(x, x_scale, weight, weight_scale, bias, approximate, dtype)
    if also_unfit is not None:
        raise Declined(f"on Hopper: {unfit or SLOWER}; on any card: {also_unfit}")
    given = x, x_scale, weight, weight_scale, bias, dtype, gate_first, approximate
    ours = functools.partial(mma_gemm8.geglu, *given)
    tiles = mma_gemm8.tiles(x.numel() // x.shape[-1], weight, mma_gemm.Epilogue(mma_gemm.GEGLU))
    more = f"{', gate first' * gate_first}{', tanh' * (approximate == 'tanh')}"
    return choice8.run(_choice, x, weight, bias, dtype, ours, tiles, more=more)
