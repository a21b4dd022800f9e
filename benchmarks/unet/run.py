"""One UNet call, four ways to run it side by side, over models and sizes: the numbers of docs/measurements.md.

    python -m benchmarks.unet                                            # all that is not yet measured
    python -m benchmarks.unet --case sd15:512x512:1 --case sdxl:1024x1024:4
    python -m benchmarks.unet --merge one.json two.json                  # what was measured elsewhere
    python -m benchmarks.unet --attention doggettx --without triton      # as those have it who lack Triton

Each case runs in a process of its own with empty caches of compiled kernels, all ways in turns; a second process finds
the caches full and tells what the first call of ours costs then. Results go to benchmarks/results/unet-<gpu>.json, a
row for each case and way, each with the commit it was measured at; a case that has its rows from this commit, driver,
torch and Triton is not measured again. Those with another attention, without Triton or as another GPU go to a file
apart.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records
from sfast_ext import cli
from sfast_ext.tools import bench
from sfast_ext.tools.lib import machine, models
from sfast_ext.tools.lib.ways import OURS, Way, asked, side_by_side, words_of

RESULTS = Path(__file__).parents[1] / "results"
ENGINES = ["sfast", "torch-compile", "cudagraph", "eager"]
STACK = ("commit", "driver", "torch", "triton")


class Case(NamedTuple):
    """A model, a size in pixels and a number of images."""

    model: str
    width: int
    height: int
    images: int

    def __str__(self) -> str:
        return f"{self.model}:{self.width}x{self.height}:{self.images}"


CASES = [
    Case("sd15", 512, 512, 1),
    Case("sd15", 768, 512, 1),
    Case("sd15", 904, 520, 1),
    Case("sd15", 1024, 1024, 1),
    Case("sd15", 512, 512, 4),
    Case("sd21", 768, 768, 1),
    Case("sdxl", 1024, 1024, 1),
    Case("sdxl", 832, 1216, 1),
    Case("sdxl", 1536, 1536, 1),
    Case("sdxl", 1024, 1024, 4),
]


def case(text: str) -> Case:
    """MODEL:WIDTHxHEIGHT[:IMAGES]."""
    model, _, rest = text.partition(":")
    size, _, images = rest.partition(":")
    if model not in models.NAMES + models.TINY_NAMES:
        raise argparse.ArgumentTypeError(f"{text}: no model is called {model!r}")
    counts = cli.counts(images or "1")
    if len(counts) != 1:
        raise argparse.ArgumentTypeError(f"{text}: one number of images at a time")
    return Case(model, *cli.size(size), counts[0])


def case_of(row: dict[str, Any]) -> Case:
    """The case that a row belongs to."""
    return Case(row["model"], row["width"], row["height"], row["images"])


def stack_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The engine of a row, and what it ran with that is not as it is by default."""
    return row["engine"], *words_of(row)


