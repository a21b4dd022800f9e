"""Pauses Python's garbage collector while many objects are made, and freezes those that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parameter import is_lazy

YOUNG = 1
"""The young generations: those up to this one."""
LARGE = 64 << 20
"""Bytes of parameters that are more than tests and classes make at import."""
_PYTHONS_OWN = 10_000  # more objects than Python itself freezes at its start: 375 in 3.12.3
_seen_frozen = False
"""Whether objects were seen to be frozen: to count them takes 0.1 s for a million, so it is asked once."""
_thawed = False
"""Whether objects were thawed before: then there may be garbage among the old ones."""


def some_are_frozen() -> bool:
    """Whether somebody froze objects. Then it is for them to thaw them."""
    global _seen_frozen
    _seen_frozen = _seen_frozen or gc.get_freeze_count() > _PYTHONS_OWN
    return _seen_frozen


def freeze() -> bool:
    """Freeze all objects of the process (`gc.freeze`), if no network is among them: one in a cycle would keep its
    memory. Returns whether that was done."""
    if parameter_bytes(gc.get_objects()) > LARGE:
        return False
    if _thawed:
        gc.collect()
    else:
        gc.collect(YOUNG)
    gc.freeze()
    return True


def thaw() -> None:
    """Thaw all objects."""
    global _seen_frozen, _thawed
    gc.unfreeze()
    _seen_frozen, _thawed = False, True


def parameter_bytes(objects: Iterable[object]) -> int:
    """The size of all parameters of the modules among some objects, in bytes."""
    # `isinstance` asks proxies for the class of what they stand for
    modules = [each for each in objects if issubclass(type(each), nn.Module)]
    held = [p for module in modules for p in [*module.__dict__.get("_parameters", {}).values()]]
    # a network on meta has its memory soon
    return sum(p.numel() * p.element_size() for p in held if p is not None and not is_lazy(p))


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No collections within: a capture or a recording makes tens of thousands of objects and keeps most, so collections
    find nothing.

    At the end the new garbage is collected, and the survivors are moved to the oldest generation. Otherwise they would
    soon trigger a collection of the whole process, which takes half a second in a WebUI, in the middle of an image.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.collect(YOUNG)
            # unfreeze would also thaw what was frozen before
            if not some_are_frozen():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
