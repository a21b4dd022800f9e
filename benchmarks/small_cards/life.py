"""The life of one case: images in a row, another size, and back; what each took, and whether memory ran out."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.small_cards.hosts import STEP, Host
from sfast_ext.plans import graph_pool
from sfast_ext.runtime.plan_runner import out_of_memory

Row = dict[str, Any]
COUNTERS = (
    "captures", "graph_captures", "evictions", "replays", "eager_runs", "weights_away", "memory_given_back",
    "out_of_memory", "errors",
)  # fmt: skip
MB = 1 << 20


class Watch:
    """Times the parts of one image: steps by events on a GPU, with no waiting between them, the rest by the clock.
    Reads the peaks of memory in each part."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.now = ""
        self.steps = 0
        self._begun = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._last = self._begun
        self._marks: list[Any] = []
        self._peaks: dict[str, tuple[float, float]] = {}

    def at(self, part: str) -> None:
        """A part begins."""
        if part == STEP:
            self.steps += 1
        if part != STEP or self.now != STEP:
            self._end_of_part()
        if part == STEP or self.now == STEP:
            self._marks.append(self._mark())
        self.now = part

    def where(self) -> str:
        """Which part it is at, in words."""
        return f"step {self.steps}" if self.now == STEP else self.now

    def row(self) -> Row:
        """What was measured; the image is made."""
        self._end_of_part()
        row: Row = {"seconds": round(time.perf_counter() - self._begun, 4)}
        for part, name in (("the prompt", "prompt_s"), ("the VAE", "vae_s")):
            if part in self._seconds:
                row[name] = round(self._seconds[part], 4)
        row["parts_s"] = {part or "before": round(seconds, 4) for part, seconds in self._seconds.items()}
        if self._gpu:
            row["peaks_mb"] = {part or "before": peaks for part, peaks in self._peaks.items()}
        times = list(map(self._between, self._marks, self._marks[1:]))
        if times:
            row["first_step_ms"] = round(times[0], 3)
            times.sort()
            row["step_ms"] = round(times[len(times) // 2], 3)
            row["slowest_step_ms"] = round(times[-1], 3)
        return row

    def _end_of_part(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()
            before, reached = self._peaks.get(self.now, (0.0, 0.0)), peaks_mb()
            self._peaks[self.now] = max(before[0], reached[0]), max(before[1], reached[1])
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self._seconds[self.now] = self._seconds.get(self.now, 0.0) + now - self._last
        self._last = now

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self._gpu else 1000 * (end - start)


def live(
    host: Host, sizes: Sequence[tuple[int, int]], steps: int, keep: Callable[[list[Row], list[Any]], None]
) -> tuple[list[Row], list[Any]]:
    """Make an image of each size, one after another.

    Args:
        keep: handed the rows and latents that are there after each image.

    Returns:
        A row for each image, and its latent; None where there is none.
    """
    rows: list[Row] = []
    latents: list[Any] = []
    for width, height in sizes:
        row, latent = _image(host, width, height, steps)
        rows.append(row)
        latents.append(latent)
        keep(rows, latents)
    return rows, latents


def _image(host: Host, width: int, height: int, steps: int) -> tuple[Row, Any]:
    gpu = host.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    retries = _memory_stat(gpu, "num_alloc_retries")
    counted, watch = _counted(host), Watch(host.device)
    row: Row = {"size": f"{width}x{height}"}
    latent = None
    try:
        latent = host.image(width, height, steps, watch.at)
        row |= watch.row()
    except Exception as exc:
        row["out_of_memory" if out_of_memory(exc) else "failed"] = watch.where()
        row["message"] = f"{type(exc).__name__}: {exc}"[:500]
        if not out_of_memory(exc):
            row["traceback"] = traceback.format_exc()[-2000:]
    if latent is None:
        # after the handler: the exception kept the image's tensors
        gc.collect()
        host.end()
    found = [*row.get("peaks_mb", {}).values(), *([peaks_mb()] if gpu else [])]
    row["reserved_mb"], row["allocated_mb"] = map(max, zip(*found)) if found else (None, None)
    row["unet_mb"] = host.unet_mb
    row["alloc_retries"] = _memory_stat(gpu, "num_alloc_retries") - retries
    row["counted"] = {name: number - counted[name] for name, number in _counted(host).items()}
    if gpu:
        pool = graph_pool.pool_of(torch.device("cuda", torch.cuda.current_device()))
        row["graphs"], row["graphs_mb"] = len(pool), round(pool.size / MB, 1)
    return row, latent


def told(host: Host) -> Row:
    """What the extension says at the end of a life."""
    session = host.session()
    row: Row = {"faults": host.faults()}
    if session is not None:
        report = session.report.as_dict()
        row["reasons"] = list(report["reasons"])
        row["last_error"] = (report["last_error"] or {}).get("message")
        row["events"] = [event["message"] for event in report["events"]][-12:]
        row["budget_mb"] = session.config().graph_memory_mb
    return row


def _counted(host: Host) -> dict[str, int]:
    session = host.session()
    return {} if session is None else {name: session.report.counter(name) for name in COUNTERS}


def peaks_mb() -> tuple[float, float]:
    """The peaks of reserved and of allocated memory since they were reset, in MB."""
    return round(torch.cuda.max_memory_reserved() / MB, 1), round(torch.cuda.max_memory_allocated() / MB, 1)


def _memory_stat(gpu: bool, name: str) -> int:
    return int(torch.cuda.memory_stats().get(name, 0)) if gpu else 0
