"""Cross-attention over few keys (a prompt's): a program holds all of them, so that softmax needs no rescaling."""

from __future__ import annotations

from torch import Tensor

from sfast_ext.kernels.attention import operands
from sfast_ext.kernels.attention.operands import blocks, in_base_2, like_queries, strides
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.backend.triton_runtime import (
    cdiv,
    constexpr,
    device_of,
    jit,
    launch_kernel,
    multiprocessors,
    pdl_wait,
    tl,
)

_MAX_KEYS, _MAX_KEYS_OF_WIDE, _WIDE = 160, 80, 128  # more keys of heads wider than _WIDE take long to compile
_MAX_SIZE = 160
_ROWS, _WARPS = 64, 4
_AT_ONCE = (5, 3)  # programs per multiprocessor, for a head of one block, and of two


@jit(do_not_specialize=["tiles", "heads", "queries", "keys"])
def short_attention_kernel(
    out, q, k, v, tiles, heads, queries, keys, scale, q_image, q_row, q_head, k_image, k_row, k_head, v_image, v_row,
    v_head, out_image, out_row, out_head, SIZE: constexpr, SIZE_A: constexpr, SIZE_B: constexpr, KEYS_A: constexpr,
    KEYS_B: constexpr, ROWS: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    image, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    q += image * q_image + head * q_head
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    out += image * out_image + head * out_head
    left, right = tl.arange(0, SIZE_A), SIZE_A + tl.arange(0, SIZE_B if SIZE_B else SIZE_A)
    near, far = tl.arange(0, KEYS_A), KEYS_A + tl.arange(0, KEYS_B if KEYS_B else KEYS_A)
    k_aa, v_aa = _block(k, near, left, keys, k_row, SIZE), _block(v, near, left, keys, v_row, SIZE)
    k_ab, v_ab, k_ba, v_ba, k_bb, v_bb = k_aa, v_aa, k_aa, v_aa, k_aa, v_aa
    if SIZE_B:
        k_ab, v_ab = _block(k, near, right, keys, k_row, SIZE), _block(v, near, right, keys, v_row, SIZE)
    if KEYS_B:
        k_ba, v_ba = _block(k, far, left, keys, k_row, SIZE), _block(v, far, left, keys, v_row, SIZE)
        if SIZE_B:
            k_bb, v_bb = _block(k, far, right, keys, k_row, SIZE), _block(v, far, right, keys, v_row, SIZE)
    for tile in range(tiles):
        row = (tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        q_a = _block(q, row, left, queries, q_row, SIZE)
        q_b = q_a
        a = tl.dot(q_a, k_aa.T)
        if SIZE_B:
            q_b = _block(q, row, right, queries, q_row, SIZE)
            a += tl.dot(q_b, k_ab.T)
        a = tl.where((near < keys)[None, :], a, float("-inf"))
        most = tl.max(a, 1)
        b = a
        if KEYS_B:
            b = tl.dot(q_a, k_ba.T)
            if SIZE_B:
                b += tl.dot(q_b, k_bb.T)
            b = tl.where((far < keys)[None, :], b, float("-inf"))
            most = tl.maximum(most, tl.max(b, 1))
        most *= scale
        a = tl.math.exp2(a * scale - most[:, None])
        row_sum = tl.sum(a, 1)
        p = a.to(v_aa.dtype)
        sum_a = tl.dot(p, v_aa)
        sum_b = sum_a
        if SIZE_B:
            sum_b = tl.dot(p, v_ab)
        if KEYS_B:
            b = tl.math.exp2(b * scale - most[:, None])
            row_sum += tl.sum(b, 1)
            p_b = b.to(v_aa.dtype)
            sum_a += tl.dot(p_b, v_ba)
            if SIZE_B:
                sum_b += tl.dot(p_b, v_bb)
        inverse = (1.0 / row_sum)[:, None]
        inside = (row < queries)[:, None]
        to = out + row[:, None] * out_row
        tl.store(to + left[None, :], (sum_a * inverse).to(q_a.dtype), mask=inside & (left < SIZE)[None, :])
        if SIZE_B:
            tl.store(to + right[None, :], (sum_b * inverse).to(q_a.dtype), mask=inside & (right < SIZE)[None, :])


@jit()
def _block(x, row, column, rows, stride, SIZE: constexpr):
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


def accepts(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Why `launch` does not take the operands: more than 160 keys, or 80 of heads wider than 128; heads wider than 160;
    or see `operands.accepts_in_triton`. None if it does."""
    if health.reason("short_attention", device_of(q)) is not None:
        return "it is disabled"
    if k.shape[-2] > (_MAX_KEYS if q.shape[-1] <= _WIDE else _MAX_KEYS_OF_WIDE) or q.shape[-1] > _MAX_SIZE:
        return "many keys or wide heads"
    return operands.accepts_in_triton(q, k, v, scale)


@kernel(operands.reference, part=True, triton_functions=(short_attention_kernel,))
def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """`operands.reference` for operands that it `accepts`: q (B, H, L, D), k and v (B, H, S, D) in half precision on
    Hopper, with elements of a head in a row. The result is laid out like q."""
    images, heads, queries, size = q.shape
    out = like_queries(q)
    keys_a, keys_b = blocks(k.shape[2])
    size_a, size_b = blocks(size)
    # a single wave of programs, each with several blocks of rows: a second wave would be small
    programs = _AT_ONCE[bool(size_b)] * multiprocessors(device_of(q))
    tiles = cdiv(images * heads * cdiv(queries, _ROWS), programs)
    launch_kernel(
        short_attention_kernel,
        (cdiv(queries, _ROWS * tiles), images * heads),
        out,
        q,
        k,
        v,
        tiles,
        heads,
        queries,
        k.shape[2],
        in_base_2(scale, size),
        *strides(q),
        *strides(k),
        *strides(v),
        *strides(out),
        SIZE=size,
        SIZE_A=size_a,
        SIZE_B=size_b,
        KEYS_A=keys_a,
        KEYS_B=keys_b,
        ROWS=_ROWS,
        num_warps=_WARPS,
        num_stages=1,
    )
    return out
