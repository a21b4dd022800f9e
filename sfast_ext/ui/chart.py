"""A measurement as an image, next to the one before it of the same model and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GREY = "#808080"
"""Can be read on a light and on a dark page: the image has no background."""
COLOURS = ("#9a9a9a", "#d9650a", "#f0b384")
"""Of the original, of Stable Fast as everywhere on the page, and of it in an earlier measurement."""


ORIGINAL = "original"
"""The name of the first series."""


def figure(measurements: Sequence[Mapping[str, Any]]) -> Any:
    """A bar chart of the last measurement, for gradio's Plot; None if there is none, or no matplotlib.

    Args:
        measurements: oldest first.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    series = bars(measurements)
    if not series:
        return None
    labels = list(next(iter(series.values())))
    high = 0.8 / len(series)
    image = Figure(figsize=(8.0, 1.2 + 0.25 * len(series) + 0.35 * len(series) * len(labels)), facecolor="none")
    axes = image.add_subplot(facecolor="none")
    for number, (name, values) in enumerate(series.items()):
        places = [place + number * high for place in range(len(labels))]
        drawn = axes.barh(places, [values[label] for label in labels], high, label=name, color=COLOURS[number])
        times = [f"{values[label]:.1f}{_times(series[ORIGINAL][label], values[label], number)}" for label in labels]
        axes.bar_label(drawn, times, padding=3, color=GREY)
    axes.set_yticks([place + high * (len(series) - 1) / 2 for place in range(len(labels))], labels)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("milliseconds a step", color=GREY)
    axes.tick_params(colors=GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "left")
        spine.set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1)
    image.set_layout_engine("tight")
    return image


def bars(measurements: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds by size, by series: the original, the accelerated model, and the latter in the measurement before,
    of the same kind of model on the same card, if it has the same sizes."""
    if not measurements:
        return {}
    last = measurements[-1]
    rows = {row["label"]: row for row in last["rows"] if row.get("ms_after")}
    if not rows:
        return {}
    series = {
        ORIGINAL: {label: row["ms_before"] for label, row in rows.items()},
        f"Stable Fast, {_of(last)}": {label: row["ms_after"] for label, row in rows.items()},
    }
    for earlier in reversed(measurements[:-1]):
        known = {row["label"]: row["ms_after"] for row in earlier["rows"] if row.get("ms_after")}
        alike = all(earlier.get(name) == last.get(name) for name in ("model", "gpu"))
        if alike and rows.keys() <= known.keys():
            series[f"Stable Fast, {_of(earlier)}"] = {label: known[label] for label in rows}
            break
    return series


def _times(before: float, after: float, series: int) -> str:
    """How many times faster, next to all bars but the original's."""
    return "" if series == 0 or not after else f"   {before / after:.1f}x"


def _of(measurement: Mapping[str, Any]) -> str:
    driver = measurement.get("driver")
    versions = [f"torch {measurement.get('torch')}", *([f"driver {driver}"] if driver else [])]
    return ", ".join([str(measurement.get("when", ""))[:16].replace("T", " "), *versions])
