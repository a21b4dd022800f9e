"""Weights as int8 with a scale for each output row, followed without a question to the CPU.

The half-precision weights of the host stay the truth. At each step all rows are read, and those whose digest is
another one than when their codes were written are quantised again: a LoRA, a checkpoint or a write in place is
followed at the next step.

The digest of a row has 64 bits. A row is read in packs of eight elements, two 64-bit words a and b. Pack i has two
keys x and y, each the term of an arithmetic progression modulo 2^64 with an odd step, so that no two packs of a row
share one. The product of a ^ x and b ^ y, 128 bits, is folded to 64 by exclusive or, as in wyhash. The digest is the
sum over the packs modulo 2^64, and a term of what else the codes depend on: columns, group and dtype.

Two different rows have one digest with a probability of about 2^-64 (2^-44 that it happens to one of a million rows):

- One bit that changes in a changes the product by a power of two times b ^ y. That is a number which depends on all
  bits of b and of the key, and the fold spreads it over 64 bits. So a sign, the last bit and all of an element count
  alike.
- The differences of several packs are such numbers each, of unlike keys. That they add up to 0 is as likely as for
  random ones. A permutation of packs or columns is such a change: no two packs have the same keys, and the elements
  of a pack are at different bits of a and b.
- A pack contributes nothing if a equals x, or b equals y: a value of 64 bits each that a weight has only by chance.

0 is no digest, so rows of a new bank, whose digests are zeros, are all quantised.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import cuda_tier, nvrtc
from sfast_ext.kernels.backend.launch_log import AddressTable
from sfast_ext.kernels.backend.registry import kernel, require
from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    cdiv,
    device_of,
    is_dry_run,
    launch_kernel,
    multiprocessors,
)
from sfast_ext.kernels.eight_bits import quantise_rows

Tensors = Sequence[Tensor]


def reference(
    weights: Tensors, rows: Tensors, scales: Tensors, digests: Tensors, groups: Sequence[int]
) -> list[Tensor]:
    """The codes of weights[i] (N, K), int8, with a rotation of groups[i] neighbours as in `quantise_rows.reference`.

    rows, scales and digests, which the kernel writes to, are not read.
    """
    each = zip(map(matrix, weights), groups, strict=True)
    return [quantise_rows.reference(weight, group)[0] for weight, group in each]


def matrix(weight: Tensor) -> Tensor:
    """A weight (N, K); of a convolution's (N, C, H, W) the rows (N, H W C), a view if it is channels last in memory."""
    return weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight


def sums_of_codes(q: Tensor) -> Tensor:
    """Of the rows of a 3x3 convolution's codes (N, 9 C), (9, N) in float32: of all taps; then of those that are inside
    an image of which the middle tap is at the border, for the eight places there are, row by row."""
    taps = q.view(len(q), 3, 3, -1).sum(-1, dtype=torch.float32)
    inside = slice(1, 3), slice(0, 3), slice(0, 2)
    sums = [taps[:, rows, columns].sum((1, 2)) for rows in inside for columns in inside]
    return torch.stack([sums.pop(4), *sums])


def in_place(weights: Tensors, rows: Tensors, scales: Tensors, digests: Tensors, groups: Sequence[int]) -> list[Tensor]:
    """As `launch`, by PyTorch, which quantises all rows: without a branch, so that it can be recorded."""
    for weight, row, scale, digest, group in zip(map(matrix, weights), rows, scales, digests, groups, strict=True):
        now = digest_of_rows(weight, group)
        changed = now != digest
        q, new_scale = quantise_rows.reference(weight, group)
        row.copy_(torch.where(changed[:, None], q, row))
        if scale.dim() == 2:
            new_scale = torch.stack([new_scale, *sums_of_codes(q)])
        scale.copy_(torch.where(changed, new_scale, scale))
        digest.copy_(now)
    return list(rows)


fallback = in_place

# as in csrc/quantise_weights.cu
ENTRIES = 88
"""Weights of a launch."""
_KEYS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_STARTS = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB
_SEED = 0x8EBC6AF09C88C6E3
SCALES = 10
"""Rows of what a convolution's bank has in the place of scales: those, and `sums_of_codes`."""
_WARPS = 8  # of a block
_BLOCKS = 4  # of a multiprocessor, all of them at once on every card
_LOADS = 5  # of a lane at a time, by 16 bytes: 1,280 columns
_MAX_COLUMNS = 65535


