"""What is asked of each case, and docs/small-cards.md: tables between marks; the words around them are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks

PAGE = Path(__file__).parents[2] / "docs" / "small-cards.md"
NOISE = 1.05
"""An image may take so many times the WebUI's own time."""
CLOSE = 0.1
"""Latents may be so far apart after all steps: the roundings of half precision add up from step to step."""
HEAD = (
    "card",
    "model",
    "WebUI",
    "out of memory",
    "a step, ms",
    "an image, s",
    "first image, s",
    "reserved, MB",
    "allocated, MB",
    "graphs, MB",
    "",
)
FLAGS = {
    "none": "AUTOMATIC1111, no flag",
    "medvram": "AUTOMATIC1111, `--medvram`",
    "medvram-sdxl": "AUTOMATIC1111, `--medvram-sdxl`",
    "lowvram": "AUTOMATIC1111, `--lowvram`",
    "balanced": "SD.Next, offload *balanced*",
}

Row = dict[str, Any]


def pairs(result: Row) -> list[tuple[Row, Row]]:
    """The rows of each case: without the extension, and with it."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        found.setdefault((row["card"], row["model"], row["mode"]), {})[row["way"]] = row
    return [(each["stock"], each["ours"]) for each in found.values() if len(each) == 2]


def name(row: Row) -> str:
    """The case of a row, in words."""
    return f"{row['model']} on {row['card']:g} GB, {row['mode']}"


def ended(row: Row) -> str | None:
    """Why a life has no result, or not all of it; None where it has."""
    return (
        row.get("missing") or row.get("failed") or next((p["failed"] for p in row["images"] if "failed" in p), None)
    )


def ran_out(row: Row) -> list[str]:
    """Where memory ran out, each place once: at loading, or in an image."""
    places = [row["out_of_memory"]] if "out_of_memory" in row else []
    places += [f"{p['out_of_memory']} ({p['size']})" for p in row["images"] if "out_of_memory" in p]
    return list(dict.fromkeys(places))


def later(row: Row) -> list[Row]:
    """The images that were not the first of their size."""
    seen: set[str] = set()
    found = []
    for image in row["images"]:
        if image["size"] in seen:
            found.append(image)
        seen.add(image["size"])
    return found


def mean(row: Row, field: str) -> float | None:
    """Of the images that were not the first of their size; None where one of them has no such value."""
    images = later(row)
    values = [float(image[field]) for image in images if image.get(field) is not None]
    return sum(values) / len(values) if values and len(values) == len(images) else None


def verdicts(stock: Row, ours: Row) -> list[tuple[bool, str]]:
    """What is asked of a case, and whether it is met. Nothing where it was not run."""
    if "missing" in stock or "missing" in ours:
        return []
    case = name(ours)
    for row in (stock, ours):
        if ended(row) is not None:
            return [(False, f"{case}, {row['way']}: {ended(row)}")]
    found = []
    if "out_of_memory" in ours and "out_of_memory" not in stock:
        found.append((False, f"{case}: out of memory at {ours['out_of_memory']}, the WebUI alone is not"))
    for number, (theirs, mine) in enumerate(zip(stock["images"], ours["images"]), 1):
        if "out_of_memory" in mine and "out_of_memory" not in theirs:
            found.append((False, f"{case}: image {number} out of memory at {mine['out_of_memory']}"))
    if not found:
        both = "neither" if not ran_out(stock) else "no more than the WebUI alone"
        found.append((True, f"{case}: out of memory: {both}"))
    times = mean(stock, "seconds"), mean(ours, "seconds")
    if times[0] and times[1]:
        words = f"{case}: an image {times[1]:.2f} s, the WebUI alone {times[0]:.2f} s"
        found.append((times[1] <= NOISE * times[0], words))
    apart = [error for error in ours.get("errors", ()) if error is not None]
    if apart:
        found.append((max(apart) <= CLOSE, f"{case}: latents are {max(apart):.1e} apart at most"))
    if ours.get("last_error"):
        found.append((False, f"{case}: {ours['last_error']}"))
    return found


def words(stock: Row, ours: Row) -> str:
    """One line on a case."""
    cells = _cells(stock, ours)
    told = ", ".join(f"{head} {cell}" for head, cell in zip(HEAD[3:], cells[3:]) if cell and cell != "–")
    return f"{name(ours)}: {told} ({stock.get('process_s', 0):.0f} + {ours.get('process_s', 0):.0f} s)"


def render(result: Row) -> str:
    """The table in Markdown."""
    lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    lines += [_cells(stock, ours) for stock, ours in pairs(result) if "missing" not in ours]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(results: Sequence[Row], page: Path = PAGE) -> None:
    """Put each GPU's table between its marks; one that the page does not have comes last."""
    text = page.read_text(encoding="utf-8")
    for result in results:
        gpu = result["gpu"] or "a CPU"
        begin, end = (f"<!-- small cards, {gpu}: {which} -->" for which in ("begin", "end"))
        about = f"On {gpu}, torch {result['torch']}, Triton {result['triton']}, {result['commit']}."
        if begin not in text:
            text = f"{text.rstrip()}\n\n{begin}\n{end}\n"
        text = marks.replaced(text, begin, end, f"{render(result)}\n\n{about}")
    page.write_text(text, encoding="utf-8")


def _cells(stock: Row, ours: Row) -> list[str]:
    graphs = [image.get("graphs_mb") or 0 for image in ours["images"]]
    reason = ended(ours) or ended(stock) or "; ".join(ours.get("reasons", ()))
    first = [next((p.get("seconds") for p in row["images"][:1]), None) for row in (stock, ours)]
    return [
        f"{ours['card']:g} GB",
        ours["model"],
        FLAGS.get(ours["mode"], ours["mode"]),
        _both(*("; ".join(ran_out(row)) or "no" for row in (stock, ours))),
        _both(*(_number(mean(row, "step_ms"), 1) for row in (stock, ours))),
        _both(*(_number(mean(row, "seconds"), 2) for row in (stock, ours))),
        _both(*(_number(each, 1) for each in first)),
        _both(*(_number(_peak(row, "reserved_mb"), 0) for row in (stock, ours))),
        _both(*(_number(_peak(row, "allocated_mb"), 0) for row in (stock, ours))),
        f"{max(graphs, default=0):.0f}",
        reason.replace("|", "\\|").replace("\n", " ")[:200],
    ]


def _peak(row: Row, field: str) -> float | None:
    return max((p[field] for p in row["images"] if p.get(field) is not None), default=None)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _both(stock: str, ours: str) -> str:
    return stock if stock == ours else f"{stock} → {ours}"
