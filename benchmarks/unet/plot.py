"""The plot of docs/measurements.md: a group of bars for each case, the ways to run it beneath each other. Plain SVG."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from benchmarks.unet.run import case_of

# way, name, colour: told apart without colour by their order
BARS = [
    ("sfast", "Stable Fast", "#1a7f37"),
    ("torch-compile", "torch.compile", "#0969da"),
    ("cudagraph", "PyTorch in a CUDA graph", "#9a6700"),
    ("eager", "PyTorch", "#6e7781"),
]
WIDTH, LEFT, RIGHT, TOP = 860, 200, 90, 56
BAR, GAP, BETWEEN = 11, 2, 14


def bars(result: dict[str, Any]) -> str:
    """Each case on its own scale, the slowest way at full length; a line where the arithmetic limit is."""
    cases: dict[Any, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row.get("ms_p50"):
            cases.setdefault(case_of(row), {})[row["engine"]] = row
    parts = _legend()
    y = TOP
    for case, rows in cases.items():
        height = len(BARS) * (BAR + GAP) - GAP
        scale = (WIDTH - LEFT - RIGHT) / max(row["ms_p50"] for row in rows.values())
        title = f"{case.model}, {case.width}×{case.height}" + (f", {case.images} images" if case.images > 1 else "")
        parts.append(_text(LEFT - 8, y + height / 2 + 4, title, anchor="end"))
        limit = next((row["limit_ms"] for row in rows.values() if row.get("limit_ms")), None)
        for place, (engine, _, colour) in enumerate(BARS):
            top = y + place * (BAR + GAP)
            if engine not in rows:
                parts.append(_text(LEFT + 4, top + BAR - 2, "–"))
                continue
            length = rows[engine]["ms_p50"] * scale
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(_text(LEFT + length + 5, top + BAR - 2, f"{rows[engine]['ms_p50']:.2f} ms", size=10))
        if limit is not None:
            x = LEFT + limit * scale
            parts.append(f'<path d="M{x:.1f} {y - 3}V{y + height + 3}" stroke="#cf222e" stroke-width="1.5"/>')
        y += height + BETWEEN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    style = 'font-family="system-ui, sans-serif" fill="#1f2328"'
    return "\n".join([f"{head} {style}>", f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *parts, "</svg>\n"])


def _legend() -> list[str]:
    parts = [_text(12, 18, "Time of one UNet call, each case on its own scale; shorter is faster")]
    x = 12.0
    for _, name, colour in BARS:
        parts.append(f'<rect x="{x}" y="30" width="{BAR}" height="{BAR}" fill="{colour}"/>')
        parts.append(_text(x + BAR + 5, 40, name))
        x += 40 + 7 * len(name)
    parts.append(f'<path d="M{x:.1f} 28V44" stroke="#cf222e" stroke-width="1.5"/>')
    parts.append(_text(x + 6, 40, "arithmetic limit"))
    return parts


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