def digest_of_rows(weight: Tensor, group: int = 0) -> Tensor:
    """The digests of the rows of a weight (N, K), int64 (N,), in half precision as the kernel computes them."""
    rows, columns = weight.shape
    bits = weight.contiguous().view(torch.int16)
    count = cdiv(bits.shape[1], 8)
    words = torch.zeros(rows, 8 * count, dtype=torch.int16, device=weight.device)
    words[:, : bits.shape[1]] = bits
    pairs = words.view(torch.int64).view(rows, count, 2)
    place = torch.arange(count, device=weight.device)
    a, b = (pairs[..., i] ^ (_signed(_STARTS[i]) + place * _signed(_KEYS[i])) for i in range(2))
    seed = _SEED * ((columns << 16 | group) * 2 + cuda_tier.TYPES.get(weight.dtype, 3))
    found = (a * b ^ _high(a, b)).sum(-1) + _signed(seed)
    return torch.where(found == 0, 1, found)


def _signed(x: int) -> int:
    """A number modulo 2^64 as an int64."""
    return (x + 2**63) % 2**64 - 2**63


def _high(a: Tensor, b: Tensor) -> Tensor:
    """The upper 64 of the 128 bits of products of unsigned numbers, all of them as int64."""
    low = 0xFFFFFFFF
    a0, a1, b0, b1 = a & low, a >> 32 & low, b & low, b >> 32 & low
    middle = a1 * b0 + (a0 * b0 >> 32 & low)  # of unsigned numbers neither sum overflows
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> 32 & low) + (other >> 32 & low)


class _Table(ctypes.Structure):
    """`Table` of csrc/quantise_weights.cu."""

    _fields_ = [
        *((name, ctypes.c_uint64 * ENTRIES) for name in ("weights", "rows", "scales", "digests")),
        ("first", ctypes.c_int * (ENTRIES + 1)),
        ("strides", ctypes.c_int * ENTRIES),
        ("columns", ctypes.c_uint16 * ENTRIES),
        ("groups", ctypes.c_uint16 * ENTRIES),
        ("aligned", ctypes.c_uint32 * cdiv(ENTRIES, 32)),
        ("summed", ctypes.c_uint32 * cdiv(ENTRIES, 32)),
    ]


class _Entry(NamedTuple):
    weight: Tensor
    row: Tensor
    scale: Tensor
    digest: Tensor
    group: int


def constants(dtype: torch.dtype) -> dict[str, int]:
    """Compile-time parameters of csrc/quantise_weights.cu."""
    return {"TYPE": cuda_tier.TYPES[dtype], "WARPS": _WARPS, "BLOCKS": _BLOCKS, "LOADS": _LOADS}


