from __future__ import annotations

import logging
import re
import sys
import types
from dataclasses import fields
from typing import Any

import pytest

from sfast_ext.config import BOUNDS, Config
from sfast_ext.report import Report
from sfast_ext.ui import settings, settings_table
from sfast_ext.ui.settings_table import HostConfig


class A1111OptionInfo:
    """What AUTOMATIC1111's does with what it is given."""

    def __init__(self, default=None, label="", component=None, component_args=None, section=None):
        self.default, self.label, self.component, self.component_args = default, label, component, component_args
        self.section = section
        self.comment_after = ""

    def info(self, info):
        self.comment_after += f"<span class='info'>({info})</span>"
        return self


class SDNextOptionInfo(A1111OptionInfo):
    """SD.Next's has .info() too, but its settings page does not show it."""

    def validate(self, opt, value):
        return True


class Options:
    """`shared.opts` as both hosts have it."""

    def __init__(self, **data: Any) -> None:
        self.data = data
        self.data_labels: dict[str, Any] = {}

    def __getattr__(self, item):
        if item in self.data:
            return self.data[item]
        if item in self.data_labels:
            return self.data_labels[item].default
        raise AttributeError(item)

    def add_option(self, key, info):
        self.data_labels[key] = info


@pytest.fixture(autouse=True)
def gradio(monkeypatch):
    stand_in = types.ModuleType("gradio")
    for name in ("Checkbox", "Slider", "Radio", "HTML"):
        setattr(stand_in, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "gradio", stand_in)
    monkeypatch.setattr(settings, "_announced", {})
    monkeypatch.setattr(settings, "_last_valid", {})
    settings._total_memory.cache_clear()
    return stand_in


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same defaults on every machine."""
    monkeypatch.setattr(settings.environment, "gpu_memory", lambda _=None: None)


def test_every_field_of_the_table_is_one_of_the_configuration():
    assert len(set(settings_table.KEYS)) == len(settings_table.SETTINGS) + 2 == 16
    for setting in settings_table.SETTINGS:
        assert setting.key == f"sfast_{setting.field}"
        assert hasattr(HostConfig(), setting.field)
        assert len(setting.info) > 40
        assert setting.group in settings_table.HEADINGS


def test_the_core_has_no_setting_of_a_webui():
    of_the_host = {field.name for field in fields(HostConfig)} - {field.name for field in fields(Config)}
    assert of_the_host == {"vae", "text_encoders", "png", "ahead"}


@pytest.mark.parametrize("setting", [s for s in settings_table.SETTINGS if s.slider], ids=lambda s: s.field)
def test_a_number_has_the_bounds_of_the_configuration_everywhere(setting):
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    shown = opts.data_labels[setting.key].component_args
    bounds = BOUNDS[setting.field]
    below = bounds.minimum if bounds.excluded else bounds.minimum - 1
    assert shown["minimum"] == (0.001 if bounds.excluded else bounds.minimum) and setting.valid == bounds.words
    for value in (shown["minimum"], shown["maximum"]):
        assert settings.accepts(setting, value) and Config(**{setting.field: setting.kind(value)})
    for value in (below, below - 1, float("nan")):
        assert not settings.accepts(setting, value)
    for value in (below, below - 1):
        with pytest.raises(ValueError, match=re.escape(f"{setting.field} must be {bounds.words}; it is {value}")):
            Config(**{setting.field: value})


def test_bounds_that_no_setting_has_hold_as_well():
    for field in set(BOUNDS) - {setting.field for setting in settings_table.SETTINGS}:
        with pytest.raises(ValueError, match=field):
            Config(**{field: 0})
    for value in (float("nan"), -1.0):
        with pytest.raises(ValueError, match="rare_gain"):
            Config(rare_gain=value)
    assert Config(rare_gain=float("inf")).rare_gain > 0 and Config(graph_memory_mb=None) == Config()
    with pytest.raises(TypeError):
        Config(max_graphs=None)


def test_groups_follow_each_other_each_below_its_heading():
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    assert tuple(opts.data_labels) == (
        "sfast_intro",
        "sfast_enabled",
        "sfast_preset",
        "sfast_vae",
        "sfast_text_encoders",
        "sfast_png",
        "sfast_ahead",
        "sfast_faster_sums",
        "sfast_eight_bits",
        "sfast_memory_heading",
        "sfast_graph_memory_mb",
        "sfast_max_graphs",
        "sfast_expert_heading",
        "sfast_cuda_graphs",
        "sfast_triton",
        "sfast_check",
        "sfast_tolerance",
        "sfast_allow_cpu",
        "sfast_log_level",
    )


def test_the_page_says_first_what_it_does_and_where_help_is():
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    first = next(iter(opts.data_labels.values()))
    assert "faster" in first.default and 'href="./sfast/v1/help"' in first.default


def test_the_search_of_settings_finds_the_switch_by_fast():
    # AUTOMATIC1111 searches the text of each option as it is shown
    switch = settings_table.SETTINGS[0]
    assert switch.key == "sfast_enabled" and "fast" in f"{switch.label} {switch.info}".lower()
    assert "fast" in settings_table.INTRO.lower()


def test_what_an_image_maker_reads_first_has_no_word_of_engineers():
    first = [s for s in settings_table.SETTINGS if s.group != settings_table.EXPERT]
    words = " ".join([settings_table.INTRO, *(f"{s.label} {s.info}" for s in first)]).lower()
    assert not [word for word in ("graph", "plan", "forward", "kernel", "tensor", "unet") if word in words]


def test_registered_settings_show_their_cost_in_automatic1111(gradio):
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    settings.register(opts, A1111OptionInfo)
    for setting in settings_table.ALL:
        option = opts.data_labels[setting.key]
        assert option.section == ("stable_fast", "Stable Fast")
        assert option.comment_after.count(setting.info) == 1
        assert "info" not in option.component_args
    assert opts.data_labels["sfast_check"].component is gradio.Radio
    assert opts.data_labels["sfast_check"].component_args["choices"] == ["first use", "always", "never"]
    assert opts.data_labels["sfast_tolerance"].component is gradio.Slider


class Categories:
    def __init__(self):
        self.labels = {}

    def register_category(self, key, label):
        self.labels[key] = label
        return key


class OptionHTML(A1111OptionInfo):
    """AUTOMATIC1111's: its text is its default, and it is not saved."""

    def __init__(self, text):
        super().__init__(text)
        self.do_not_save = True


