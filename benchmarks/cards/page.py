"""docs/generated/cards.md: tables between marks; the words around them are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.cards.published import CARDS

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "cards.md"
BEGIN, END = "<!-- cards: begin -->", "<!-- cards: end -->"
_WAYS = ("exact", "faster", "eight_bits", "both")
MODELS = {"sd15": "SD 1.5", "sdxl": "SDXL", "anima": "Anima, one image", "z-image": "Z-Image, one image"}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def cards() -> str:
    """The published figures."""
    head = ("card", "multiprocessors", "boost clock, GHz", "TFLOP/s, sums in fp32", "sums in fp16", "TOP/s, int8",
            "memory, GB/s")  # fmt: skip
    return _table(
        head,
        (
            (name, f"{c.multiprocessors}", f"{c.clock:g}", f"{c.tflops:.1f}", f"{2 * c.tflops:.1f}", f"{c.tops:.1f}",
             f"{c.bandwidth:g}")
            for name, c in CARDS.items()
        ),
    )


def least(case: dict[str, Any]) -> str:
    """The least times of a case by kind of operation."""
    names = list(case["cards"])
    rows = []
    for kind, work in sorted(case["kinds"].items(), key=lambda item: -item[1]["gflop"]):
        times = [_ms(case["cards"][name], kind) for name in names]
        rows.append((kind, f"{work['nodes']}", f"{work['gflop']:.1f}", f"{work['gb']:.2f}", *times))
    sums = [[sum(c[way].values()) for way in _WAYS] for c in case["cards"].values()]
    totals = [f"**{exact:.1f}** / " + " / ".join(f"{ms:.1f}" for ms in others) for exact, *others in sums]
    return _table(("operations", "nodes", "GFLOP", "GB", *names), [*rows, ("**all**", "", "", "", *totals)])


def _ms(times: dict[str, dict[str, float]], kind: str) -> str:
    found = [times[way][kind] for way in _WAYS]
    return f"{found[0]:.2f}" if len(set(found)) == 1 else " / ".join(f"{ms:.2f}" for ms in found)


def kernels(rows: Sequence[dict[str, Any]]) -> str:
    """The main loops."""
    head = (
        "kernel", "for", "card", "instructions", "tensor cores: sums in fp32", "in fp16", "int8", "exponentials",
        "ldmatrix", "clocks", "useful products", "at most of the tensor cores' rate",
    )  # fmt: skip
    return _table(
        head,
        (
            (
                f"`{r['kernel']}`", r["what"], f"{r['capability'] / 10:.1f}", f"{r['instructions']}",
                f"{r['sums_in_float32']}", f"{r['sums_in_float16']}", f"{r['integers']}", f"{r['special']}",
                f"{r['ldmatrix']}",
                f"{r['clocks']}", f"{r['useful']:.0%}".replace("%", " %"), f"{r['at_most']:.0%}".replace("%", " %"),
            )
            for r in rows
        ),
    )  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """All tables."""
    parts = [cards()]
    for case in result["cases"]:
        name, _, size = case["case"].partition(":")
        parts += [f"### {MODELS[name]}, {size.replace('x', '×')}", least(case)]
    return "\n\n".join([*parts, "### The kernels on tensor cores", kernels(result["kernels"])])


def write(result: dict[str, Any], page: Path = PAGE) -> None:
    """Put the tables between the marks."""
    text = page.read_text(encoding="utf-8")
    page.write_text(marks.replaced(text, BEGIN, END, render(result)), encoding="utf-8")
