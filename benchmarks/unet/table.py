"""Writes the measured tables and plots of docs/measurements.md from benchmarks/results/unet-*.json.

python -m benchmarks.unet.table            # docs/measurements.md, and the plots next to the results
python -m benchmarks.unet.table --print    # the tables alone, to the terminal
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.unet import plot
from benchmarks.unet.run import STACK, case_of

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = (
    "one UNet call",
    "PyTorch, ms",
    "in a CUDA graph, ms",
    "torch.compile, ms",
    "Stable Fast, ms",
    "against PyTorch",
    "against torch.compile",
    "of the limit",
    "kernels",
    "memory, MB",
    "first call, s",
)
NOTE = (
    "*Of the limit*: the time that the FLOPs of PyTorch's call take at the rate of a large matrix product, which ran "
    "in turns with the rest, over the time measured. *Kernels*: launched by one call, PyTorch → Stable Fast. *Memory*: "
    "in addition to the weights at the peak of a call, with all of a CUDA graph's own, PyTorch → Stable Fast. "
    "*First call*: empty cache of compiled kernels / full cache, new process / a further size in the process that "
    "began with an empty one."
)

Rows = dict[str, dict[str, Any]]


def cases(result: dict[str, Any]) -> dict[Any, Rows]:
    """The rows of each case by their engine, in the file's order."""
    found: dict[Any, Rows] = {}
    for row in result["rows"]:
        found.setdefault(case_of(row), {})[row["engine"]] = row
    return found


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _ratio(rows: Rows, name: str) -> str:
    theirs, ours = (rows.get(engine, {}).get("ms_p50") for engine in (name, "sfast"))
    return f"{theirs / ours:.2f} ×" if theirs and ours else "–"


def _change(rows: Rows, field: str) -> str:
    return " → ".join(_number(rows.get(name, {}).get(field), ".0f") for name in ("eager", "sfast"))


def render(result: dict[str, Any]) -> str:
    """The table in Markdown, a line for each case that ours has a time in."""
    lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    for case, rows in cases(result).items():
        ours = rows.get("sfast", {})
        if not ours.get("ms_p50"):
            continue
        limit = ours.get("fraction_of_limit")
        calls = [ours.get(name) for name in ("first_call_s", "first_call_warm_s", "further_size_s")]
        lines.append(
            [
                f"{case.model}, {case.width}×{case.height}" + (f", {case.images} images" if case.images > 1 else ""),
                *(_number(rows.get(name, {}).get("ms_p50")) for name in ("eager", "cudagraph", "torch-compile")),
                f"**{_number(ours['ms_p50'])}**",
                _ratio(rows, "eager"),
                _ratio(rows, "torch-compile"),
                "–" if limit is None else f"{100 * limit:.0f} %",
                _change(rows, "kernels"),
                _change(rows, "memory_mb"),
                " / ".join(_number(seconds, ".1f") for seconds in calls),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stacks(result: dict[str, Any]) -> str:
    """What the rows were measured with; several where they are not all of one state."""
    found = dict.fromkeys(tuple(row[name] for name in STACK) for row in result["rows"])
    told = [
        f"torch {torch}, Triton {triton}, driver {driver or 'unknown'}, {commit}"
        for commit, driver, torch, triton in found
    ]
    return f"{result['gpu'] or 'A CPU'}, measured with {'; '.join(told)}."


def section(file: Path, result: dict[str, Any]) -> str:
    """Table, plot and remarks of one file of results."""
    image = f"![Time of one UNet call, four ways to run it](../benchmarks/results/{file.with_suffix('.svg').name})"
    return "\n\n".join([render(result), image, f"{stacks(result)} {NOTE}"])


def main(given: Sequence[str] | None = None) -> int:
    """Put tables between their marks, and plots next to the results. Returns 1 if there are no results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="write nothing")
    args = parser.parse_args(given)
    files = sorted((ROOT / "benchmarks" / "results").glob("unet-*.json"))
    if not files:
        print("benchmarks/results holds no unet-*.json: run `make bench` on a GPU first", file=sys.stderr)
        return 1
    results = {file: json.loads(file.read_text(encoding="utf-8")) for file in files}
    if args.print:
        print("\n\n".join(f"{render(result)}\n\n{stacks(result)}" for result in results.values()))
        return 0
    for file, result in results.items():
        file.with_suffix(".svg").write_text(plot.bars(result), encoding="utf-8")
    page = ROOT / "docs" / "measurements.md"
    text = page.read_text(encoding="utf-8")
    sections = "\n\n".join(section(file, result) for file, result in results.items())
    page.write_text(marks.replaced(text, BEGIN, END, sections), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
