"""The axes of the X/Y/Z plot, on lists of axes as both hosts have them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from sfast_ext.hosts import xyz
from sfast_ext.report import Report
from sfast_ext.ui import settings, settings_table


class A1111Axis:
    def __init__(self, label, type, apply, format_value=None, confirm=None, cost=0.0, choices=None, prepare=None):
        self.label, self.type, self.apply, self.choices = label, type, apply, choices
        self.confirm = confirm


class SDNextAxis:
    def __init__(self, label, tipe, apply, fmt=None, confirm=None, cost=0.0, choices=None):
        self.label, self.type, self.apply, self.choices = label, tipe, apply, choices
        self.confirm = confirm

    def __repr__(self):
        return f"AxisOption({self.label}, type={self.type.__name__})"


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
        option.confirm(None, [option.type(text) for text in written])
        assert repr(option)
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


BY_LABEL = {label.removeprefix("[Stable Fast] "): label for label in xyz.AXES}
REFUSED = [
    ("enabled", "maybe"), ("enabled", ""), ("enabled", "2"), ("VAE", "tru"), ("faster sums", "nan"), ("8 bits", "8"),
    ("GPU memory, MB", "nan"), ("GPU memory, MB", "-5"), ("GPU memory, MB", "inf"), ("GPU memory, MB", "512.5"),
    ("GPU memory, MB", "much"), ("GPU memory, MB", ""), ("tolerance", "nan"), ("tolerance", "-5"), ("tolerance", "0"),
    ("tolerance", "-inf"), ("tolerance", "maybe"), ("comparison", "sometimes"), ("comparison", ""),
    ("preset", "fastest"), ("preset", "details change)"), ("preset", "s"), ("comparison", "nan"),
]  # fmt: skip


@pytest.mark.parametrize("made", [A1111Axis, SDNextAxis])
@pytest.mark.parametrize(("label", "value"), REFUSED)
def test_a_value_that_is_none_is_refused_with_the_valid_ones(made, label, value):
    grid = SimpleNamespace(AxisOption=made, axis_options=[])
    xyz.add_axes(grid)
    option = next(each for each in grid.axis_options if each.label == BY_LABEL[label])
    valid = xyz.AXES[option.label].valid
    # as a host does with what is written, and with what it made of it by itself
    for check in (lambda: option.confirm(None, [option.type(value)]), lambda: option.confirm(None, [value])):
        with pytest.raises(RuntimeError) as refused:
            check()
        assert valid in str(refused.value) and option.label in str(refused.value)
    # SD.Next drops what it cannot read
    with pytest.raises(RuntimeError, match="has no value"):
        option.confirm(None, [])
    # a request may have an axis without these checks
    p = SimpleNamespace(override_settings={})
    with pytest.raises(ValueError, match="Valid"):
        option.apply(p, value, None)
    assert p.override_settings == {}


@pytest.mark.parametrize(
    ("label", "written", "value"),
    [
        ("enabled", "off", False), ("8 bits", " On ", True), ("VAE", "yes", True), ("GPU memory, MB", "0", 0),
        ("GPU memory, MB", 512.0, 512), ("tolerance", 0.05, 0.05), ("comparison", "First", "first use"),
        ("preset", "8 bits", "8 bits (faster, details change)"), ("preset", "SMALL CARD", "small card"),
        ("preset", "Same picture", "same image"),
    ],
)  # fmt: skip
def test_values_as_people_write_them(label, written, value):
    assert xyz.value_of(xyz.AXES[BY_LABEL[label]], written) == value


def test_a_host_knows_by_the_type_that_ranges_may_be_written():
    grid = SimpleNamespace(AxisOption=A1111Axis, axis_options=[])
    xyz.add_axes(grid)
    types = {option.label.removeprefix("[Stable Fast] "): option.type for option in grid.axis_options}
    # the host compares so
    assert types["GPU memory, MB"] == int and types["tolerance"] == float  # noqa: E721
    assert types["enabled"] == str and types["enabled"] != int and types["preset"] != float  # noqa: E721
    assert types["GPU memory, MB"]("512") == 512 and types["tolerance"](0.5) == 0.5


def test_copies_of_a_request_keep_their_own_settings():
    p = SimpleNamespace(override_settings={"other": 1})
    cells = []
    for value in ("True", "False"):
        cell = copy.copy(p)
        xyz._Values("x", xyz.AXES["[Stable Fast] 8 bits"]).apply(cell, value, None)
        cells.append(cell)
    assert [cell.override_settings for cell in cells] == [
        {"other": 1, "sfast_eight_bits": True}, {"other": 1, "sfast_eight_bits": False},
    ]  # fmt: skip
    assert p.override_settings == {"other": 1}
