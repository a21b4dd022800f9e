"""Attention with heads of 64, where there are too few blocks of queries to keep a GPU busy in cuDNN's way.

Keys in blocks, each with the running maximum and sum of its row (FlashAttention-2, https://arxiv.org/abs/2307.08691). A
program is four warps with 64 rows, so three of them share a multiprocessor: while one takes exponentials, another
multiplies.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sfast_ext.kernels import _attention
from sfast_ext.kernels._attention import in_base_2, like_queries, strides
from sfast_ext.kernels._triton import (
    INTERPRETED,
    TensorDescriptor,
    cdiv,
    constexpr,
    device_of,
    jit,
    multiprocessors,
    start,
    tl,
)

_SIZE = 64
_ROWS, _KEYS, _STAGES, _WARPS = 64, 128, 2, 4
_ROUNDS = 6  # programs of each multiprocessor up to which the kernel is the faster way


@jit(do_not_specialize=["heads", "queries"])
def _kernel(
    out,
    q,
    k,
    v,
    heads,
    queries,
    keys,
    scale,
    q_image,
    q_row,
    q_head,
    out_image,
    out_row,
    out_head,
    SIZE: constexpr,
    ROWS: constexpr,
    KEYS: constexpr,
    EVEN: constexpr,
):
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    inside = (row < queries)[:, None]
    q += image.to(tl.int64) * q_image + head * q_head
    query = tl.load(q + row[:, None] * q_row + column[None, :], mask=inside, other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, SIZE), tl.float32)
    for first in tl.range(0, keys, KEYS):
        key = tl.reshape(k.load([image, first, head, 0]), (KEYS, SIZE))
        score = tl.dot(query, key.T)
        if not EVEN:
            score = tl.where((first + tl.arange(0, KEYS) < keys)[None, :], score, float("-inf"))
        before = most
        most = tl.maximum(before, tl.max(score, 1) * scale)
        score = tl.math.exp2(score * scale - most[:, None])
        shrunk = tl.math.exp2(before - most)
        total = total * shrunk + tl.sum(score, 1)
        value = tl.reshape(v.load([image, first, head, 0]), (KEYS, SIZE))
        sums = tl.dot(score.to(query.dtype), value, sums * shrunk[:, None])
    out += image.to(tl.int64) * out_image + head * out_head
    result = (sums * (1.0 / total)[:, None]).to(query.dtype)
    tl.store(out + row[:, None] * out_row + column[None, :], result, mask=inside)


def takes(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `launch` can read the operands, and has so few programs that it is the faster way."""
    if TensorDescriptor is None or q.shape[-1] != _SIZE or not _attention.takes(q, k, v, scale):
        return False
    # descriptors: memory, and what a stride leads to, begin at 16 bytes
    if any(x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:3]) for x in (k, v)):
        return False
    if INTERPRETED:
        return True
    programs = q.shape[0] * q.shape[1] * cdiv(q.shape[2], _ROWS)
    return programs <= _ROUNDS * multiprocessors(device_of(q))


def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """`attention.reference` without a mask, of operands that `takes` takes."""
    images, heads, queries, size = q.shape
    out = like_queries(q)
    start(
        _kernel,
        (cdiv(queries, _ROWS), images * heads),
        out,
        q,
        _described(k),
        _described(v),
        heads,
        queries,
        k.shape[2],
        in_base_2(scale, size),
        *strides(q),
        *strides(out),
        SIZE=size,
        ROWS=_ROWS,
        KEYS=_KEYS,
        EVEN=k.shape[2] % _KEYS == 0,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


def _described(x: Tensor) -> Any:
    """(B, H, S, D) as a descriptor over (B, S, H, D), whose blocks are keys of one head."""
    shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
    return TensorDescriptor(x, shape, [*strides(x), 1], [1, _KEYS, 1, x.shape[3]])
