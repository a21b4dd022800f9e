"""Axes of the hosts' X/Y/Z plot, to compare images and times with different settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfast_ext.ui.settings_table import ALL, Setting

_BY_KEY = {setting.key: setting for setting in ALL}
AXES = {
    "[Stable Fast] enabled": _BY_KEY["sfast_enabled"],
    "[Stable Fast] preset": _BY_KEY["sfast_preset"],
    "[Stable Fast] VAE": _BY_KEY["sfast_vae"],
    "[Stable Fast] faster sums": _BY_KEY["sfast_faster_sums"],
    "[Stable Fast] CUDA graphs": _BY_KEY["sfast_cuda_graphs"],
    "[Stable Fast] Triton kernels": _BY_KEY["sfast_triton"],
    "[Stable Fast] GPU memory, MB": _BY_KEY["sfast_graph_memory_mb"],
    "[Stable Fast] comparison": _BY_KEY["sfast_check"],
    "[Stable Fast] tolerance": _BY_KEY["sfast_tolerance"],
    "[Stable Fast] 8 bits": _BY_KEY["sfast_eight_bits"],
}
"""By label, the settings that change speed, rounding or which plans are used. Requests name an axis by its place in the
list, so the order stays."""


def add_axes(grid: Any) -> None:
    """Add the axes to the host's plot. May be called again.

    Args:
        grid: the host's module that has `AxisOption` and the list `axis_options`.
    """
    known = {option.label for option in grid.axis_options}
    for label, setting in AXES.items():
        if label not in known:
            choices = _choices(setting)
            kind = setting.kind if choices is None else str
            grid.axis_options.append(grid.AxisOption(label, kind, _override(setting), choices=choices))


def value_of(setting: Setting, text: str) -> Any:
    """The value of a setting that a user writes, or chooses, in the plot."""
    return text.lower() == "true" if setting.kind is bool else setting.kind(text)


def _choices(setting: Setting) -> Callable[[], list[str]] | None:
    choices = ("True", "False") if setting.kind is bool else setting.choices
    return (lambda: list(choices)) if choices else None


def _override(setting: Setting) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, x: Any, _values: Any) -> None:
        # of this image alone, as a request's own override_settings
        p.override_settings[setting.key] = value_of(setting, str(x).strip())
        # SD.Next's grid leaves the last image's settings as they are, except for those that it knows
        p.override_settings_restore_afterwards = True

    return apply
