"""What the first call costs in 8 bits next to the exact way: `python -m benchmarks.first_call --model sdxl`.

Each first call has a process to itself: once with empty caches of compiled kernels, once with those that the process
before it, of the same way, has filled.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import records
from sfast_ext.tools import bench
from sfast_ext.tools.lib import machine, models
from sfast_ext.tools.lib.ways import OURS, Way

WAYS = {"exact": OURS, "8 bits": replace(OURS, eight_bits=True)}
MOST_MORE = 1.0
"""Seconds that the first call may take longer in 8 bits."""


def first_calls(model: str, size: int) -> dict[str, dict[str, float]]:
    """Seconds of each way's first call with empty and with full caches, printed as they are there."""
    found: dict[str, dict[str, float]] = {}
    case = bench.Case(size, size, 1)
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="sfast-caches-") as folder:
            for caches in ("empty", "full"):
                seconds = bench.in_process(options(model, way), case, Path(folder))["rows"][0]["first_call_s"]
                found.setdefault(caches, {})[name] = seconds
                print(f"{model} {size}, {caches} caches, {name}: {seconds} s", flush=True)
    return found


def options(model: str, way: Way) -> bench.Options:
    """One call and no more."""
    return bench.Options(
        model=model,
        sizes=[],
        batches=[1],
        engines=[OURS.engine],
        iterations=1,
        tokens=models.TOKENS,
        cold=False,
        cudnn_benchmark=False,
        json=None,
        full=False,
        ours=way,
    )


def main(given: Sequence[str] | None = None) -> int:
    """1 if the first call in 8 bits takes too much longer."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_call", description=__doc__)
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--size", type=int, default=1024, help="of the image, in pixels")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args(given)
    found = first_calls(chosen.model, chosen.size)
    more = {caches: round(times["8 bits"] - times["exact"], 2) for caches, times in found.items()}
    print(f"8 bits take longer by {more}, at most {MOST_MORE} s asked")
    if chosen.json is not None:
        result: dict[str, Any] = {**machine.describe(), "model": chosen.model, "size": chosen.size, "seconds": found}
        records.write(chosen.json, {**result, "more": more})
    return int(max(more.values()) > MOST_MORE)


if __name__ == "__main__":
    raise SystemExit(main())
