"""Axes of the hosts' X/Y/Z plot, to compare images and times with different settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfast_ext.ui import settings
from sfast_ext.ui.settings_table import ALL, Setting, named_now

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
    "[Stable Fast] text encoders": _BY_KEY["sfast_text_encoders"],
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
            axis = _Values(label, setting)
            made = grid.AxisOption(label, axis, axis.apply, confirm=axis.confirm, choices=axis.choices)
            grid.axis_options.append(made)


def value_of(setting: Setting, written: Any) -> Any:
    """The value of a setting that a user writes, or chooses, in the plot. Of choices the beginning is enough.

    Raises:
        ValueError: it is none; the message names the valid ones.
    """
    text = str(written).strip()
    value: Any
    if setting.choices:
        value = _word(setting, named_now(setting.key, text.lower()))
    elif setting.kind is bool:
        value = settings.SWITCHED.get(text.lower())
    else:
        value = _number(setting, text)
    if value is None or not settings.accepts(setting, value):
        raise ValueError(f"{text!r} is no value of {setting.label!r}. Valid: {setting.valid}")
    return value


def _word(setting: Setting, text: str) -> str | None:
    exact = [each for each in setting.choices if each.lower() == text.lower()]
    found = exact or [each for each in setting.choices if text and each.lower().startswith(text.lower())]
    return found[0] if len(found) == 1 else None


def _number(setting: Setting, text: str) -> float | int | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if setting.kind is not int:
        return number
    return int(number) if number.is_integer() else None


class _Values:
    """The values of an axis, as a host's plot asks for them.

    It is the type of the axis: it makes values of texts, and equals `int` or `float`, by which a host knows that ranges
    such as 1-5 may be written.
    """

    def __init__(self, label: str, setting: Setting) -> None:
        self._label, self._setting = label, setting
        self._kind = str if setting.choices or setting.kind is bool else setting.kind
        self.__name__ = self._kind.__name__

    def __eq__(self, other: object) -> bool:
        return self is other or self._kind is other

    def __hash__(self) -> int:
        return hash(self._kind)

    def __call__(self, written: Any) -> Any:
        try:
            value = value_of(self._setting, written)
        except ValueError as exc:
            # as the hosts' own axes do
            raise RuntimeError(f"{self._label}: {exc}") from None
        return str(value) if self._kind is str else value

    def confirm(self, _p: Any, values: list[Any]) -> None:
        """Asked by hosts before the first image.

        Raises:
            RuntimeError: a value is not valid, or there is none: hosts drop what they cannot read.
        """
        if not values:
            raise RuntimeError(f"{self._label} has no value. Valid: {self._setting.valid}")
        for value in values:
            self(value)

    @property
    def choices(self) -> Callable[[], list[str]] | None:
        """What the plot offers; None for a number."""
        found = ("True", "False") if self._setting.kind is bool else self._setting.choices
        return (lambda: list(found)) if found else None

    def apply(self, p: Any, x: Any, _values: Any) -> None:
        """Let a value count for one image, as a request's own `override_settings`."""
        # another dictionary: a host copies its request for each image, and all copies have this one
        p.override_settings = {**(p.override_settings or {}), self._setting.key: value_of(self._setting, x)}
        # SD.Next's grid leaves the last image's settings as they are, except for those that it knows
        p.override_settings_restore_afterwards = True
