"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def significant(value: float, digits: int = 5) -> float:
    """A number rounded to so many digits, however small it is."""
    return float(f"{value:.{digits}g}")


def number(value: float | None, digits: int = 1) -> str:
    """A number with so many decimals, a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"
