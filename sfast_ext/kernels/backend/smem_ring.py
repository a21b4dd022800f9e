"""Shared memory of the kernels with a ring of TMA stages: conv2d.cu, linear_geglu.cu, linear_layer_norm.cu."""

from __future__ import annotations

ROWS = 128  # M of a tile
DEPTH = 64  # K of a stage
THREADS = 3 * 128  # of a block: a producer warpgroup and two consumer warpgroups
_SHARED = 233472  # bytes of shared memory of a multiprocessor
_OWN = 1024 + 1024 + 256  # bytes of a block: the system's, alignment of the stages to 1 KB, and mbarriers
_MAX_STAGES = 8
_STAGING = 8 * 16 * 80  # bytes of the epilogue's staging buffer: eight warps write 16 rows of 32 columns at a time


def stages(width: int, staging: bool = True, rows: int = ROWS, reserved: int = 0) -> int:
    """Stages that fit a block (two blocks per multiprocessor if a tile has 64 rows).

    Args:
        width: N of a tile.
        staging: whether the epilogue has a staging buffer.
        rows: M of a tile.
        reserved: bytes for other uses.
    """
    shared = _SHARED * min(rows, ROWS) // ROWS
    return min(_MAX_STAGES, (shared - _OWN - _STAGING * staging - reserved) // _stage(width, rows))


def shared_bytes(width: int, stages: int, staging: bool = True, rows: int = ROWS) -> int:
    """Dynamic shared memory of a block in bytes: alignment, stages, and the staging buffer."""
    return 1024 + stages * _stage(width, rows) + _STAGING * staging


def _stage(width: int, rows: int) -> int:
    return 2 * DEPTH * (rows + width)
