"""The axes of the X/Y/Z plot, on lists of axes as both hosts have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfast_ext.hosts import xyz
from sfast_ext.ui import settings


class A1111Axis:
    def __init__(self, label, type, apply, format_value=None, confirm=None, cost=0.0, choices=None, prepare=None):
        self.label, self.type, self.apply, self.choices = label, type, apply, choices


class SDNextAxis:
    def __init__(self, label, tipe, apply, fmt=None, confirm=None, cost=0.0, choices=None):
        self.label, self.type, self.apply, self.choices = label, tipe, apply, choices


@pytest.mark.parametrize("axis", [A1111Axis, SDNextAxis])
def test_each_axis_overrides_its_setting_for_one_picture(axis):
    grid = SimpleNamespace(AxisOption=axis, axis_options=[axis("Nothing", str, None)])
    xyz.add_axes(grid)
    xyz.add_axes(grid)
    assert [option.label for option in grid.axis_options] == ["Nothing", *xyz.AXES]
    for option in grid.axis_options[1:]:
        assert option.choices() == ["True", "False"] and option.type is str
        for text, value in (("True", True), ("False", False), (" true ", True)):
            p = SimpleNamespace(override_settings={})
            option.apply(p, text, None)
            assert p.override_settings == {xyz.AXES[option.label]: value}


def test_each_axis_is_a_setting():
    assert set(xyz.AXES.values()) <= set(settings.KEYS)
