"""docs/generated/profile.md: tables between marks for each profile; the words around them are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from sfast_ext.tools.lib import ways

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "profile.md"
INTRODUCTION = """# Where the time of one UNet call goes

One replay of a plan's CUDA graph, measured by `python -m benchmarks.profile`.

- *Rate*: the FLOPs or bytes that the operations have to compute or move (each input read once, each output written
  once), divided by the time of their kernels.
- *Ceiling*: the rate of a large matrix product, or of a large copy, in the same process.
- *Least*: the time at those ceilings, for each operation the larger of the two. Data in the L2 cache may move faster.
- *Between kernels*: from the first kernel to the last, less the kernels, under the profiler. Where kernels overlap,
  times are those of a run node by node, each from the end of those in front of it, at a clock that stays high while
  the GPU waits for the CPU.
"""
KINDS = ("kind", "ms", "kernels", "GFLOP", "GB", "rate", "ceiling", "of the ceiling", "least, ms")
WORK = ("operation", "operands", "nodes", "ms", "rate", "of the ceiling", "least, ms")
KERNELS = ("kernel", "count", "ms", "for")
OPERATIONS, KERNEL_ROWS = 8, 10
LONGEST = 100


def title(found: dict[str, Any]) -> str:
    """The heading of one profile."""
    images = f", {found['images']} images" if found["images"] > 1 else ""
    return ", ".join([f"{found['model']}, {found['width']}×{found['height']}{images}", *ways.words_of(found)])


def section(found: dict[str, Any]) -> str:
    """The tables of one profile."""
    parts = [_summary(found)]
    parts.append(_table(KINDS, [_kind(row) for row in found["kinds"]]))
    parts.append("The operations that take longest:")
    parts.append(_table(WORK, [_operation(row) for row in found["operations"][:OPERATIONS]]))
    parts.append("The kernels that take longest:")
    parts.append(_table(KERNELS, [_kernel(row) for row in found["kernels"][:KERNEL_ROWS]]))
    return "\n\n".join(parts)


def write(profiles: Sequence[dict[str, Any]], page: Path = PAGE) -> None:
    """Put each profile between its marks; one that the page does not have comes last."""
    text = page.read_text(encoding="utf-8") if page.exists() else INTRODUCTION
    for found in profiles:
        begin, end = (f"<!-- profile {title(found)}: {which} -->" for which in ("begin", "end"))
        if begin not in text:
            text = f"{text.rstrip()}\n\n## {title(found)}\n\n{begin}\n{end}\n"
        text = marks.replaced(text, begin, end, section(found))
    page.write_text(text, encoding="utf-8")


def _summary(found: dict[str, Any]) -> str:
    launched = found["launched"]["by_a_replay"] or found["launched"]["by_nodes"]
    parts = [
        f"{found['gpu']}, torch {found['torch']}, Triton {found['triton']}, driver {found['driver']},",
        f"{found['commit']}.",
        f"A call takes {found['call_ms']:.2f} ms, a replay {found['replay_ms']:.2f};",
        f"{launched[0]} kernels and {launched[1]} copies by the driver.",
    ]
    if found.get("kernels_overlap"):
        alone = sum(row["ms"] for row in found["kinds"])
        parts.append(f"Kernels one after another {alone:.2f} ms; in a replay some begin before the one in front has")
        parts.append("ended.")
    elif found["gaps_ms"] is not None:
        parts.append(f"Kernels {found['kernels_ms']:.2f} ms, between kernels {found['gaps_ms']:.2f} ms.")
    return f"{' '.join(parts)} Times from {found['durations_from']}."


def _kind(row: dict[str, Any]) -> list[str]:
    if "gflop" not in row:
        return [row["kind"], f"{row['ms']:.3f}", str(row["kernels"]), *[""] * 6]
    return [
        row["kind"],
        f"{row['ms']:.3f}",
        f"{row['kernels']}" + (f" + {row['copies']} copies" if row["copies"] else ""),
        f"{row['gflop']:.1f}",
        f"{row['gb']:.3f}",
        *_rate(row),
        f"{row['least_ms']:.3f}",
    ]


def _rate(row: dict[str, Any]) -> list[str]:
    rate = f"{row['tflops']:.0f} TFLOP/s" if "TFLOP" in row["ceiling"] else f"{row['tb_s']:.2f} TB/s"
    return [rate, row["ceiling"], f"{100 * row['fraction_of_ceiling']:.0f} %"]


def _operation(row: dict[str, Any]) -> list[str]:
    rate, _, part = _rate(row)
    return [
        row["operation"],
        row["shapes"],
        str(row["nodes"]),
        f"{row['ms']:.3f}",
        rate,
        part,
        f"{row['least_ms']:.3f}",
    ]


def _kernel(row: dict[str, Any]) -> list[str]:
    name = row["name"] if len(row["name"]) <= LONGEST else f"{row['name'][: LONGEST - 1]}…"
    kinds = ", ".join(f"{kind} {count}" for kind, count in row["kinds"].items())
    return [f"`{name.replace('|', '¦').replace('`', ' ')}`", str(row["count"]), f"{row['ms']:.3f}", kinds]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
