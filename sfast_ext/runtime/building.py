"""Which threads build a plan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()


def building() -> bool:
    """Whether this thread builds a plan, or runs an original forward that is not to be served in parts."""
    return getattr(_thread, "building", False)


@contextlib.contextmanager
def marked_as_building() -> Iterator[None]:
    """Marks this thread as building a plan: parts run their original forwards."""
    before = building()
    _thread.building = True
    try:
        yield
    finally:
        _thread.building = before
