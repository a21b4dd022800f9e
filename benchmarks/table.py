"""Writes the measured table of README.md from the results beside this file.

python -m benchmarks.table
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OTHERS = ("eager", "cudagraph", "torch-compile")
NAMES = {"eager": "PyTorch", "cudagraph": "in a CUDA graph", "torch-compile": "torch.compile"}


def _cell(row: dict[str, Any] | None) -> str:
    return "–" if row is None or row.get("ms_p50") is None else f"{row['ms_p50']:.2f}"


def render(results: list[dict[str, Any]]) -> str:
    """The table in Markdown, a line for each model, size and number of pictures."""
    head = [
        "GPU",
        "one UNet call",
        *(f"{NAMES[name]}, ms" for name in OTHERS),
        "Stable Fast, ms",
        "gain",
        "first call, s",
    ]
    lines = [head, ["---"] * len(head)]
    for result in results:
        cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in result["rows"]:
            key = (row["model"], row["width"], row["height"], row["images"])
            cases.setdefault(key, {})[row["engine"]] = row
        for (model, width, height, images), rows in cases.items():
            ours, eager = rows.get("sfast"), rows.get("eager")
            if ours is None or ours.get("ms_p50") is None:
                continue
            gain = f"{eager['ms_p50'] / ours['ms_p50']:.2f} ×" if eager and eager.get("ms_p50") else "–"
            what = f"{model}, {width}×{height}, batch {images}"
            cells = [_cell(rows.get(name)) for name in OTHERS]
            lines.append([result["gpu"] or "CPU", what, *cells, _cell(ours), gain, f"{ours['first_call_s']:.1f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def note(results: list[dict[str, Any]]) -> str:
    """What the numbers were measured with."""
    stacks = dict.fromkeys(
        f"torch {r['torch']}, Triton {r['triton']}, driver {r['driver']}, {r['commit']}" for r in results
    )
    return f"Measured with {'; '.join(stacks)}."


def main() -> int:
    """Put the table between its marks; 1 where there are no results."""
    files = sorted((ROOT / "benchmarks" / "results").glob("bench-*.json"))
    if not files:
        print("benchmarks/results holds no bench-*.json: run `make bench` on a GPU first", file=sys.stderr)
        return 1
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(f"{before}{BEGIN}\n{render(results)}\n\n{note(results)}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