def file_for(gpu: str | None, ours: Way = OURS) -> Path:
    """Where the results of a GPU are kept: unet-h200.json for "NVIDIA H200"; apart, where ours ran with less than it
    has or with another attention."""
    words = re.findall("[a-z0-9]+", (gpu or "cpu").lower())
    name = f"unet-{'-'.join(word for word in words if word != 'nvidia')}"
    apart = re.findall("[a-z0-9_]+", " ".join(ours.words()).lower())
    return RESULTS / f"{'-'.join([name, *apart])}.json"


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The rows of both, those of `new` in the place of what they repeat; each says what it was measured with.

    Raises:
        ValueError: they are of different GPUs.
    """
    stack = {name: new[name] for name in STACK}
    if old is not None and old["gpu"] != new["gpu"]:
        raise ValueError(f"these are results of {old['gpu']}, those of {new['gpu']}: they cannot be in one file")
    rows = {(case_of(row), stack_of(row)): row for row in (old["rows"] if old is not None else [])}
    rows |= {(case_of(row), stack_of(row)): {**stack, **row} for row in new["rows"]}
    ordered = sorted(rows, key=lambda key: (_place(CASES, key[0]), key[0], _place(ENGINES, key[1][0]), key[1]))
    return {"gpu": new["gpu"], **stack, "rows": [rows[key] for key in ordered]}


def _place(order: Sequence[Any], what: Any) -> int:
    return order.index(what) if what in order else len(order)


def several(result: dict[str, Any]) -> str | None:
    """In words, how many rows were measured with what, where that is not the same for all."""
    stacks = Counter(tuple(row[name] for name in STACK) for row in result["rows"])
    if len(stacks) < 2:
        return None
    told = (f"{count} of commit {c}, driver {d}, torch {t}, Triton {n}" for (c, d, t, n), count in stacks.items())
    return f"rows measured with different things are in one file: {'; '.join(told)}"


def measured(result: dict[str, Any] | None, wanted: Case, here: dict[str, Any], ours: Way = OURS) -> bool:
    """Whether all rows of a case are there, from this very state of the code, the driver and the libraries."""
    if result is None or not here["commit"] or here["commit"].endswith("+") or result["gpu"] != here["gpu"]:
        return False
    found = {
        stack_of(row)
        for row in result["rows"]
        if case_of(row) == wanted and all(row[name] == here[name] for name in STACK)
    }
    return found >= {stack_of(way.fields()) for way in side_by_side(ours, ENGINES)}


def measure(wanted: Case, iterations: int, ours: Way = OURS) -> dict[str, Any]:
    """The rows of one case: two processes after each other, over the same caches, which begin empty."""
    options = bench.Options(
        model=wanted.model,
        sizes=[(wanted.width, wanted.height)],
        batches=[wanted.images],
        engines=list(ENGINES),
        iterations=iterations,
        tokens=models.TOKENS,
        cold=False,
        cudnn_benchmark=False,
        json=None,
        full=True,
        ours=ours,
    )
    only = bench.Case(wanted.width, wanted.height, wanted.images)
    with tempfile.TemporaryDirectory(prefix="sfast-caches-") as folder:
        result = bench.in_process(options, only, Path(folder))
        alone = replace(options, engines=["sfast"], iterations=1, full=False)
        again = bench.in_process(alone, only, Path(folder))["rows"][0]
    for row in result["rows"]:
        if row["engine"] == "sfast":
            row["first_call_warm_s"] = again.get("first_call_s")
    return result


def read(file: Path) -> dict[str, Any] | None:
    """The results in a file, None where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def write(file: Path, result: dict[str, Any]) -> None:
    """Put results into a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    records.write(file, result)


def _merge_files(files: Sequence[Path], into: Path | None, ours: Way) -> int:
    for file in files:
        found = read(file)
        if found is None:
            print(f"{file} is not there", file=sys.stderr)
            return 1
        target = into or file_for(found["gpu"], ours)
        result = merge(read(target), found)
        write(target, result)
        print(f"{file}: {len(found['rows'])} rows into {target}, which has {len(result['rows'])}")
        _warn(result)
    return 0


def _warn(result: dict[str, Any]) -> None:
    words = several(result)
    if words:
        print(words, file=sys.stderr)


def main(given: Sequence[str] | None = None) -> int:
    """Measure or merge; 1 where a case had no result or ours ran no plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=case, action="append", metavar="MODEL:WxH:N", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/unet-<gpu>.json")
    parser.add_argument("--again", action="store_true", help="measure also what is measured already")
    parser.add_argument("--iterations", type=int, default=30, help="timed calls of each way (%(default)s)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="take rows from files; measure nothing")
    cli.add_stack(parser)
    args = parser.parse_args(given)
    ours = asked(args)
    if args.merge:
        return _merge_files(args.merge, args.json, ours)
    wanted = args.case or CASES
    here = machine.describe()
    if here["gpu"] is None and any(each.model not in models.TINY_NAMES for each in wanted):
        print("the full models need a GPU", file=sys.stderr)
        return 1
    file = args.json or file_for(here["gpu"], ours)
    status = 0
    for each in wanted:
        if not args.again and measured(read(file), each, here, ours):
            print(f"{each}: measured already")
            continue
        started = time.perf_counter()
        try:
            found = measure(each, args.iterations, ours)
            result = merge(read(file), {**found, **{name: here[name] for name in ("gpu", *STACK)}})
        except (RuntimeError, ValueError) as exc:
            print(f"{each}: {exc}", file=sys.stderr)
            status = 1
            continue
        write(file, result)
        stacks = {stack_of(way.fields()) for way in side_by_side(ours, ENGINES)}
        rows = [row for row in result["rows"] if case_of(row) == each and stack_of(row) in stacks]
        print(f"{bench.tables(rows)}\n{each}: {time.perf_counter() - started:.0f} s\n", flush=True)
        if any(row["engine"] == "sfast" and ("failed" in row or row.get("remark")) for row in rows):
            status = 1
    final = read(file)
    if final is not None:
        _warn(final)
    return status