def _prepared(_: Any, entries: Sequence[_Entry], **constants: int) -> tuple[list[Any], int, int]:
    table, places, first = _Table(), {}, 0
    for i, entry in enumerate(entries):
        for name, tensor in zip(("weights", "rows", "scales", "digests"), entry):
            field = getattr(table, name)
            field[i] = tensor.data_ptr()
            places[getattr(_Table, name).offset + 8 * i] = tensor
        weight = matrix(entry.weight)
        count, columns = weight.shape
        first += count
        table.first[i + 1] = first
        table.strides[i], table.columns[i], table.groups[i] = weight.stride(0), columns, entry.group
        table.aligned[i // 32] |= _aligned(entry) << i % 32
        table.summed[i // 32] |= (entry.scale.dim() == 2) << i % 32
    for i in range(len(entries), ENTRIES):
        table.first[i + 1] = first
    return [AddressTable(table, places), ctypes.c_int(first)], 32 * constants["WARPS"], 0


def _aligned(entry: _Entry) -> bool:
    """Whether rows are read by 16 bytes and written by 8."""
    weight = matrix(entry.weight)
    columns, stride = weight.shape[1], weight.stride(0)
    return not (columns % 8 or stride % 8 or weight.data_ptr() % 16 or entry.row.data_ptr() % 8)


SOURCE = nvrtc.Source("quantise_weights", _prepared, ("weight", "entries"))


def accepts(weights: Tensors, rows: Tensors, scales: Tensors, digests: Tensors, groups: Sequence[int]) -> str | None:
    """Why the kernel does not take these operands; None if it does."""
    if not len(weights) == len(rows) == len(scales) == len(digests) == len(groups):
        return "lists of several lengths"
    entries = list(map(_Entry, weights, rows, scales, digests, groups))
    reasons = itertools.chain(map(_accepts_entry, entries), _accepts_devices(entries))
    return next((reason for reason in reasons if reason is not None), None)


def _accepts_entry(entry: _Entry) -> str | None:
    weight, row, scale, digest, group = entry
    if weight.dim() == 4 and not is_dry_run() and not weight.is_contiguous(memory_format=torch.channels_last):
        return "a convolution's weight that is not channels last"
    weight = matrix(weight)
    if weight.dim() != 2 or weight.dtype not in HALF:
        return "a weight that is no matrix, or not in half precision"
    count, columns = weight.shape
    if columns > _MAX_COLUMNS or weight.stride(0) >= 2**31 or (columns > 1 and weight.stride(1) != 1):
        return "a weight whose rows are too long, or lie apart"
    if group not in quantise_rows.GROUPS or (group and columns % group):
        return "columns that are not divided into groups of 64, 128 or 256"
    if entry.weight.dim() == 4 and entry.weight.shape[2:] != (3, 3):
        return "a convolution's weight that is not 3x3"
    scales = (SCALES, count) if entry.weight.dim() == 4 else (count,)
    bank = (row, (count, columns), torch.int8), (scale, scales, torch.float32), (digest, (count,), torch.int64)
    if any(x.shape != shape or x.dtype != dtype or not x.is_contiguous() for x, shape, dtype in bank):
        return "a bank of another shape, dtype or layout"
    return None


def _accepts_devices(entries: list[_Entry]) -> Iterator[str | None]:
    """Reasons, of tensors whose dtypes are known to fit."""
    for entry in entries:
        yield cuda_tier.accepts(SOURCE, entry.weight)
        bank, device = entry[1:4], entries[0].weight.device
        apart = entry.weight.device != device or any(x.device != device for x in bank)
        if not is_dry_run() and (apart or any(type(x) not in (Tensor, torch.nn.Parameter) for x in bank)):
            yield "tensors of several devices, or of a subclass of Tensor"


@kernel(reference, fallback=fallback, writes=1, updates=(2, 3), portable=True, cuda_sources=(SOURCE,))
def launch(weights: Tensors, rows: Tensors, scales: Tensors, digests: Tensors, groups: Sequence[int]) -> list[Tensor]:
    """`reference`, written over `rows`, in one launch for each 88 weights of a dtype; returns `rows`.

    For each row whose digest (`digest_of_rows`) is not the one in digests[i], rows[i], scales[i] and then digests[i]
    are written. The rest is left as it is. A new bank has digests of zeros.

    weights[i] (N, K) in float16 or bfloat16, rows up to 65,535 columns, which may be further apart than they are long,
    or a convolution's (N, C, 3, 3), channels last, with K = 9 C, row by row, whose scales[i] (10, N) get sums of the
    codes of each row too (`sums_of_codes`);
    rows[i] (N, K) int8, scales[i] (N,) float32 and digests[i] (N,) int64, contiguous; groups[i] 0, 64, 128 or 256, of
    which K is a multiple.
    """
    require(accepts(weights, rows, scales, digests, groups))
    by_dtype: dict[torch.dtype, list[_Entry]] = {}
    for entry in map(_Entry, weights, rows, scales, digests, groups):
        if entry.weight.numel():
            by_dtype.setdefault(entry.weight.dtype, []).append(entry)
    for dtype, entries in by_dtype.items():
        for start in range(0, len(entries), ENTRIES):
            some = entries[start : start + ENTRIES]
            x, count = some[0].weight, sum(len(entry.row) for entry in some)
            blocks = min(cdiv(count, _WARPS), _BLOCKS * multiprocessors(device_of(x)))
            launch_kernel(SOURCE, (blocks,), x, some, **constants(dtype))
    return list(rows)
