"""Linear layers on 8-bit operands by wgmma on Hopper, with a residual or GEGLU in the epilogue: csrc/wgmma_gemm8.cu"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.registry import require
from sfast_ext.kernels.backend.triton_runtime import (
    HALF,
    INTERPRETED,
    cdiv,
    device_of,
    hopper,
    is_dry_run,
    launch_kernel,
    multiprocessors,
)

KINDS = {torch.int8: 0, **({torch.float8_e4m3fn: 1} if hasattr(torch, "float8_e4m3fn") else {})}
"""Values of KIND in csrc/hopper.h."""
PLAIN, RESIDUAL, GEGLU = range(3)  # EPILOGUE in csrc/wgmma_gemm8.cu
MIN_ROWS = 64
"""Of a result for which the kernel is `profitable`; with fewer, most of a tile would be empty."""
ROWS = 128  # M of a tile
DEPTH = 128  # K of a stage, and its bytes
_THREADS = 3 * 128  # of a block: a producer warpgroup and two consumer warpgroups
_GROUPS, _GROUP_ROWS = 2, 64  # consumer warpgroups, and rows of the buffer of each
_SHARED = 227 << 10  # bytes of shared memory that a block may have
_OWN = 1024 + 256  # bytes of it: alignment of the stages to 1 KB, and mbarriers
_VECTORS = 4 + 2  # bytes of the scale and the bias of a column
_MAX_STAGES = 8
_ALIGNED = 16  # bytes, for TMA


class Tile(NamedTuple):
    """A tile of 128 rows, and the model of its time on an NVIDIA H200 in microseconds.

    Args:
        width: N: columns, or values and gates.
        team: consumer warpgroups that share a tile: 1, they alternate tiles, or 2.
        pair: blocks that share the weight by multicast.
        begin: of a launch.
        start: of each wave.
        step: of 128 of K.
    """

    width: int
    team: int
    pair: int
    begin: float
    start: float
    step: float


TILES = [
    Tile(160, 1, 2, 3.34, 0.84, 0.385),
    Tile(160, 2, 2, 1.90, 1.55, 0.400),
    Tile(128, 1, 2, 2.90, 0.81, 0.305),
    Tile(192, 1, 2, 4.90, 0.35, 0.465),
    Tile(80, 2, 2, 2.79, 0.65, 0.224),
    Tile(160, 1, 1, 3.16, 0.81, 0.395),
    Tile(80, 2, 1, 2.52, 0.60, 0.245),
]
"""Each is the fastest at one shape at least of benchmarks/results/hopper8-h200.json."""


def supported(device: torch.device) -> bool:
    """Whether the kernel can be used on a device."""
    return not INTERPRETED and hopper(device) and _SOURCE.supported(device)


def accepts(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    geglu: bool = False,
) -> str | None:
    """Why `linear`, or `geglu`, does not take the operands on this GPU; None if it does.

    Args:
        x, weight: (..., K), (N, K) or (2N, K), both int8 or both float8_e4m3fn; K a multiple of 16, N of 8.
        x_scale, weight_scale: (...) and that of the weight's rows, in float32.
        bias, residual: of the weight's rows, and (..., N) for `linear` alone, in the result's dtype.
        dtype: of the result, float16 or bfloat16; by default that of `bias` and `residual`.
        geglu: whether it is about `geglu`.
    """
    if not supported(device_of(x)):
        return "kernels for Hopper are not for this device, or not compiled here"
    given = [t for t in (x, x_scale, weight, weight_scale, bias, residual) if t is not None]
    if x.dtype not in KINDS or weight.dtype != x.dtype or not x_scale.dtype == weight_scale.dtype == torch.float32:
        return "operands that are not of 8 bits, or scales that are not in float32"
    of_result = {t.dtype for t in (bias, residual) if t is not None} | ({dtype} if dtype is not None else set())
    if len(of_result) > 1 or not of_result <= set(HALF):
        return "a result, a bias or a residual in another dtype"
    if not is_dry_run() and not all(t.device == x.device and type(t) in (Tensor, torch.nn.Parameter) for t in given):
        return "tensors of several devices, or of a subclass of Tensor"
    if x.dim() < 1 or weight.dim() != 2 or not x.numel() or not weight.numel() or x.shape[-1] != weight.shape[1]:
        return "other shapes"
    columns = weight.shape[0] // 2 if geglu else weight.shape[0]
    if x.shape[-1] % _ALIGNED or weight.shape[0] % (16 if geglu else 8):
        return "a depth that is no multiple of 16, or columns that are none of 8"
    if x_scale.shape != x.shape[:-1] or any(t.shape != weight.shape[:1] for t in (weight_scale, bias) if t is not None):
        return "scales or a bias of another shape"
    if residual is not None and (geglu or residual.shape != (*x.shape[:-1], columns)):
        return "a residual of another shape, or with GEGLU"
    # x and its scales are made contiguous
    read = [t for t in (weight, weight_scale, bias, residual, x if x.is_contiguous() else None) if t is not None]
    if is_dry_run() or all(t.is_contiguous() and t.data_ptr() % _ALIGNED == 0 for t in read):
        return None
    return "operands that are not contiguous, or not aligned to 16 bytes"


def profitable(x: Tensor) -> bool:
    """Whether the kernel is worth launching for operands that it `accepts`."""
    return _count(x) >= MIN_ROWS


def tiles(x: Tensor, weight: Tensor, *, residual: bool = False, geglu: bool = False) -> list[Tile]:
    """The tiles for a product; what is the fastest by the model stands first."""
    rows, depth, device = _count(x), x.shape[-1], device_of(x)
    columns = weight.shape[0] // 2 if geglu else weight.shape[0]
    epilogue = GEGLU if geglu else RESIDUAL if residual else PLAIN

    def microseconds(tile: Tile) -> float:
        waves = cdiv(_tiles(rows, columns, tile, epilogue), _at_once(tile, device))
        return tile.begin + waves * (tile.start + tile.step * cdiv(depth, DEPTH))

    return sorted(filter(lambda tile: fits(tile, epilogue), TILES), key=microseconds)


def fits(tile: Tile, epilogue: int) -> bool:
    """Whether there is such a tile with an epilogue: of GEGLU, half the columns are multiples of 16, and sums leave
    registers for its operands."""
    return epilogue != GEGLU or (tile.width % 32 == 0 and tile.width // tile.team <= 160)


def linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., K), x_scale (...), weight (N, K), weight_scale (N), bias (N), residual (..., N) -> (..., N) in `dtype`:
    x_scale * weight_scale * (x @ weight.T) + bias + residual, rounded once, of operands that it `accepts`.

    Args:
        residual: is added, and overwritten by the result.
        tile: one of `tiles`, by default the first.

    Raises:
        Declined: it does not accept them.
        Unavailable: the kernel cannot be compiled or loaded.
    """
    require(accepts(x, x_scale, weight, weight_scale, bias, residual, dtype))
    out = residual
    if out is None:
        out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device=x.device)
    chosen = tile or tiles(x, weight, residual=residual is not None)[0]
    epilogue = PLAIN if residual is None else RESIDUAL
    _launch(out, x, x_scale, weight, weight_scale, bias, residual, constants(chosen, x.dtype, out.dtype, epilogue))
    return out


