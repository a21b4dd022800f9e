"""The blocks by which csrc/mma_gemm.cu computes a product, and which of them are worth measuring for one."""

from __future__ import annotations

from typing import NamedTuple

from sfast_ext.kernels.backend.triton_runtime import cdiv

DEPTH = 32
"""K of a stage's slice; in half precision so many products are added up."""
MAX_TILES = 2
"""Tiles of a product that are measured."""
GEFORCE = {(7, 5), (8, 6), (8, 9), (12, 0)}
"""Compute capabilities whose tensor cores add up in float16 at twice the rate of float32, on GeForce."""
CARDS = GEFORCE | {(8, 0)}
"""Compute capabilities that the kernel is for: later ones have faster instructions."""
AMPERE = (8, 0)
_TURING_BYTES, _GEFORCE_BYTES, _BYTES = 64 << 10, 99 << 10, 163 << 10  # of shared memory that blocks can have
_MAX_STAGES = 6
_ALONE = 1.05  # of a block's time, if a multiprocessor has it alone and no slices, or more than one with slices
_WARP_COLUMNS = 8  # behind those of a warp, of the result in shared memory


class Tile(NamedTuple):
    """A block: its warps, rows of a warp as so many times 16, all columns, stages of shared memory, such blocks of a
    multiprocessor, and slices of a stage's K, for each of which there are as many warps."""

    down: int
    across: int
    high: int
    width: int
    stages: int
    resident: int
    slices: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.high * self.down

    @property
    def threads(self) -> int:
        return 32 * self.down * self.across * self.slices

    @property
    def depth(self) -> int:
        """K of a stage."""
        return DEPTH * self.slices

    @property
    def area(self) -> int:
        return self.rows * self.width

    def __str__(self) -> str:
        return f"mma {self.rows}x{self.width}" + (f" in {self.slices} slices" if self.slices > 1 else "")


def shared_bytes(tile: Tile, pairs: bool) -> int:
    """Dynamic shared memory of a block: of the stages, or of the result, which takes their place; half as wide for
    `pairs`, values and gates."""
    columns = tile.width // (2 if pairs else 1)
    stages = 2 * tile.stages * (tile.rows + tile.width) * tile.depth
    sums = 4 * tile.area if tile.slices > 1 else 0
    return max(stages, sums, 2 * tile.rows * (columns + _WARP_COLUMNS * tile.across))


def shapes(capability: tuple[int, int], half_sums: bool) -> list[Tile]:
    """All tiles, large ones first, then those in slices, with as many stages as the card has shared memory for.

    A warp of a large one reads less of shared memory for a product. If a multiprocessor has two blocks or more, one
    computes while another begins or ends; a block in slices is for one that has a single block. Widths of 160 and 80
    divide Stable Diffusion's channels.
    """
    # a warp's 64 rows need all of its registers, with sums in half precision or Turing's smaller products even more
    narrow = half_sums or capability < AMPERE
    large = Tile(4, 2, 2, 160, 0, 1) if narrow else Tile(2, 2, 4, 160, 0, 2)
    # without cp.async registers hold what would be in a third stage
    most = 2 if capability < AMPERE else _MAX_STAGES
    whole = large, Tile(4, 1, 2, 80, 0, 2), Tile(2, 2, 2, 80, 0, 3)
    sliced = Tile(2, 2, 4, 160, 0, 1, 2), Tile(2, 2, 4, 80, 0, 1, 2), Tile(2, 1, 2, 80, 0, 1, 2)
    room = held(capability)
    in_slices = (_staged(tile, room, most) for tile in (sliced[1:] if narrow else sliced))
    return [
        *(_staged(tile, room, most) for tile in whole),
        # a second stage alone does not hide the loads
        *(tile for tile in in_slices if tile.stages >= min(most, 3)),
    ]


def held(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that the blocks of a multiprocessor can have."""
    return _TURING_BYTES if capability < AMPERE else _GEFORCE_BYTES if capability in GEFORCE else _BYTES


def _staged(tile: Tile, room: int, most: int) -> Tile:
    """With as many stages as leave room for its blocks, two at least."""
    for stages in range(most, 2, -1):
        staged = tile._replace(stages=stages)
        if tile.resident * shared_bytes(staged, pairs=False) <= room:
            return staged
    return tile._replace(stages=2)


def worth_measuring(
    size: tuple[int, int, int], capability: tuple[int, int], multiprocessors: int, pairs: bool, half_sums: bool
) -> list[Tile]:
    """Tiles for a product, at most `MAX_TILES`, what should be the fastest first: that with the least work for the
    multiprocessor that has most of it.

    Args:
        size: rows, columns, those of values and gates together, and terms of a sum, of a convolution's tap.
        pairs: whether they are values and gates, of which a warp has as many each.
    """
    rows, columns, depth = size
    found = [tile for tile in shapes(capability, half_sums) if depth % tile.depth == 0]
    if pairs:
        found = [tile for tile in found if tile.width // tile.across // 8 % 2 == 0]

    def work(tile: Tile) -> float:
        blocks = cdiv(cdiv(rows, tile.rows) * cdiv(columns, tile.width), multiprocessors)
        # and what a block takes in addition to its products, in the same unit
        time = blocks * (tile.area + 12 * (tile.rows + tile.width))
        return time * _ALONE if (blocks == 1) == (tile.slices == 1) else time

    return sorted(found, key=work)[:MAX_TILES]
