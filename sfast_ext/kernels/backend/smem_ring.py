"""The shared memory of blocks that multiply from a ring of slots: conv2d.cu, linear_geglu.cu, linear_layer_norm.cu."""

from __future__ import annotations

ROWS = 128  # of a tile
DEPTH = 64  # terms of a sum in a slot
THREADS = 3 * 128  # of a block: those that load, and two groups that multiply
_SHARED = 233472  # bytes of a multiprocessor
_OWN = 1024 + 1024 + 256  # of a block: what is the system's, what slots lose to begin at 1 KB, and barriers
_MOST_STAGES = 8
_STAGING = 8 * 16 * 80  # bytes through which eight warps write 16 rows of 32 columns at a time


def stages(width: int, staging: bool = True, rows: int = ROWS, beside: int = 0) -> int:
    """Slots that fit a block, of tiles so wide, beside what it writes through where it does, and so many bytes more. Of
    blocks of 64 rows two fit a multiprocessor."""
    shared = _SHARED * min(rows, ROWS) // ROWS
    return min(_MOST_STAGES, (shared - _OWN - _STAGING * staging - beside) // _slot(width, rows))


def shared_bytes(width: int, stages: int, staging: bool = True, rows: int = ROWS) -> int:
    """What a block asks for: 1 KB to begin at, slots, and what it writes through."""
    return 1024 + stages * _slot(width, rows) + _STAGING * staging


def _slot(width: int, rows: int) -> int:
    return 2 * DEPTH * (rows + width)