def geglu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    gate_first: bool = False,
    approximate: str = "none",
    dtype: torch.dtype = torch.float16,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., K), x_scale (...), weight (2N, K), weight_scale (2N), bias (2N) -> (..., N) in `dtype`: value *
    gelu(gate) of the halves of x_scale * weight_scale * (x @ weight.T) + bias, rounded once, of operands that it
    `accepts`.

    gate_first, approximate: see `geglu.reference` of `kernels.pointwise`. tile and errors: as of `linear`.
    """
    require(accepts(x, x_scale, weight, weight_scale, bias, None, dtype, geglu=True))
    require(None if approximate in ("none", "tanh") else "another approximation")
    out = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=dtype, device=x.device)
    chosen = tile or tiles(x, weight, geglu=True)[0]
    given = constants(chosen, x.dtype, dtype, GEGLU, gate_first, approximate)
    _launch(out, x, x_scale, weight, weight_scale, bias, None, given)
    return out


def constants(
    tile: Tile,
    kind: torch.dtype,
    dtype: torch.dtype,
    epilogue: int = PLAIN,
    gate_first: bool = False,
    approximate: str = "none",
) -> dict[str, int]:
    """The kernel's compile-time parameters."""
    return {
        "KIND": KINDS[kind],
        "EPILOGUE": epilogue,
        "WIDTH": tile.width,
        "STAGES": _stages(tile.width, _out_width(tile, epilogue)),
        "TEAM": tile.team,
        "PAIR": tile.pair,
        "GATE_FIRST": int(gate_first),
        "TANH": int(approximate == "tanh"),
        "BF16": int(dtype == torch.bfloat16),
    }


