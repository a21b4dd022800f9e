"""Python's garbage collections, kept out of what makes many objects and keeps them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG = 1  # the generations up to this one


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No collections within: a capture makes and keeps tens of thousands of objects, among which they find nothing.

    At the end what is garbage of them goes, and what stays counts as old: or they would bring about a collection of all
    that the process has, half a second in a WebUI, in the midst of a picture.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.collect(_YOUNG)
            if not gc.get_freeze_count():  # else what somebody has frozen would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()
