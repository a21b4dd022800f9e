"""Which of a GPU's failed allocations are the extension's, and which the host's.

An allocation that fails within the extension costs the host nothing: it is tried in another way, or the original
forward runs. The report counts these as `out_of_memory`. What torch's allocator counts next to them has failed in the
host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from sfast_ext.report import Report

COUNTER = "out_of_memory"


def of_host(report: Report, device: torch.device | None) -> int:
    """How many allocations on a GPU have failed that the report does not count. None: the current GPU."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) - report.counter(COUNTER)


@contextlib.contextmanager
def counted(report: Report, device: torch.device | None) -> Iterator[None]:
    """Count the allocations that fail within. An error that says so and is raised is left to what catches it."""
    if device is None or device.type != "cuda":
        yield
        return
    before, raised = of_host(report, device), 0
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raised = 1
        raise
    finally:
        if (caught := of_host(report, device) - before - raised) > 0:
            report.count(COUNTER, caught)
