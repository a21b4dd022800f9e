"""Cross-attention over few keys fused with its query projection: csrc/query_attention.cu, for Hopper.

The queries never reach global memory. Head dimension 64, five heads to a tile, as in Stable Diffusion XL and 2.1.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.attention import attention, operands
from sfast_ext.kernels.attention.operands import accepts_alignment, heads_map, in_base_2
from sfast_ext.kernels.backend import cuda_tier, nvrtc, smem_ring
from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import cdiv, device_of, is_dry_run, launch_kernel, multiprocessors

_SIZE, _HEADS, _ROWS = 64, 5, 64  # head dimension; heads and rows of a tile
_MAX_KEYS = 80
_WIDTH = _SIZE * _HEADS // 2  # N of a consumer warpgroup
_STAGES = 4

# Microseconds of a wave on an NVIDIA H200: its start and end, and a step of 64 of K
_START, _STEP = 3.7, 0.535
# Microseconds of cuBLAS's GEMM and attention: their starts; per million results, attention's and each of K's
_APART, _ATTENTION, _PER_K = 2.4, 1.54, 0.00295
_IN_DOUBT = 1.1  # ratio of the two models up to which the kernel was the faster one


def reference(x: Tensor, weight: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v, with q the heads of x @ weight.T, rounded to x's dtype.

    x (B, L, K), weight (64 H, K), k and v (B, H, S, 64) -> (B, H, L, 64), in the memory of (B, L, H, 64). Computes in
    float32 (float64 if x is).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    q = _heads(F.linear(x.to(compute), weight.to(compute)).to(x.dtype), k)
    out = attention.reference(q.to(compute), k.to(compute), v.to(compute), scale=scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2).to(x.dtype)


def fallback(x: Tensor, weight: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """`reference` as GEMM and attention."""
    return attention.launch(_heads(F.linear(x, weight), k), k, v, scale=scale)


def _heads(q: Tensor, k: Tensor) -> Tensor:
    return q.view(*q.shape[:2], k.shape[1], k.shape[3]).transpose(1, 2)


def accepts(x: Tensor, weight: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> str | None:
    """Why the kernel does not take the operands on this GPU; None if it does, see `launch`."""
    if x.dim() != 3 or weight.dim() != 2 or k.dim() != 4:
        return "other dimensions"
    (images, _, depth), (_, heads, keys, size) = x.shape, k.shape
    if weight.shape != (heads * size, depth) or k.shape[0] != images or not x.numel():
        return "other shapes"
    unfit = cuda_tier.accepts(_SOURCE, x, weight, k, v)
    # the queries would be laid out like keys
    unfit = unfit or operands.accepts_layout(k, k, v, scale) or accepts_alignment(k, v)
    if unfit is None and not _fits((heads, keys, size), depth):
        return "no heads of 64 in groups of five, more than 80 keys, or another depth"
    read = [weight, x] if x.is_contiguous() else [weight]  # x is made contiguous
    if unfit is None and not is_dry_run() and not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read):
        return "operands that are not contiguous, or not aligned to 16 bytes"
    return unfit


def profitable(images: int, rows: int, keys: tuple[int, int, int], depth: int, device: torch.device) -> bool:
    """Whether the kernel is supported on this GPU, fits these sizes, and is faster than a GEMM and attention.

    Args:
        keys: (heads, keys, head dimension).
        depth: K of the linear layer.
    """
    if not _SOURCE.supported(device) or not _fits(keys, depth):
        return False
    one, apart = _microseconds(images, rows, keys, depth, device)
    return one < _IN_DOUBT * apart


def saved(images: int, rows: int, keys: tuple[int, int, int], depth: int, device: torch.device) -> float:
    """Microseconds that a GEMM and attention take longer than the kernel; 0 if it is not `profitable`."""
    if not profitable(images, rows, keys, depth, device):
        return 0.0
    one, apart = _microseconds(images, rows, keys, depth, device)
    return max(0.0, apart - one)


def _microseconds(
    images: int, rows: int, keys: tuple[int, int, int], depth: int, device: torch.device
) -> tuple[float, float]:
    """Of the kernel, and of a GEMM and attention."""
    columns = keys[0] * keys[2]
    waves = cdiv(_tiles(images, rows, columns), multiprocessors(device))
    apart = _APART + 1e-6 * images * rows * columns * (_ATTENTION + _PER_K * depth)
    return waves * (_START + _STEP * cdiv(depth, smem_ring.DEPTH)), apart


def _fits(keys: tuple[int, int, int], depth: int) -> bool:
    heads, count, size = keys
    deep_enough = depth % 8 == 0 and cdiv(depth, smem_ring.DEPTH) >= _STAGES
    return size == _SIZE and heads > 0 and heads % _HEADS == 0 and 0 < count <= _MAX_KEYS and deep_enough


def _tiles(images: int, rows: int, columns: int) -> int:
    return images * cdiv(rows, _ROWS) * (columns // (_HEADS * _SIZE))


def constants(dtype: torch.dtype) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {"WIDTH": _WIDTH, "STAGES": _STAGES, "BF16": int(dtype == torch.bfloat16)}


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones."""
    return [given]


