"""GEGLU (Shazeer 2020): one half of the channels times the GELU of the other."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    MAX_GRID_YZ,
    cdiv,
    constexpr,
    jit,
    launch_kernel,
    pdl_wait,
    tl,
)


def reference(x: Tensor, gate_first: bool = False, approximate: str = "none") -> Tensor:
    """x (..., 2N) -> (..., N): value * gelu(gate); the value is the first half (diffusers, ldm), with gate_first the
    second.

    approximate is torch's: "none" (erf) or "tanh". Computes in float32 (float64 if x is) and rounds once.
    """
    value, gate = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    if gate_first:
        value, gate = gate, value
    return (value * F.gelu(gate, approximate=approximate)).to(x.dtype)


_ROWS, _BLOCK = 8, 256  # a tile; the hidden widths of Stable Diffusion are multiples of 256


@jit()
def gelu(gate, TANH):
    """GELU in float32 (Hendrycks and Gimpel 2016), exact or by tanh."""
    if TANH:
        # 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3)
        activated = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        # gate * Phi(gate), log2 of Phi on the negative side by a polynomial, relative error 1e-5: erf would take a
        # quarter of the time of a GEMM with this epilogue
        z = tl.minimum(tl.abs(gate), 8.0)
        log = 7.070178753565415e-08 * z - 3.5380496683501406e-06
        log = log * z + 7.800359890097752e-05
        log = log * z - 0.001010911539196968
        log = log * z + 0.008718260563910007
        log = log * z - 0.05423998460173607
        log = log * z - 0.45830774307250977
        log = log * z - 1.1512657403945923
        below = tl.math.exp2(log * z - 1.0)
        activated = gate * tl.where(gate < 0.0, below, 1.0 - below)
    return activated


@jit(do_not_specialize=["rows"])
def geglu_kernel(
    x, out, rows, half, GATE_FIRST: constexpr, TANH: constexpr, ROWS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < half)[None, :]
    first = x + row[:, None] * (2 * half) + column[None, :]
    value = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(first + half, mask=mask, other=0.0).to(tl.float32)
    if GATE_FIRST:
        swapped = value
        value = gate
        gate = swapped
    at = row[:, None] * half + column[None, :]
    tl.store(out + at, (value * gelu(gate, TANH)).to(out.dtype.element_ty), mask=mask)


_THREADS = 256
_PACKS = 2  # accesses of a thread, so that loads overlap


def constants(pack: int, dtype: torch.dtype, gate_first: bool, approximate: str) -> dict[str, int]:
    """Compile-time parameters of csrc/geglu.cu."""
    tanh = int(approximate == "tanh")
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "GATE_FIRST": int(gate_first),
        "TANH": tanh,
        "PACK": pack,
        "PACKS": _PACKS,
    }


def _prepared(x: Tensor, out: Tensor, rows: int, half: int, **constants: int) -> tuple[list[Any], int, int]:
    return [x, out, ctypes.c_int(rows), ctypes.c_int(half)], _THREADS, 0


_SOURCE = nvrtc.Source("geglu", _prepared, ("x", "out", "rows", "half"))


@kernel(reference, portable=True, triton_functions=(geglu_kernel,), cuda_sources=(_SOURCE,))
def launch(x: Tensor, gate_first: bool = False, approximate: str = "none") -> Tensor:
    """`reference` in one launch.

    x (..., 2N) is made contiguous; float16, bfloat16 or float32; N up to 16,776,960 in Triton.
    """
    half = x.shape[-1] // 2
    triton, reason = cuda_tier.tier((_SOURCE,), x)
    require(reason)
    if x.shape[-1] % 2 or not half or (triton and half > MAX_GRID_YZ * _BLOCK) or approximate not in ("none", "tanh"):
        raise Declined("an odd number of columns, none or too many, or another approximation")
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    count = out.numel() // half
    if count and not triton:
        given = constants(cuda_tier.pack(half, x), x.dtype, gate_first, approximate)
        grid = (cdiv(count * half, _THREADS * given["PACK"] * given["PACKS"]),)
        launch_kernel(_SOURCE, grid, x, out, count, half, **given)
    elif count:
        launch_kernel(
            geglu_kernel,
            (cdiv(count, _ROWS), cdiv(half, _BLOCK)),
            x,
            out,
            count,
            half,
            GATE_FIRST=gate_first,
            TANH=approximate == "tanh",
            ROWS=_ROWS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
