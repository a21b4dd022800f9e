"""The GPU's time of launches, without the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_TRIES, _LONGER = 4, 4


def milliseconds(run: Callable[[], Any], runs: int, head_start: int) -> float:
    """GPU milliseconds of one of `runs` calls in a row, on the current stream.

    Args:
        head_start: clock cycles for which the GPU sleeps first. By then all launches should be in its queue: otherwise
            one that is faster than the CPU would be timed by the CPU. If they are not, all is done again with a
            longer sleep, a few times: a call that waits for the GPU itself will never be in time.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(_TRIES):
        torch.cuda._sleep(head_start)
        start.record()
        for _ in range(runs):
            run()
        woke = start.query()
        end.record()
        end.synchronize()
        if not woke:
            break
        head_start *= _LONGER
    return start.elapsed_time(end) / runs
