"""Axes of the hosts' X/Y/Z plot, to compare pictures and times with the extension on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AXES = {
    "[Stable Fast] enabled": "sfast_enabled",
    "[Stable Fast] CUDA graphs": "sfast_cuda_graphs",
    "[Stable Fast] Triton kernels": "sfast_triton",
}
"""Labels, and the settings that change speed or rounding; each is on or off."""


def add_axes(grid: Any) -> None:
    """Add the axes to the host's plot. May be called again.

    Args:
        grid: the host's module that has `AxisOption` and the list `axis_options`.
    """
    known = {option.label for option in grid.axis_options}
    for label, key in AXES.items():
        if label not in known:
            grid.axis_options.append(grid.AxisOption(label, str, _override(key), choices=lambda: ["True", "False"]))


def _override(key: str) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, x: Any, _values: Any) -> None:
        # of this picture alone, as a request's own override_settings
        p.override_settings[key] = str(x).strip().lower() == "true"

    return apply
