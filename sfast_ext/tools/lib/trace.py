"""What calls really ran on the GPU: kernels and copies as torch's profiler saw them, and what launched each."""

from __future__ import annotations

import bisect
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfast_ext.timing import timer
from sfast_ext.tools.lib import machine

KERNEL = "kernel"
MOVES = frozenset({"gpu_memcpy", "gpu_memset"})
ON_DEVICE = MOVES | {KERNEL}
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
OPERATION = "cpu_op"
RANGE, RANGE_ON_DEVICE = "user_annotation", "gpu_user_annotation"
CALL = "call "
# microseconds that the clocks of CPU and GPU may be apart; calls are kept further from each other than this
APART = 1000.0
_FIELDS = frozenset({RANGE, RANGE_ON_DEVICE, OPERATION}) | ON_DEVICE | LAUNCHES


@dataclass(frozen=True)
class Event:
    """One event of a trace; microseconds."""

    name: str
    category: str
    start: float
    duration: float
    correlation: int | None = None
    """Shared by what the GPU ran and the call of the driver that launched it."""
    operation: int | None = None
    """Shared by what the GPU ran and the operation of torch that it belongs to."""

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def middle(self) -> float:
        return self.start + self.duration / 2


def record(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> list[Event]:
    """Run each call once under the profiler, which starts once for all of them; `of_call` tells them apart again.

    Once, and never with nothing to record: if CUPTI is attached a second time it may see nothing any more.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        if torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 6):
            # taking CUPTI away again breaks CUDA graphs there
            os.environ["DISABLE_CUPTI_LAZY_REINIT"], os.environ["TEARDOWN_CUPTI"] = "1", "0"
    # seen as no less on a clock that moves in steps
    pause = 3 * APART / 1e6 + timer.step()
    machine.synchronise(device)
    with profile(activities=activities) as profiler:
        # the first launch under the profiler pays for its start
        torch.ones(1024, device=device).add_(1)
        for name, call in calls.items():
            machine.synchronise(device)
            time.sleep(pause)
            with record_function(f"{CALL}{name}"):
                call()
                machine.synchronise(device)
        time.sleep(pause)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return parse(json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False))


def parse(trace: Mapping[str, Any]) -> list[Event]:
    """The events of a Chrome trace that matter here, by their start."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in _FIELDS:
            continue
        args = event.get("args", {})
        found.append(
            Event(
                str(event["name"]),
                event["cat"],
                float(event["ts"]),
                float(event.get("dur", 0)),
                args.get("correlation") or None,
                args.get("External id") or None,
            )
        )
    return sorted(found, key=lambda event: event.start)


def of_call(events: Iterable[Event], name: str) -> list[Event]:
    """What the GPU ran for a call, in its order: what was launched within it, or ran then if that is not known."""
    events = list(events)
    ranges = [event for event in events if event.category == RANGE and event.name == f"{CALL}{name}"]
    if len(ranges) != 1:
        raise ValueError(f"the trace has {len(ranges)} calls named {name!r}")
    begin, end = ranges[0].start - APART, ranges[0].end + APART
    launches = _launches(events)
    ran = [event for event in events if event.category in ON_DEVICE]
    return [event for event in ran if begin <= launches.get(event.correlation, event).middle <= end]


def _launches(events: Iterable[Event]) -> dict[int | None, Event]:
    return {e.correlation: e for e in events if e.category in LAUNCHES and e.correlation is not None}


def count(events: Iterable[Event]) -> tuple[int, int]:
    """Kernels; copies and fills by the driver."""
    found = Counter(event.category for event in events)
    return found[KERNEL], sum(found[category] for category in MOVES)


class _Spans:
    """Ranges of one trace that do not overlap, found by time."""

    def __init__(self, ranges: Iterable[Event]) -> None:
        self._ranges = sorted(ranges, key=lambda event: event.start)
        self._starts = [event.start for event in self._ranges]

    def at(self, moment: float) -> str | None:
        place = bisect.bisect_right(self._starts, moment) - 1
        return self._ranges[place].name if place >= 0 and moment <= self._ranges[place].end else None

    def nearest(self, moment: float) -> str | None:
        if not self._ranges:
            return None
        return min(self._ranges, key=lambda event: max(event.start - moment, moment - event.end, 0.0)).name


def attribute(
    events: Iterable[Event], launched: Iterable[Event], prefix: str
) -> tuple[list[str | None], dict[str, int]]:
    """In which range (`prefix` begins its name) each of `launched` was launched, and by what that was told.

    By the driver's call that launched it; if the trace lacks that, by the operation of torch it belongs to, then
    by the range's own span on the GPU. `disagree` counts where two of these name different ranges.
    """
    events = list(events)
    spans = _Spans(e for e in events if e.category == RANGE and e.name.startswith(prefix))
    on_device = _Spans(e for e in events if e.category == RANGE_ON_DEVICE and e.name.startswith(prefix))
    launches = _launches(events)
    operations = {e.operation: e for e in events if e.category == OPERATION and e.operation is not None}
    told: Counter[str] = Counter()
    result: list[str | None] = []
    for event in launched:
        launch = launches.get(event.correlation)
        operation = operations.get(event.operation) if event.operation is not None else None
        witnesses: dict[str, str | None] = {
            "launch": spans.at(launch.middle) if launch is not None else None,
            "operation": spans.at(operation.middle) if operation is not None else None,
            "span on the GPU": on_device.at(event.middle),
        }
        named = {by: name for by, name in witnesses.items() if name is not None}
        told["disagree"] += len(set(named.values())) > 1
        name: str | None = None
        by = "nothing"
        if named:
            by, name = next(iter(named.items()))
        elif launch is not None:
            by, name = "nearest", spans.nearest(launch.middle)
        told[by] += 1
        result.append(name)
    return result, dict(told)
