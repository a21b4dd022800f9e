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

FORMS = {"none": 0, "complex": 1, "neighbours": 2, "halves": 3, "matrices": 4, "matrices of halves": 5}
"""Values of FORM in csrc/norm_rotary.cu."""
MATRICES = ("matrices", "matrices of halves")
_OF_HALVES = ("halves", "matrices of halves")


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    cosine: Tensor | None = None,
    sine: Tensor | None = None,
    form: str = "none",
    second: Tensor | None = None,
    second_weight: Tensor | None = None,
) -> Tensor:
    """RMS norm of x (B, S, H, C) over C, times weight (C,), then the rotation of pairs of columns; no norm if eps is
    None.

    Args:
        cosine, sine: float32, broadcast to the result. With the form "complex" `cosine` is (B, S, H, C / 2, 2),
            broadcast likewise: cosine and sine of a pair, as `torch.view_as_real` gives them. With matrices it is
            (B, S, H, C / 2, 2, 2).
        form: which columns are a pair. "complex", "neighbours", "matrices": 2i and 2i + 1; "halves", "matrices of
            halves": i and i + C / 2; "none": no rotation.
        second: (B, T, H, C), tokens that follow those of x in the result (B, S + T, H, C), normed likewise, with a
            weight for them.

    (a, b) becomes (a cos - b sin, b cos + a sin), or the matrix times (a, b). Computes in float32 (float64 if x is) and
    rounds once.
    """
    y = _normed(x, weight, eps)
    if second is not None:
        y = torch.cat([y, _normed(second, second_weight, eps)], 1)
    if form == "none" or cosine is None:
        return y.to(x.dtype)
    if form == "complex":
        cosine, sine = (part.repeat_interleave(2, -1) for part in cosine.unbind(-1))
    elif form in MATRICES:
        cosine, sine = _factors(cosine, form)
    assert sine is not None
    if form in _OF_HALVES:
        first, other = y.chunk(2, -1)
        turned = torch.cat([-other, first], -1)
    else:
        first, other = y.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-other, first], -1).flatten(-2)
    return (y * cosine + turned * sine).to(x.dtype)


