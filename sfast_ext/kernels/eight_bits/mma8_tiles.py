"""The blocks by which csrc/mma_gemm8.cu computes a product.

They are those of csrc/mma_gemm.cu: a stage holds 64 bytes of a row, whatever they are, and takes as many instructions.
"""

from __future__ import annotations

from sfast_ext.kernels.linear import mma_tiles
from sfast_ext.kernels.linear.mma_tiles import AMPERE, Tile

DEPTH = 2 * mma_tiles.DEPTH
"""K of a stage's slice."""
_GEFORCE = (8, 6)
_LARGE = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0)}
"""Compute capabilities whose blocks can have as much shared memory as those of 8.0. Later ones that are not among them
have as much as a GeForce."""
_SYSTEMS = 1 << 10
"""Bytes of shared memory that the system takes of each block, in addition to what blocks can have."""


def shared_bytes(tile: Tile, pairs: bool) -> int:
    """Dynamic shared memory of a block: as of `mma_tiles`, the factors of its rows and columns, and a bias."""
    return mma_tiles.shared_bytes(tile, pairs) + 4 * tile.rows + 8 * tile.width


def shapes(capability: tuple[int, int]) -> list[Tile]:
    """All tiles of a card, see `mma_tiles.shapes`."""
    like = _like(capability)
    return [_fitting(tile, mma_tiles.held(like)) for tile in mma_tiles.shapes(like, half_sums=False)]


def _fitting(tile: Tile, held: int) -> Tile:
    """With as many stages as leave room for its blocks in so many bytes."""
    while tile.stages > 2 and tile.resident * (shared_bytes(tile, pairs=False) + _SYSTEMS) > held + _SYSTEMS:
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def worth_measuring(
    size: tuple[int, int, int], capability: tuple[int, int], multiprocessors: int, pairs: bool
) -> list[Tile]:
    """Tiles for a product, see `mma_tiles.worth_measuring`."""
    rows, columns, depth = size
    # in half precision half as many terms of a sum have as many bytes
    same = rows, columns, depth * mma_tiles.DEPTH // DEPTH
    found = mma_tiles.worth_measuring(same, _like(capability), multiprocessors, pairs, half_sums=False)
    return [_fitting(tile, mma_tiles.held(_like(capability))) for tile in found]


def _like(capability: tuple[int, int]) -> tuple[int, int]:
    """Of a card that `mma_tiles` knows, with as much shared memory and the same instructions."""
    if capability < AMPERE:
        return capability
    return AMPERE if capability in _LARGE else _GEFORCE
