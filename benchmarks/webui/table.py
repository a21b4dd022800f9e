"""Writes the table of whole images in all WebUIs into docs/measurements.md, from results/webui-hosts-h200.json.

python -m benchmarks.webui.table                  # the table
python -m benchmarks.webui.table --add RUN.json   # a run of `benchmarks.webui` into the results first, in place of an
                                                  # earlier one of the same WebUI, model and flags
python -m benchmarks.webui.table --print          # the table alone, to the terminal
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks, records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "webui-hosts-h200.json"
BEGIN, END = "<!-- whole images: begin -->", "<!-- whole images: end -->"
HOSTS = {
    "a1111": "AUTOMATIC1111 1.10.1",
    "sdnext": "SD.Next (July 2026)",
    "forge": "Forge 2.0.1",
    "reforge": "reForge 1.0.0",
    "forge-neo": "Forge Neo 2.26",
    "forge-classic": "Forge Classic",
}
MODELS = {"sd15": "SD 1.5", "sdxl": "SDXL"}
KINDS = {"txt2img": "", "control": ", with a ControlNet", "hires": ", hires fix", "img2img": ", img2img"}
HEAD = ("WebUI, model, size", "Without, s", "With the extension, s", "Ratio", "At most apart, of 255")


def added(results: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The results with this run, in the order of the table."""
    kept = [each for each in results if kind(each) != kind(run)]
    order = {name: at for at, name in enumerate(HOSTS)}
    return sorted([*kept, run], key=lambda each: (order[each["host"]], *kind(each)))


def kind(run: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What only one run of the results has: the WebUI, the model and its flags."""
    return run["host"], run["model"], sorted({row["flags"] for row in run["rows"]})


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown, a line for each row in which plans ran and nothing failed."""
    lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    for run in results:
        for row in run["rows"]:
            if not row["plans_ran"] or row["last_error"]:
                continue
            median = row["median_s"]
            flags = f", `{row['flags']}`" if row["flags"] else ""
            size = f"{row['width']}×{row['height']}{KINDS[row['kind']]}{flags}"
            alone = f", the UNet alone {median['unet']:.2f}" if "unet" in median else ""
            lines.append(
                [
                    f"{HOSTS[run['host']]}, {MODELS[run['model']]}, {size}",
                    f"{median['stock']:.2f}",
                    f"**{median['extended']:.2f}**{alone}",
                    f"{median['stock'] / median['extended']:.1f} ×",
                    f"{max(row['apart_of_255']):.2f}",
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stacks(results: Sequence[dict[str, Any]]) -> str:
    """What the runs were measured with; several where they are not all of one state."""
    found = dict.fromkeys((run["gpu"], run["torch"], run["driver"], run["commit"].rstrip("+")[:8]) for run in results)
    return "; ".join(f"{gpu}, torch {torch}, driver {driver}, {commit}" for gpu, torch, driver, commit in found)


def main(given: Sequence[str] | None = None) -> int:
    """Put runs into the results, and the table between its marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RUN.json")
    parser.add_argument("--print", action="store_true", help="write nothing")
    args = parser.parse_args(given)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for file in args.add:
        results = added(results, json.loads(file.read_text(encoding="utf-8")))
    if args.print:
        print(f"{render(results)}\n\n{stacks(results)}")
        return 0
    if args.add:
        records.write(RESULTS, results)
    text = f"{render(results)}\n\n{stacks(results)}."
    page = ROOT / "docs" / "measurements.md"
    page.write_text(marks.replaced(page.read_text(encoding="utf-8"), BEGIN, END, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