def _normed(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            y = y * weight.to(y.dtype)
    return y


def _factors(matrices: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """What a column, and the other of its pair with the sign of a rotation, are multiplied by."""
    (a, b), (c, d) = ((entry for entry in row.unbind(-1)) for row in matrices.unbind(-2))
    if form in _OF_HALVES:
        return torch.cat([a, d], -1), torch.cat([-b, c], -1)
    return torch.stack([a, d], -1).flatten(-2), torch.stack([-b, c], -1).flatten(-2)


_THREADS = 128
_MOST_HEADS = 4
"""Of a thread; more would leave registers for fewer threads."""
_MAX_COLUMNS = 256


def constants(
    columns: int, heads: int, pack: int, dtype: torch.dtype, norm: bool, form: str, joined: bool = False
) -> dict[str, int]:
    """Compile-time parameters of csrc/norm_rotary.cu."""
    lanes = min(32, next_power_of_2(cdiv(columns, pack)))
    groups = max(32 // lanes, min(_THREADS // lanes, next_power_of_2(heads)))
    return {
        "TYPE": cuda_tier.TYPES[dtype],
        "NORM": int(norm),
        "FORM": FORMS[form],
        "JOINED": int(joined),
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


SOURCE = nvrtc.Source(
    "norm_rotary",
    _prepared,
    ("x", "weight", "second", "second_weight", "cosine", "sine", "out", "strides", "sizes", "eps"),
)


def _angles(angles: Tensor | None, out: Tensor, tail: tuple[int, ...]) -> Tensor | None:
    """Angles (B, S, *tail), dense in `tail`; B and S may have the stride 0.

    Raises:
        Declined: they differ between heads, or do not fit the result.
    """
    if angles is None:
        return None
    dims = 3 + len(tail)
    if angles.dim() > dims or angles.dtype != torch.float32 or angles.device != out.device:
        raise Declined("angles of another dtype or number of dimensions")
    angles = angles.reshape(*[1] * (dims - angles.dim()), *angles.shape)
    sizes = tuple(angles.shape)
    if sizes[2] != 1 or sizes[3:] != tail or any(a not in (1, b) for a, b in zip(sizes[:2], out.shape, strict=False)):
        raise Declined("angles that differ between heads, or of another shape")
    angles = angles.squeeze(2)
    if any(angles.stride(2 + i) != math.prod(tail[i + 1 :]) for i in range(len(tail))):
        angles = angles.contiguous()
    return angles.expand(*out.shape[:2], *tail)


def _pack(width: int, strides: tuple[int, ...], *operands: Tensor | None) -> int:
    """Elements of one access to x and weights."""
    return cuda_tier.pack(math.gcd(width, *strides), *operands)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Of images, tokens and heads."""
    return (0, 0, 0) if x is None else tuple(x.stride(i) if x.shape[i] > 1 else 0 for i in range(3))


@kernel(reference, portable=True, cuda_sources=(SOURCE,))
def launch(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    cosine: Tensor | None = None,
    sine: Tensor | None = None,
    form: str = "none",
    second: Tensor | None = None,
    second_weight: Tensor | None = None,
) -> Tensor:
    """`reference` in one launch, with one read and one write.

    x (B, S, H, C), in float16, bfloat16 or float32, may be a part of packed queries, keys and values: any strides but
    that of C; up to 256 columns, an even number. So may `second`. The result is dense. Angles are the same for all
    heads.
    """
    require(cuda_tier.accepts(SOURCE, x, weight, second, second_weight))
    if x.dim() != 4 or not 0 < x.shape[-1] <= _MAX_COLUMNS or x.shape[-1] % 2 or form not in FORMS:
        raise Declined("no heads, or an odd number of columns or too many")
    if (cosine is None) != (form == "none") or (sine is None) != (form not in ("neighbours", "halves")):
        raise Declined("angles of another form")
    batch, split, heads, columns = x.shape
    if any(t is not None and (eps is None or t.shape != (columns,)) for t in (weight, second_weight)):
        raise Declined("a weight of another shape")
    if second is not None and (second.dim() != 4 or (batch, heads, columns) != (second.shape[0], *second.shape[2:])):
        raise Declined("tokens of other heads")
    tokens = split if second is None else split + second.shape[1]
    out = torch.empty((batch, tokens, heads, columns), dtype=x.dtype, device=x.device)
    tail = {"complex": (columns // 2, 2), **dict.fromkeys(MATRICES, (columns // 2, 2, 2))}.get(form, (columns,))
    cosine, sine = _angles(cosine, out, tail), _angles(sine, out, tail)
    if sine is not None and cosine is not None and cosine.stride()[:2] != sine.stride()[:2]:
        cosine, sine = cosine.contiguous(), sine.contiguous()
    if not out.numel():
        return out
    x, second = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (x, second))  # type: ignore[assignment]
    weight, second_weight = (None if t is None else t.contiguous() for t in (weight, second_weight))
    strides = (*_strides(x), *_strides(second))
    pack = _pack(columns // 2 if form in _OF_HALVES else columns, strides, x, second, weight, second_weight, out)
    if columns > 32 * pack:
        raise Declined("heads that are too wide where they lie")
    given = constants(columns, heads, pack, x.dtype, eps is not None, form, second is not None)
    grid = (batch * tokens, cdiv(heads, given["ROWS"] * given["HEADS"]))
    if grid[0] >= 2**31 or grid[1] > MAX_GRID_YZ:
        raise Declined("too many heads")
    strides += (0, 0) if cosine is None else cosine.stride()[:2]
    tensors = x, weight, second, second_weight, cosine, sine, out
    launch_kernel(SOURCE, grid, *tensors, strides, (tokens, heads, columns, split), eps or 0.0, **given)
    return out
