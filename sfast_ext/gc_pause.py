"""Pauses Python's garbage collector during a capture."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 1
"""The young generations: those up to this one."""
_PYTHONS_OWN = 10_000  # more objects than Python itself freezes at its start: 375 in 3.12.3
_frozen_by_others = False
"""Whether somebody was seen to have frozen objects: to count them takes 10 ms for a million, so it is asked once."""


def frozen_by_others() -> bool:
    """Whether somebody froze objects. Then it is for them to thaw them."""
    return gc.get_freeze_count() > _PYTHONS_OWN


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No collections within: a capture makes tens of thousands of objects and keeps most, so collections find nothing.

    At the end the new garbage is collected, and the survivors are moved to the oldest generation. Otherwise they would
    soon trigger a collection of the whole process, which takes half a second in a WebUI, in the middle of an image.
    """
    global _frozen_by_others
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.collect(YOUNG)
            # unfreeze would also thaw what others froze
            _frozen_by_others = _frozen_by_others or frozen_by_others()
            if not _frozen_by_others:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