def test_automatic1111_has_a_category_for_them_and_saves_no_heading(monkeypatch):
    categories = Categories()
    monkeypatch.setattr(sys.modules[__name__], "categories", categories, raising=False)
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    assert list(categories.labels.values()) == ["Acceleration"]
    assert {option.category_id for option in opts.data_labels.values()} == set(categories.labels)
    assert all(opts.data_labels[key].do_not_save for key, _ in settings_table.HEADINGS.values())


def test_sdnext_has_headings_of_its_own_kind(gradio, monkeypatch):
    monkeypatch.delattr(sys.modules[__name__], "OptionHTML")
    opts = Options()
    settings.register(opts, SDNextOptionInfo)
    heading = opts.data_labels["sfast_expert_heading"]
    assert heading.component is gradio.HTML and heading.label == "" and heading.section == settings.SECTION


@pytest.mark.parametrize(("gib", "greatest"), [(None, 32768), (8, 8192), (7.79, 7936), (80, 81920)])
def test_no_more_memory_can_be_chosen_than_the_gpu_has(gib, greatest, monkeypatch):
    monkeypatch.setattr(settings.environment, "gpu_memory", lambda _=None: None if gib is None else int(gib * 2**30))
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    assert opts.data_labels["sfast_graph_memory_mb"].component_args["maximum"] == greatest


def test_registered_settings_show_their_cost_in_sdnext():
    opts = Options()
    settings.register(opts, SDNextOptionInfo)
    for setting in settings_table.SETTINGS:
        assert opts.data_labels[setting.key].component_args["info"] == setting.info


def test_registered_defaults_read_back_as_the_default_configuration():
    opts = Options()
    settings.register(opts, A1111OptionInfo)
    # None in the default: as much as fits the GPU, which the page shows as a number
    assert settings.config_from(opts) == HostConfig(graph_memory_mb=4096)


def test_options_that_are_not_registered_yet_have_their_default():
    assert settings.config_from(Options()) == HostConfig()
    assert settings.config_from(object()) == HostConfig()


