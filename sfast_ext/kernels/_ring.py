"""The shared memory of blocks that multiply from a ring of slots: csrc/conv2d.cu and csrc/linear_geglu.cu."""

from __future__ import annotations

ROWS = 128  # of a tile
DEPTH = 64  # terms of a sum in a slot
THREADS = 3 * 128  # of a block: those that load, and two groups that multiply
_SHARED = 232448 - 1024 - 256  # bytes of a block, less what slots lose to begin at 1 KB, and barriers
_MOST_STAGES = 8
_STAGING = 8 * 16 * 80  # bytes through which eight warps write 16 rows of 32 columns at a time


def stages(width: int, staging: bool = True) -> int:
    """Slots that fit a block, of tiles so wide, beside what it writes through where it does."""
    return min(_MOST_STAGES, (_SHARED - _STAGING * staging) // _slot(width))


def shared_bytes(width: int, stages: int, staging: bool = True) -> int:
    """What a block asks for: 1 KB to begin at, slots, and what it writes through."""
    return 1024 + stages * _slot(width) + _STAGING * staging


def _slot(width: int) -> int:
    return 2 * DEPTH * (ROWS + width)
