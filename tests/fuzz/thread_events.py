"""Other threads that use the same model."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

from fuzz.compare import Wrong
from fuzz.state_events import OF_THE_PROCESS
from fuzz.world import Event, World, result

RESULTS = 20
"""Of the other thread, that are kept."""
PATIENCE_S = 60


def beside_another_thread(w: World, rng: random.Random) -> None:
    """Another thread calls again and again, or runs the original forward, while ours calls and plans come."""
    if w.watched or w.values or OF_THE_PROCESS & w.states.keys():
        # what is kept depends on how many calls the other thread makes; and it has context variables of its own
        return
    args, kwargs = w.draw()
    alike = rng.random() < 0.3
    # what is laid over the root has no part in the original
    run_there, run_here = (w.subject, w.twin) if alike else (w.acc.run_original, w.acc.run_original)
    with w.calling():
        expected = result(run_here, args, kwargs)
    if isinstance(expected, Exception) or w.faults:
        return
    theirs: list[Any] = []
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        with w.calling():
            while not ended.is_set() or not theirs:
                theirs.append(result(run_there, args, kwargs))
                del theirs[RESULTS:]
                begun.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not begun.wait(PATIENCE_S):
        raise Wrong("another thread's original forward did not end")
    try:
        was = w.request
        for _ in range(3):
            w.compare(*w.call_both())
            w.request = replace(was, width=rng.choice((8, 16, 24)))
        w.request = was
    finally:
        ended.set()
        thread.join(PATIENCE_S)
    if thread.is_alive():
        raise Wrong("another thread waits for ever")
    for each in theirs:
        w.compare(each, expected)


# on a GPU what was launched before weights are laid out may run after it
CPU_EVENTS: dict[Event, int] = {beside_another_thread: 3}