def test_stored_options_that_are_no_settings_are_ignored(caplog):
    report = Report()
    for value in (True, False, "none that a checkbox has"):
        assert settings.config_from(Options(sfast_native=value), report) == HostConfig()
    assert not report.as_dict()["events"] and not caplog.records


def test_values_of_the_user_arrive():
    opts = Options(
        sfast_enabled=False,
        sfast_cuda_graphs=False,
        sfast_graph_memory_mb=1024.0,
        sfast_max_graphs=3.0,
        sfast_triton=False,
        sfast_check="always",
        sfast_tolerance=0.005,
        sfast_allow_cpu=True,
    )
    config = settings.config_from(opts)
    assert config == HostConfig(
        enabled=False,
        cuda_graphs=False,
        graph_memory_mb=1024,
        max_graphs=3,
        triton=False,
        check="always",
        tolerance=0.005,
        allow_cpu=True,
    )
    assert isinstance(config.graph_memory_mb, int) and isinstance(config.max_graphs, int)


BAD = [
    ("sfast_enabled", "perhaps"),
    ("sfast_enabled", []),
    ("sfast_enabled", 2),
    ("sfast_graph_memory_mb", -1),
    ("sfast_graph_memory_mb", "much"),
    ("sfast_graph_memory_mb", float("inf")),
    ("sfast_graph_memory_mb", True),
    ("sfast_max_graphs", 0),
    ("sfast_max_graphs", 10**400),
    ("sfast_check", "sometimes"),
    ("sfast_check", ["always"]),
    ("sfast_tolerance", 0),
    ("sfast_tolerance", float("nan")),
    ("sfast_tolerance", {}),
]
GOOD = {
    "sfast_enabled": (False, "true or false"),
    "sfast_graph_memory_mb": (512, "a number of MB, 0 (no limit) or more"),
    "sfast_max_graphs": (3, "a number, 1 or more"),
    "sfast_check": ("always", "first use, always, never"),
    "sfast_tolerance": (0.01, "a number above 0"),
}


def said(report):
    return [event["message"] for event in report.as_dict()["events"]]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_value_that_cannot_be_becomes_the_default_and_is_said_once(key, value):
    report = Report()
    opts = Options(**{key: value, "sfast_allow_cpu": True})
    for _ in range(3):
        assert settings.config_from(opts, report) == HostConfig(allow_cpu=True)
    (message,) = said(report)
    assert key in message and repr(value)[:300] in message


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_value_that_cannot_be_leaves_the_last_good_one(key, value):
    report, opts = Report(), Options()
    good, valid = GOOD[key]
    for _ in range(2):
        opts.data[key] = good
        chosen = settings.config_from(opts, report)
        assert chosen != HostConfig()
        opts.data[key] = value
        for _ in range(2):
            assert settings.config_from(opts, report) == chosen
    # said again, as it was good in between
    first, again = said(report)
    label = next(setting.label for setting in settings_table.SETTINGS if setting.key == key)
    assert first == again and first.startswith(f"{key} ({label}) = ")
    if len(repr(value)) < 100:
        assert first.endswith(f"= {value!r} is not valid; {good!r} stays in use. Valid: {valid}")


@pytest.mark.parametrize(
    ("text", "meant"),
    [("false", False), ("False", False), (" OFF ", False), ("no", False), ("0", False), ("true", True), ("On", True)],
)
@pytest.mark.parametrize("key", ["sfast_enabled", "sfast_allow_cpu"])
def test_text_that_says_true_or_false_is_read_as_it_is_meant(key, text, meant):
    report = Report()
    config = settings.config_from(Options(**{key: text}), report)
    assert getattr(config, key.removeprefix("sfast_")) is meant and said(report) == []


def test_the_level_of_the_log_is_one_of_three_and_a_wrong_one_is_named():
    report = Report()
    assert settings.log_level(Options(), report) == logging.INFO
    for word, level in settings_table.LEVELS.items():
        assert settings.log_level(Options(sfast_log_level=word), report) == level
    for value in ("loud", 10, ["debug"]):
        assert settings.log_level(Options(sfast_log_level=value), report) == logging.DEBUG
    assert len(said(report)) == 3 and "sfast_log_level" in said(report)[0] and "'debug' stays" in said(report)[0]


