"""Writes the table of whole images in all WebUIs into docs/measurements.md, from results/webui-hosts-h200.json.

python -m benchmarks.webui.table                  # the table
python -m benchmarks.webui.table --add RUN.json   # a run of `benchmarks.webui` into the results first, in place of an
                                                  # earlier one of the same WebUI and model
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
HEAD = (
    "WebUI, model, size",
    "Without, s",
    "With the extension, s",
    "Ratio",
    "The UNet alone, s",
    "At most apart, of 255",
    "Commit",
)


def added(results: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The results with this run, in the order of the table."""
    kept = [each for each in results if (each["host"], each["model"]) != (run["host"], run["model"])]
    order = {name: at for at, name in enumerate(HOSTS)}
    return sorted([*kept, run], key=lambda each: (order[each["host"]], each["model"]))


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
            lines.append(
                [
                    f"{HOSTS[run['host']]}, {MODELS[run['model']]}, {size}",
                    f"{median['stock']:.2f}",
                    f"**{median['extended']:.2f}**",
                    f"{median['stock'] / median['extended']:.1f} ×",
                    f"{median['unet']:.2f}" if "unet" in median else "–",
                    f"{max(row['apart_of_255']):.2f}",
                    run["commit"].rstrip("+")[:8],
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
        print(render(results))
        return 0
    if args.add:
        records.write(RESULTS, results)
    page = ROOT / "docs" / "measurements.md"
    page.write_text(marks.replaced(page.read_text(encoding="utf-8"), BEGIN, END, render(results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
