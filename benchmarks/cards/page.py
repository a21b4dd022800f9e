"""docs/generated/cards.md: tables between marks; the words around them are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.cards.published import CARDS

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "cards.md"
BEGIN, END = "<!-- cards: begin -->", "<!-- cards: end -->"
_KINDS = ("linear", "convolution", "attention")
_WAYS = ("exact", "faster", "eight_bits", "both")
MODELS = {
    "sd15": "SD 1.5", "sdxl": "SDXL", "anima": "Anima, one image", "lumina2": "Lumina 2, one image",
    "z-image": "Z-Image, one image",
}  # fmt: skip


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
    """The least times of a case: all operations in each way, and of the exact way its kinds of operations."""
    kinds = [kind for kind in _KINDS if kind in case["kinds"]]
    rows = []
    for name, times in case["cards"].items():
        exact, *others = (f"{sum(times[way].values()):.1f}" for way in _WAYS)
        of_kinds = [times["exact"][kind] for kind in kinds]
        rest = sum(times["exact"].values()) - sum(of_kinds)
        rows.append((name, f"**{exact}**", *others, *(f"{ms:.1f}" for ms in (*of_kinds, rest))))
    of_exact = [f"exact: {kind}" for kind in (*kinds, "the rest")]
    return _table(("card, ms", "exact", "faster sums", "8 bits", "both", *of_exact), rows)


def kernels(rows: Sequence[dict[str, Any]]) -> str:
    """The main loops; a row for all cards on which one is the same."""
    head = (
        "kernel", "for", "card", "instructions", "tensor cores: fp32 / fp16 / int8", "exponentials", "ldmatrix",
        "clocks", "at most of the tensor cores' rate",
    )  # fmt: skip
    cards: dict[tuple[str, ...], list[str]] = {}
    for r in rows:
        told = (
            f"`{r['kernel']}`", r["what"], f"{r['instructions']}",
            f"{r['sums_in_float32']}/{r['sums_in_float16']}/{r['integers']}", f"{r['special']}", f"{r['ldmatrix']}",
            f"{r['clocks']}", f"{r['at_most']:.0%}".replace("%", " %"),
        )  # fmt: skip
        cards.setdefault(told, []).append(f"{r['capability'] / 10:.1f}")
    return _table(head, ((*told[:2], ", ".join(on), *told[2:]) for told, on in cards.items()))


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