def variants(given: dict[str, int]) -> list[dict[str, int]]:
    """Constants that other image sizes may need if one needs the given ones."""
    kind = next(dtype for dtype, value in KINDS.items() if value == given["KIND"])
    dtype, approximate = torch.bfloat16 if given["BF16"] else torch.float16, "tanh" if given["TANH"] else "none"
    rest = given["EPILOGUE"], bool(given["GATE_FIRST"]), approximate
    return [constants(tile, kind, dtype, *rest) for tile in TILES if fits(tile, given["EPILOGUE"])]


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block in bytes."""
    width = constants["WIDTH"]
    out = width // 2 if constants["EPILOGUE"] == GEGLU else width
    return 1024 + constants["STAGES"] * _stage(width) + _epilogue_bytes(width, out)


def _count(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _tiles(rows: int, columns: int, tile: Tile, epilogue: int) -> int:
    """Tiles, or pairs of them."""
    return cdiv(cdiv(rows, ROWS), tile.pair) * cdiv(columns, _out_width(tile, epilogue))


def _out_width(tile: Tile, epilogue: int) -> int:
    """Columns of the result of a tile."""
    return tile.width // 2 if epilogue == GEGLU else tile.width


def _at_once(tile: Tile, device: torch.device) -> int:
    """Blocks, or pairs of them, of a wave."""
    return max(1, multiprocessors(device) // tile.pair)


def _stage(width: int) -> int:
    return DEPTH * (ROWS + width)


def _epilogue_bytes(width: int, out: int) -> int:
    """For each consumer warpgroup, some rows of the result, and scales and biases of the columns."""
    return _GROUPS * (_GROUP_ROWS * 2 * out + _VECTORS * width)


def _stages(width: int, out: int) -> int:
    """Stages that fit a block."""
    return min(_MAX_STAGES, (_SHARED - _OWN - _epilogue_bytes(width, out)) // _stage(width))


def _launch(
    out: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, given: dict[str, int],
) -> None:  # fmt: skip
    rows, columns = _count(x), out.shape[-1]
    width = given["WIDTH"] // (2 if given["EPILOGUE"] == GEGLU else 1)
    count = cdiv(cdiv(rows, ROWS), given["PAIR"]) * cdiv(columns, width)
    grid = min(count, max(1, multiprocessors(device_of(x)) // given["PAIR"])) * given["PAIR"]
    operands = out, x.contiguous(), x_scale.contiguous(), weight, weight_scale, bias, residual
    launch_kernel(_SOURCE, (grid,), *operands, **given)


def _prepared(
    out: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, **constants: int,
) -> tuple[list[Any], int, int]:  # fmt: skip
    rows, depth, columns, width = _count(x), x.shape[-1], out.shape[-1], constants["WIDTH"]
    of_out = width // 2 if constants["EPILOGUE"] == GEGLU else width
    # the widest swizzle that divides a tile's columns: 64 bytes, or 32
    chunk = 16 if of_out % 32 else 32

    def boxes(t: Tensor) -> Any:
        return nvrtc.tensor_map(t, [columns, rows], [t.element_size() * columns], [chunk, _GROUP_ROWS])

    maps = [
        boxes(out),
        nvrtc.tensor_map(x, [depth, rows], [depth], [DEPTH, ROWS]),
        nvrtc.tensor_map(weight, [depth, weight.shape[0]], [depth], [DEPTH, width // 2]),
        boxes(out if residual is None else residual),
    ]
    tiles = cdiv(cdiv(rows, ROWS), constants["PAIR"]), cdiv(columns, of_out)
    numbers = map(ctypes.c_int, (cdiv(depth, DEPTH), rows, columns, *tiles))
    return [*maps, x_scale, weight_scale, bias, *numbers], _THREADS, shared_bytes(constants)


_NAMES = ("out", "x", "x_scale", "weight", "weight_scale", "bias", "residual")
# a plan writes the weight too, so nothing is read before the wait
_SOURCE = nvrtc.Source("wgmma_gemm8", _prepared, _NAMES, variants, hopper=True)
SOURCES = (_SOURCE,)
