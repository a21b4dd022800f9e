"""Which tile of `mma_gemm8` computes a product."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sfast_ext.kernels.backend.choices import Choices
from sfast_ext.kernels.backend.triton_runtime import is_dry_run
from sfast_ext.kernels.eight_bits import mma_gemm8, wgmma_gemm8
from sfast_ext.kernels.linear.mma_choice import repeatable
from sfast_ext.kernels.linear.mma_tiles import Tile

SOURCES = (mma_gemm8._SOURCE, *wgmma_gemm8.SOURCES)
"""What a product may launch."""
EXPECTED = "the expected tile"
"""The name, among choices, of the tile that stands first: what runs a shape that was not measured."""


def choices(what: str) -> Choices:
    """Of an operation, by its name on disk."""
    return Choices(what, own=EXPECTED)


def run(
    chooser: Choices,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    ours: Callable[..., Tensor],
    tiles: list[Tile],
    residual: Tensor | None = None,
    more: str = "",
) -> Tensor:
    """The result by the chosen tile. In a dry run, in which kernels are compiled ahead, all are launched.

    Args:
        ours: takes `tile`, and `residual`, which it overwrites.
        residual: None for none.
        more: what the time depends on in addition to sizes and dtype.
    """
    ways = [functools.partial(ours, tile=tile) for tile in tiles]
    given = ways if residual is None else [functools.partial(way, residual=residual) for way in ways]
    if is_dry_run():
        return [way() for way in given][-1]
    trials = None
    if residual is not None:
        runs = (repeatable(way, residual) for way in ways)
        trials = dict(zip((EXPECTED, *map(str, tiles[1:])), runs))
    kind = str(dtype).removeprefix("torch.")
    added = f"{', bias' * (bias is not None)}{', residual' * (residual is not None)}{more}"
    key = f"{x.numel() // x.shape[-1]}x{weight.shape[0]}x{x.shape[-1]} {kind}{added}, {tiles[0]}"
    others = dict(zip(map(str, tiles[1:]), given[1:]))
    return chooser.run(x.device, key, given[0], others, EXPECTED, trials=trials)
