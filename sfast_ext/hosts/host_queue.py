"""The queue of a WebUI: one job at a time, which its user may interrupt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def queue(name: str) -> Iterator[None]:
    """The host's own queue: no image is made meanwhile, and its page shows the name as its job."""
    from modules import call_queue, shared

    with call_queue.queue_lock:
        shared.state.begin(name)
        try:
            yield
        finally:
            shared.state.end()
            shared.state.interrupted = shared.state.skipped = False


def interrupted() -> bool:
    """Whether the user has interrupted what the host is at."""
    from modules import shared

    state = getattr(shared, "state", None)
    return bool(getattr(state, "interrupted", False) or getattr(state, "skipped", False))


def interrupt() -> None:
    """Interrupt what the host is at, as its own button does."""
    from modules import shared

    shared.state.interrupt()
