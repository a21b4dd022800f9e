"""RMS norm (Zhang and Sennrich 2019) of the heads of queries or keys, and their rotary embedding (Su et al. 2021)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.registry import Declined, kernel, require
from sfast_ext.kernels.backend.triton_runtime import MAX_GRID_YZ, cdiv, launch_kernel, next_power_of_2

FORMS = {"none": 0, "complex": 1, "neighbours": 2, "halves": 3}
"""Values of FORM in csrc/norm_rotary.cu."""


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    cosine: Tensor | None = None,
    sine: Tensor | None = None,
    form: str = "none",
) -> Tensor:
    """RMS norm of x (B, S, H, C) over C, times weight (C,), then the rotation of pairs of columns; no norm if eps is
    None.

    Args:
        cosine, sine: float32, broadcast to x. With the form "complex" `cosine` is (B, S, H, C / 2, 2), broadcast
            likewise: cosine and sine of a pair, as `torch.view_as_real` gives them.
        form: which columns are a pair. "complex" and "neighbours": 2i and 2i + 1; "halves": i and i + C / 2; "none": no
            rotation.

    (a, b) becomes (a cos - b sin, b cos + a sin). Computes in float32 (float64 if x is) and rounds once.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            y = y * weight.to(y.dtype)
    if form == "none" or cosine is None:
        return y.to(x.dtype)
    if form == "complex":
        cosine, sine = (part.repeat_interleave(2, -1) for part in cosine.unbind(-1))
    assert sine is not None
    if form == "halves":
        first, second = y.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        first, second = y.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-second, first], -1).flatten(-2)
    return (y * cosine + turned * sine).to(x.dtype)


_THREADS = 128
_MOST_HEADS = 4
"""Of a thread; more would leave registers for fewer threads."""
_MAX_COLUMNS = 256


def constants(columns: int, heads: int, pack: int, dtype: torch.dtype, norm: bool, form: str) -> dict[str, int]:
    """Compile-time parameters of csrc/norm_rotary.cu."""
    lanes = min(32, next_power_of_2(cdiv(columns, pack)))
    groups = max(32 // lanes, min(_THREADS // lanes, next_power_of_2(heads)))
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "NORM": int(norm),
        "FORM": FORMS[form],
        "THREADS": lanes,
        "ROWS": groups,
        "HEADS": min(_MOST_HEADS, cdiv(heads, groups)),
        "PACK": pack,
        "EXACT": int(columns == lanes * pack),
    }


def _prepared(*args: Any, **constants: int) -> tuple[list[Any], int, int]:
    *tensors, strides, sizes, eps = args
    numbers = [*map(ctypes.c_longlong, strides), *map(ctypes.c_int, sizes), ctypes.c_float(eps)]
    return [*tensors, *numbers], constants["THREADS"] * constants["ROWS"], 0


SOURCE = nvrtc.Source("norm_rotary", _prepared, ("x", "weight", "cosine", "sine", "out", "strides", "sizes", "eps"))


def _angles(angles: Tensor | None, x: Tensor, tail: tuple[int, ...]) -> Tensor | None:
    """Angles (B, S, *tail), dense in `tail`; B and S may have the stride 0.

    Raises:
        Declined: they differ between heads, or do not fit x.
    """
    if angles is None:
        return None
    dims = 3 + len(tail)
    if angles.dim() > dims or angles.dtype != torch.float32 or angles.device != x.device:
        raise Declined("angles of another dtype or number of dimensions")
    angles = angles.reshape(*[1] * (dims - angles.dim()), *angles.shape)
    sizes = tuple(angles.shape)
    if sizes[2] != 1 or sizes[3:] != tail or any(a not in (1, b) for a, b in zip(sizes[:2], x.shape, strict=False)):
        raise Declined("angles that differ between heads, or of another shape")
    angles = angles.squeeze(2)
    if any(angles.stride(2 + i) != math.prod(tail[i + 1 :]) for i in range(len(tail))):
        angles = angles.contiguous()
    return angles.expand(*x.shape[:2], *tail)


def _pack(width: int, strides: tuple[int, ...], *operands: Tensor | None) -> int:
    """Elements of one access to x and weight."""
    return cuda_tier.pack(math.gcd(width, *strides), *operands)


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    cosine: Tensor | None = None,
    sine: Tensor | None = None,
    form: str = "none",
) -> Tensor:
    """`reference` in one launch, with one read and one write.

    x (B, S, H, C), in float16, bfloat16 or float32, may be a part of packed queries, keys and values: any strides but
    that of C; up to 256 columns, an even number. The result is dense. Angles are the same for all heads.
    """
    require(cuda_tier.accepts(SOURCE, x, weight))
    if x.dim() != 4 or not 0 < x.shape[-1] <= _MAX_COLUMNS or x.shape[-1] % 2 or form not in FORMS:
        raise Declined("no heads, or an odd number of columns or too many")
    if (cosine is None) != (form == "none") or (sine is None) != (form in ("none", "complex")):
        raise Declined("angles of another form")
    columns = x.shape[-1]
    if weight is not None and (eps is None or weight.shape != (columns,)):
        raise Declined("a weight of another shape")
    tail = (columns // 2, 2) if form == "complex" else (columns,)
    cosine, sine = _angles(cosine, x, tail), _angles(sine, x, tail)
    if sine is not None and cosine is not None and cosine.stride()[:2] != sine.stride()[:2]:
        cosine, sine = cosine.contiguous(), sine.contiguous()
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, tokens, heads, _ = x.shape
    weight = None if weight is None else weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    strides = tuple(x.stride(i) if x.shape[i] > 1 else 0 for i in range(3))
    pack = _pack(columns // 2 if form == "halves" else columns, strides, x, weight, out)
    if columns > 32 * pack:
        raise Declined("heads that are too wide where they lie")
    given = constants(columns, heads, pack, x.dtype, eps is not None, form)
    grid = (batch * tokens, cdiv(heads, given["ROWS"] * given["HEADS"]))
    if grid[0] >= 2**31 or grid[1] > MAX_GRID_YZ:
        raise Declined("too many heads")
    angle = (0, 0) if cosine is None else cosine.stride()[:2]
    sizes = (tokens, heads, columns)
    launch_kernel(SOURCE, grid, x, weight, cosine, sine, out, (*strides, *angle), sizes, eps or 0.0, **given)
    return out
