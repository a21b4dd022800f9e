"""Attention in float32 over wide heads, as in a VAE, by two GEMMs and a softmax.

torch's kernel for it computes a product in float32 by three in TF32, and keeps the sums of heads wider than 128 in
global memory. If a program lets products in float32 be rounded to TF32, cuBLAS computes them several times as fast,
and the scores' way to memory and back costs less than that gains. A slice of the queries at a time bounds the memory
of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfast_ext import fp32_precision

WIDE = 256
"""The kernels of torch's other backends take no wider heads."""
TF32_SINCE = 8, 0
"""The compute capability whose tensor cores take float32."""
SLICE_BYTES = 128 << 20
"""Of the scores of a slice; there are as many probabilities."""


def accepts(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why `launch` does not compute an attention without a mask; None if it can, and is expected to be the faster
    way."""
    if q.dtype != torch.float32 or not fp32_precision.matmul_in_tf32() or q.shape[-1] <= WIDE or not q.numel():
        return "no wide heads in float32 whose products may be rounded to TF32"
    # one head for each, as GEMMs have it
    alike = k.dtype == v.dtype == q.dtype and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    return None if q.dim() >= 3 and alike else "other shapes, or several dtypes"


def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale * q @ k^T) @ v: q (..., L, D), k (..., S, D), v (..., S, E) -> (..., L, E); scale is D**-0.5 by
    default."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    shape = *q.shape[:-1], v.shape[-1]
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    heads, length, _ = q.shape
    rows = max(1, SLICE_BYTES // (heads * k.shape[1] * q.element_size()))
    if rows >= length:
        return _attend(q, k, v, scale).view(shape)
    out = q.new_empty(heads, length, v.shape[-1])
    for start in range(0, length, rows):
        here = slice(start, start + rows)
        out[:, here] = _attend(q[:, here], k, v, scale)
    return out.view(shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # with beta 0 the first operand is not read
    scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), v)
