"""The queue of a WebUI: one job at a time, which its user may interrupt."""

from __future__ import annotations

import contextlib
import sys
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


def waiting() -> bool | None:
    """Whether somebody waits for the queue, or for the image of a task that the page has sent; None if the host's lock
    does not tell. A lock of Python's library does not."""
    from modules import call_queue

    # of the lock of AUTOMATIC1111 and its forks, which serves those who wait in their order
    threads = getattr(call_queue.queue_lock, "_pending_threads", None)
    tasks = getattr(sys.modules.get("modules.progress"), "pending_tasks", None)
    return None if threads is None else bool(threads) or bool(tasks)


def interrupted() -> bool:
    """Whether the user has interrupted what the host is at."""
    from modules import shared

    state = getattr(shared, "state", None)
    return bool(getattr(state, "interrupted", False) or getattr(state, "skipped", False))


def interrupt() -> None:
    """Interrupt what the host is at, as its own button does."""
    from modules import shared

    shared.state.interrupt()
