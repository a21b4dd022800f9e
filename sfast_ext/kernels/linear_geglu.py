"""A linear layer and the GEGLU of its result as one matrix product: the gates never reach memory.

Values and gates are rows of one weight, n and N + n. A tile reads both as one block of a descriptor over (2, N, K), so
one matrix instruction computes both, and a thread that has a value has its gate. Persistent, with the loads of a tile
under way while the last one is finished (Triton's tutorial 09).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels import geglu
from sfast_ext.kernels._triton import (
    INTERPRETED,
    TensorDescriptor,
    cdiv,
    constexpr,
    device_of,
    jit,
    multiplies,
    multiprocessors,
    runs,
    start,
    tl,
)

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64  # of a tile: rows of x, values (and as many gates), terms of a step
_STAGES, _WARPS = 3, 8
_BAND = 8  # tiles of rows that are computed beside each other, so that weights are read from the L2 cache
_ROUNDS = 2  # tiles of each multiprocessor from which the kernel is the faster way


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate_first: bool = False, approximate: str = "none"
) -> Tensor:
    """x (..., K), weight (2N, K), bias (2N) -> (..., N): value * gelu(gate) of the halves of x @ weight.T + bias.

    Computes in float32 (float64 where x is), rounds once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    product = F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    return geglu.reference(product, gate_first, approximate).to(x.dtype)


@jit(do_not_specialize=["rows"])
def _kernel(
    bias,
    x,
    weight,
    out,
    rows,
    half,
    depth,
    HAS_BIAS: constexpr,
    GATE_FIRST: constexpr,
    TANH: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    BAND: constexpr,
):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(half, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        band = tile // (BAND * across)
        height = tl.minimum(down - band * BAND, BAND)
        inside = tile % (BAND * across)
        row = (band * BAND + inside % height) * ROWS
        column = (inside // height) * COLUMNS
        sums = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for term in range(0, depth, DEPTH):
            left = x.load([row, term])
            right = tl.reshape(weight.load([0, column, term]), (2 * COLUMNS, DEPTH))
            sums = tl.dot(left, right.T, sums)
        first, second = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, COLUMNS)), (0, 2, 1)))
        if HAS_BIAS:
            at = column + tl.arange(0, COLUMNS)
            first += tl.load(bias + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
            second += tl.load(bias + half + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
        if GATE_FIRST:
            value, gate = second, first
        else:
            value, gate = first, second
        out.store([row, column], (value * geglu.gelu(gate, TANH)).to(out.dtype))


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate_first: bool = False, approximate: str = "none"
) -> Tensor:
    """`reference` as one Triton kernel where that is the faster way, else as a product and the kernel for GEGLU."""
    count = x.numel() // max(x.shape[-1], 1)
    if not _takes(x, weight, bias, count, approximate):
        return geglu.launch(F.linear(x, weight, bias), gate_first, approximate)
    half, depth = weight.shape[0] // 2, weight.shape[1]
    out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    vector = out if bias is None else bias.contiguous()
    tiles = cdiv(count, _ROWS) * cdiv(half, _COLUMNS)
    start(
        _kernel,
        (min(tiles, multiprocessors(device_of(x))),),
        vector,
        TensorDescriptor(x.contiguous(), [count, depth], [depth, 1], [_ROWS, _DEPTH]),
        TensorDescriptor(weight, [2, half, depth], [half * depth, depth, 1], [2, _COLUMNS, _DEPTH]),
        TensorDescriptor(out, [count, half], [half, 1], [_ROWS, _COLUMNS]),
        count,
        half,
        depth,
        HAS_BIAS=bias is not None,
        GATE_FIRST=gate_first,
        TANH=approximate == "tanh",
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        BAND=_BAND,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None, count: int, approximate: str) -> bool:
    """Whether the kernel can, and pays: of few tiles cuBLAS makes more, and gains by it more than GEGLU costs."""
    if TensorDescriptor is None or approximate not in ("none", "tanh") or not runs(x, weight, bias):
        return False
    if not multiplies(x) or weight.dtype != x.dtype or weight.dim() != 2 or not weight.is_contiguous():
        return False
    half, depth = weight.shape[0] // 2, weight.shape[1]
    # descriptors: rows and memory begin at 16 bytes
    if weight.shape[0] % 2 or half % 8 or depth % 8 or x.shape[-1] != depth or not count:
        return False
    if bias is not None and bias.shape != (2 * half,):
        return False
    if INTERPRETED:
        return True
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    return cdiv(count, _ROWS) * cdiv(half, _COLUMNS) >= _ROUNDS * multiprocessors(device_of(x))
