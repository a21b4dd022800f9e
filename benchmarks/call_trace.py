"""Which files of `sfast_ext` a replayed call passes: `PYTHONPATH=.:tests python -m benchmarks.call_trace`.

Counts, in the steady state of a small module on the CPU, how often control changes from one file to another. Three
calls are traced: of a plan without a CUDA graph; of one with a graph, replayed speculatively, within a generation; and
the same of a program that announces no generations. A stand-in takes the place of the GPU and of the launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from faulty import pretend_a_gpu
from torch import nn

import sfast_ext
from sfast_ext import Accelerator, Config, accelerate

PACKAGE = str(Path(sfast_ext.__file__).parent) + "/"
WARM_UP = 4
REPEATS = 2000
CONFIG = Config(allow_cpu=True, drop_slower=False)


class Trace(NamedTuple):
    """The way of one call: the files in the order in which control came to them."""

    visits: list[str]

    def counts(self) -> dict[str, int]:
        """Changes from one file to another, by calls and returns, and the files."""
        return {"changes": len(self.visits) - 1, "files": len(set(self.visits))}


def small_module() -> nn.Module:
    """A module whose plan has a handful of operations."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))
    return layers.eval().requires_grad_(False)


def traced(call: Callable[[], Any]) -> Trace:
    """The way of a call through the package."""
    stack: list[str] = []
    visits: list[str] = []

    def follow(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        if event == "call":
            stack.append(name)
        elif event == "return" and stack:
            stack.pop()
        if stack and (not visits or visits[-1] != stack[-1]):
            visits.append(stack[-1])

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Trace([name.removeprefix(PACKAGE) for name in visits])


def microseconds(call: Callable[[], Any], times: int) -> float:
    """The median time of a call."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(taken), 2)


def measure(announce: bool, gpu: bool, times: int) -> tuple[dict[str, float], list[str]]:
    """The counts and the time of one kind of call, and its way."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        module, x = small_module(), torch.randn(1, 4, 8, 8)
        if gpu:
            pretend_a_gpu(patch)
        accelerator: Accelerator = accelerate(module, CONFIG)
        if announce:
            accelerator.new_generation()
        for _ in range(WARM_UP):
            module(x)
        (plan,) = accelerator.plans.values()
        if gpu:
            assert plan.graph is not None, plan.no_graph_reason
            plan.graph.graph.again = lambda: None  # type: ignore[attr-defined]
        name = "replays" if gpu else "eager_runs"
        before = accelerator.report.counter(name)
        trace = traced(lambda: module(x))
        assert accelerator.report.counter(name) == before + 1 and not accelerator.report.counter("misspeculated")
        found = {**trace.counts(), "microseconds": microseconds(lambda: module(x), times)}
        accelerator.release()
    return found, trace.visits


def main() -> None:
    """Print the counts, and the ways if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=REPEATS)
    parser.add_argument("--ways", action="store_true", help="print the files in order as well")
    parser.add_argument("--json", help="a file for the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        "without a CUDA graph, no generations": (False, False),
        "speculative, within a generation": (True, True),
        "speculative, no generations": (False, True),
    }
    found = {}
    for kind, (announce, gpu) in kinds.items():
        found[kind], visits = measure(announce, gpu, options.calls)
        print(f"{kind}: {found[kind]}")
        if options.ways:
            print("    " + "\n    ".join(visits))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
