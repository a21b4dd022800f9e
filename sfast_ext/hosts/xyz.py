"""Axes of the hosts' X/Y/Z plot, to compare pictures and times under different settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sfast_ext.ui import settings_table


class Axis(NamedTuple):
    """A setting of pictures' own. `kind` makes its value of what the user writes."""

    key: str
    kind: Callable[[str], Any]
    choices: tuple[str, ...] | None


def _switch(text: str) -> bool:
    return text.lower() == "true"


_ON_OFF = ("True", "False")
AXES = {
    "[Stable Fast] enabled": Axis("sfast_enabled", _switch, _ON_OFF),
    "[Stable Fast] preset": Axis("sfast_preset", str, settings_table.PRESET.choices),
    "[Stable Fast] VAE": Axis("sfast_vae", _switch, _ON_OFF),
    "[Stable Fast] faster sums": Axis("sfast_faster_sums", _switch, _ON_OFF),
    "[Stable Fast] CUDA graphs": Axis("sfast_cuda_graphs", _switch, _ON_OFF),
    "[Stable Fast] Triton kernels": Axis("sfast_triton", _switch, _ON_OFF),
    "[Stable Fast] GPU memory, MB": Axis("sfast_graph_memory_mb", int, None),
    "[Stable Fast] comparison": Axis("sfast_check", str, tuple(settings_table.CHECK_LABELS)),
    "[Stable Fast] tolerance": Axis("sfast_tolerance", float, None),
}
"""By label, the settings that change speed, rounding or which plans are used."""


def add_axes(grid: Any) -> None:
    """Add the axes to the host's plot. May be called again.

    Args:
        grid: the host's module that has `AxisOption` and the list `axis_options`.
    """
    known = {option.label for option in grid.axis_options}
    for label, axis in AXES.items():
        if label not in known:
            kind = axis.kind if axis.choices is None else str
            grid.axis_options.append(grid.AxisOption(label, kind, _override(axis), choices=_choices(axis)))


def _choices(axis: Axis) -> Callable[[], list[str]] | None:
    choices = axis.choices
    return None if choices is None else lambda: list(choices)


def _override(axis: Axis) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, x: Any, _values: Any) -> None:
        # of this picture alone, as a request's own override_settings
        p.override_settings[axis.key] = axis.kind(str(x).strip())
        # SD.Next's grid leaves the last picture's settings as they are, but for those that it knows
        p.override_settings_restore_afterwards = True

    return apply