def shared_bytes() -> int:
    """Dynamic shared memory of a block in bytes: alignment and stages."""
    return 1024 + _STAGES * 2 * smem_ring.DEPTH * (_ROWS + 2 * _WIDTH)


def _prepared(
    out: Tensor, x: Tensor, weight: Tensor, k: Tensor, v: Tensor, scale: float, **constants: int
) -> tuple[list[Any], int, int]:
    (images, rows, depth), columns, size = x.shape, weight.shape[0], x.element_size()

    def boxes(t: Tensor, across: int) -> Any:
        box = [smem_ring.DEPTH, _ROWS, 1]
        return nvrtc.tensor_map(t, [across, rows, images], [size * across, size * across * rows], box)

    maps = [
        boxes(out, columns),
        boxes(x, depth),
        nvrtc.tensor_map(weight, [depth, columns], [size * depth], [smem_ring.DEPTH, _WIDTH]),
        heads_map(k, _SIZE, _MAX_KEYS),
        heads_map(v, _SIZE, _MAX_KEYS),
    ]
    numbers = (
        k.shape[2],
        cdiv(depth, smem_ring.DEPTH),
        cdiv(rows, _ROWS),
        columns // (_HEADS * _SIZE),
        _tiles(*out.shape),
    )
    return [*maps, ctypes.c_float(scale), *map(ctypes.c_int, numbers)], smem_ring.THREADS, shared_bytes()


_NAMES = ("out", "x", "weight", "k", "v", "scale")
_SOURCE = nvrtc.Source("query_attention", _prepared, _NAMES, variants, ("weight",), hopper=True)


def _launch(x: Tensor, weight: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    out = torch.empty((*x.shape[:2], weight.shape[0]), dtype=x.dtype, device=x.device)
    grid = min(_tiles(*out.shape), multiprocessors(device_of(x)))
    operands = out, x.contiguous(), weight, k, v, in_base_2(scale, _SIZE)
    launch_kernel(_SOURCE, (grid,), *operands, **constants(x.dtype))
    return _heads(out, k)


@kernel(reference, fallback=fallback, uses=(attention.launch,), cuda_sources=(_SOURCE,))
def launch(x: Tensor, weight: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """`reference` in one launch on Hopper, if that is `profitable`; else by `fallback`.

    All in one dtype, float16 or bfloat16. x (B, L, K) is made contiguous, K a multiple of 8 from 200 on; weight (64 H,
    K) contiguous, H a multiple of 5; k and v (B, H, S, 64) with elements of a head in a row, S up to 80; pointers and
    rows aligned to 16 bytes.
    """
    require(accepts(x, weight, k, v, scale))
    if not profitable(x.shape[0], x.shape[1], tuple(k.shape[1:]), x.shape[2], device_of(x)):
        raise Declined(SLOWER)
    return _launch(x, weight, k, v, scale)
