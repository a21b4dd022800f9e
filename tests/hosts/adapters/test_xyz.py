"""The axes of the X/Y/Z plot, on lists of axes as both hosts have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfast_ext.hosts import xyz
from sfast_ext.report import Report
from sfast_ext.ui import settings, settings_table


class A1111Axis:
    def __init__(self, label, type, apply, format_value=None, confirm=None, cost=0.0, choices=None, prepare=None):
        self.label, self.type, self.apply, self.choices = label, type, apply, choices


class SDNextAxis:
    def __init__(self, label, tipe, apply, fmt=None, confirm=None, cost=0.0, choices=None):
        self.label, self.type, self.apply, self.choices = label, tipe, apply, choices


@pytest.mark.parametrize("axis", [A1111Axis, SDNextAxis])
def test_each_axis_overrides_its_setting_for_one_image(axis):
    grid = SimpleNamespace(AxisOption=axis, axis_options=[axis("Nothing", str, None)])
    xyz.add_axes(grid)
    xyz.add_axes(grid)
    assert [option.label for option in grid.axis_options] == ["Nothing", *xyz.AXES]
    for option in grid.axis_options[1:]:
        axis = xyz.AXES[option.label]
        # hosts offer what `choices` gives, and turn what is written into `type`
        written = option.choices() if option.choices else {int: ["512"], float: ["0.05"]}[option.type]
        for text in (*written, f" {written[0]} "):
            # SD.Next's grid has it so
            p = SimpleNamespace(override_settings={}, override_settings_restore_afterwards=False)
            option.apply(p, option.type(text), None)
            ((key, value),) = p.override_settings.items()
            assert key == axis.key and p.override_settings_restore_afterwards
            # it is a value that the setting takes
            report = Report()
            opts = SimpleNamespace(**{key: value})
            settings.config_from(opts, report)
            assert not report.as_dict()["events"], (key, value)


def test_a_switch_is_a_switch():
    axis = xyz.AXES["[Stable Fast] enabled"]
    for text, value in (("True", True), ("False", False), ("true", True)):
        assert xyz.value_of(axis, text) is value


def test_each_axis_is_a_setting():
    assert {axis.key for axis in xyz.AXES.values()} <= set(settings_table.KEYS)