def test_without_a_report_it_goes_to_the_log(caplog):
    with caplog.at_level(logging.WARNING, logger="sfast_ext"):
        settings.config_from(Options(sfast_max_graphs=-4))
    assert "sfast_max_graphs" in caplog.text


@pytest.mark.parametrize(("gib", "shown"), [(None, 4096), (4, 1024), (6, 1536), (7.79, 1792), (12, 3072), (24, 4096)])
def test_the_budget_for_graphs_follows_the_gpu(gib, shown, monkeypatch):
    monkeypatch.setattr(settings.environment, "gpu_memory", lambda _=None: None if gib is None else int(gib * 2**30))
    setting = next(s for s in settings_table.SETTINGS if s.field == "graph_memory_mb")
    assert settings.default_of(setting) == shown


@pytest.mark.parametrize(
    ("gigabytes", "chosen", "kept"),
    [
        (None, {}, 512),
        (4, {}, 512),
        (8, {}, 1024),
        (24, {}, 3072),
        (1, {}, 256),
        (8, {"sfast_graph_memory_mb": 512}, 512),
    ],
)
def test_a_small_card_has_limits_above_what_is_set(monkeypatch, gigabytes, chosen, kept):
    monkeypatch.setattr(settings.environment, "gpu_memory", lambda _=None: gigabytes and gigabytes << 30)
    config = settings.config_from(Options(sfast_preset="small card", **chosen))
    assert (config.graph_memory_mb, config.max_graphs) == (kept, 4)
    # no limit is one there, and a lower number of sizes stays
    config = settings.config_from(Options(sfast_preset="small card", sfast_graph_memory_mb=0, sfast_max_graphs=2))
    assert config.graph_memory_mb > 0 and config.max_graphs == 2


def test_presets_that_change_pixels_are_named_in_the_infotext():
    for preset in ("same image", "small card"):
        assert settings.infotext(settings.config_from(Options(sfast_preset=preset))) == {}
    config = settings.config_from(Options(sfast_preset="faster sums on GeForce"))
    assert config == HostConfig(faster_sums=True)
    assert settings.infotext(config) == {"Stable Fast faster sums": True}
    config = settings.config_from(Options(sfast_preset="8 bits (faster, details change)"))
    assert config == HostConfig(eight_bits=True) and not config.builds_like(HostConfig())
    assert settings.infotext(config) == {"Stable Fast 8 bits": True}
    both = settings.config_from(Options(sfast_preset="faster sums on GeForce", sfast_eight_bits=True))
    assert settings.infotext(both) == {"Stable Fast faster sums": True, "Stable Fast 8 bits": True}
    assert settings.config_from(Options(sfast_preset="small card", sfast_eight_bits="on")).eight_bits
    assert settings.config_from(Options(sfast_preset="same image")) == HostConfig()
    report = Report()
    assert settings.config_from(Options(sfast_preset="faster"), report) == HostConfig()
    (event,) = report.as_dict()["events"]
    assert "sfast_preset" in event["message"] and "'same image' stays" in event["message"]


@pytest.mark.parametrize("option_info", [A1111OptionInfo, SDNextOptionInfo])
def test_a_choice_that_was_stored_by_its_former_name_is_shown_by_its_name(option_info):
    opts = Options(sfast_preset="same picture", sfast_check="always", sd_vae="same picture")
    for _ in range(2):
        settings.register(opts, option_info)
        assert opts.data == {"sfast_preset": "same image", "sfast_check": "always", "sd_vae": "same picture"}
    option = opts.data_labels["sfast_preset"]
    assert opts.sfast_preset in option.component_args["choices"] and option.default == "same image"


def test_no_setting_is_stored_that_was_not():
    opts = Options()
    settings.register(opts, SDNextOptionInfo)
    assert opts.data == {}


def test_former_names_of_choices_are_read_as_what_they_meant():
    report, preset = Report(), settings_table.PRESET
    assert settings.config_from(Options(sfast_preset="small card"), report).max_graphs == 4
    assert settings.config_from(Options(sfast_preset="same picture"), report) == HostConfig()
    assert said(report) == [] and settings.accepts(preset, "same picture")
    assert not settings.accepts(settings_table.LOG_LEVEL, "same picture")
    for (key, former), name in settings_table.FORMER.items():
        setting = next(each for each in settings_table.ALL if each.key == key)
        assert name in setting.choices and former not in setting.choices
