"""What an image's time is made of: phases of the WebUI on the CPU, and for which of them the GPU waits."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A phase, from one time to another, in nanoseconds."""

    name: str
    begin: int
    end: int


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Spans that contain each other -> spans one after another, each of the innermost phase at that time."""
    pieces: list[Span] = []
    open_spans: list[Span] = []
    at = 0

    def until(time: int) -> None:
        nonlocal at
        while open_spans and open_spans[-1].end <= time:
            last = open_spans.pop()
            if last.end > at:
                pieces.append(Span(last.name, at, last.end))
                at = last.end
        if open_spans and time > at:
            pieces.append(Span(open_spans[-1].name, at, time))
        at = max(at, time)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        until(span.begin)
        open_spans.append(span)
    until(max((span.end for span in open_spans), default=0))
    return pieces


def _overlap(span: Span, busy: Sequence[tuple[int, int]]) -> int:
    # tens of thousands without CUDA graphs, of which a span meets a few
    first = bisect.bisect_right(busy, span.begin, key=lambda each: each[1])
    met = itertools.takewhile(lambda each: each[0] < span.end, itertools.islice(busy, first, None))
    return sum(min(span.end, end) - max(span.begin, begin) for begin, end in met)


def of_image(spans: Iterable[Span], busy: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """An image's breakdown.

    Args:
        spans: the request as its client sees it, which contains all others, and phases.
        busy: times in which the GPU ran anything, in order and apart.

    Returns:
        `request_ms`, `gpu_busy_ms`, and `phases`: of each name `cpu_ms`, the time in which it was the innermost, and
        `gpu_idle_ms`, that part of it in which the GPU ran nothing. Each sums up to what it is of.
    """
    phases: dict[str, dict[str, float]] = defaultdict(lambda: {"cpu_ms": 0.0, "gpu_idle_ms": 0.0})
    request = gpu = 0
    for piece in innermost(spans):
        length, used = piece.end - piece.begin, _overlap(piece, busy)
        phases[piece.name]["cpu_ms"] += length / 1e6
        phases[piece.name]["gpu_idle_ms"] += (length - used) / 1e6
        request, gpu = request + length, gpu + used
    return {"request_ms": request / 1e6, "gpu_busy_ms": gpu / 1e6, "phases": dict(phases)}


def mean(images: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of some images' breakdowns, rounded to microseconds."""
    names = dict.fromkeys(name for image in images for name in image["phases"])

    def of(values: Iterable[float]) -> float:
        return round(sum(values) / len(images), 3)

    return {
        **{key: of(image[key] for image in images) for key in ("request_ms", "gpu_busy_ms")},
        "phases": {
            name: {
                key: of(image["phases"].get(name, {}).get(key, 0.0) for image in images)
                for key in ("cpu_ms", "gpu_idle_ms")
            }
            for name in names
        },
    }


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """A breakdown in words, the longest phase first."""
    told = [f"  {name}: {found['request_ms']:.0f} ms, in which the GPU ran for {found['gpu_busy_ms']:.0f}"]
    phases = sorted(found["phases"].items(), key=lambda each: -each[1]["cpu_ms"])
    told += [f"    {phase:16} {ms['cpu_ms']:8.1f} ms, GPU idle {ms['gpu_idle_ms']:8.1f}" for phase, ms in phases]
    return told
