"""Settings of one request by the hosts' `alwayson_scripts`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sfast_ext import hosts
from sfast_ext.config import Config
from sfast_ext.hosts import per_request
from sfast_ext.hosts.answers import Answers
from sfast_ext.hosts.eight_bits import EightBits
from sfast_ext.report import Report
from sfast_ext.ui import settings_table

VALUES = {
    "sfast_enabled": False, "sfast_preset": "small card", "sfast_faster_sums": True, "sfast_graph_memory_mb": 512,
    "sfast_eight_bits": True,
    "sfast_max_graphs": 4, "sfast_cuda_graphs": False, "sfast_triton": False, "sfast_check": "never",
    "sfast_tolerance": 0.05, "sfast_allow_cpu": True, "sfast_vae": False, "sfast_png": False,
    "sfast_text_encoders": False,
    "sfast_ahead": False, "sfast_log_level": "quiet",
}  # fmt: skip


def request(chosen, **overrides):
    p = SimpleNamespace(override_settings=overrides, extra_generation_params={})
    per_request.apply(p, chosen)
    return p


def test_every_setting_can_be_named():
    assert set(VALUES) == set(settings_table.KEYS)
    assert request(VALUES).override_settings == VALUES
    short = request({key.removeprefix("sfast_"): value for key, value in VALUES.items()})
    assert short.override_settings == VALUES and per_request.ignored(short) == []


@pytest.mark.parametrize(("chosen", "values"), [(None, {}), (True, {"sfast_enabled": True}), ({}, {})])
def test_a_switch_alone_and_nothing(chosen, values):
    p = request(chosen, sd_vae="other")
    assert p.override_settings == {"sd_vae": "other", **values} and per_request.ignored(p) == []


def test_a_choice_by_its_former_name_is_one():
    p = request({"preset": "same picture"})
    assert p.override_settings == {"sfast_preset": "same picture"} and per_request.ignored(p) == []


def test_a_host_without_overrides():
    p = SimpleNamespace(override_settings=None)
    per_request.apply(p, False)
    assert p.override_settings == {"sfast_enabled": False}


WRONG = [
    {"tolerence": 0.05}, {"tolerance": -1}, {"tolerance": "much"}, {"preset": "fast"}, {"check": 3}, {"sd_vae": "a"},
    {"max_graphs": True}, {"enabled": None}, {"": 1}, {"log_level": []}, ["enabled"], "no", 1.5,
]  # fmt: skip


@pytest.mark.parametrize("chosen", WRONG, ids=repr)
def test_what_is_no_setting_or_no_value_is_ignored_and_told(chosen):
    p = request(chosen)
    assert p.override_settings == {}
    (told,) = per_request.ignored(p)
    assert len(told) <= 60


def test_the_answer_names_what_was_ignored():
    def answered(chosen):
        report = Report()
        eight_bits = EightBits(report, lambda: None)
        answers = Answers(report, [], lambda: Config(allow_cpu=True), lambda action: action(), eight_bits)
        result = SimpleNamespace(extra_generation_params={})
        answers.process(lambda p: result, request(chosen))
        return result.extra_generation_params["Stable Fast"]

    assert answered({"enabled": False, "speed": 9})["ignored"] == ["speed: 9"]
    assert "ignored" not in answered({"enabled": False})


def test_a_request_of_before_leaves_nothing():
    p = request({"speed": 9})
    per_request.apply(p, None)
    assert per_request.ignored(p) == []


@pytest.fixture
def webui(monkeypatch):
    """What the hosts' modules of scripts have in common."""
    scripts = ModuleType("modules.scripts")
    scripts.Script, scripts.AlwaysVisible = type("Script", (), {}), object()
    package = ModuleType("modules")
    package.scripts = scripts
    gradio = ModuleType("gradio")
    gradio.State = lambda value: SimpleNamespace(value=value)
    for name, module in {"modules": package, "modules.scripts": scripts, "gradio": gradio}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return scripts


def loaded(monkeypatch, script):
    """The classes that a host finds in what it loads."""
    monkeypatch.setattr(hosts, "start", lambda version: script)
    found = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "stable_fast.py"))
    base = sys.modules["modules"].scripts.Script
    # SD.Next takes no class of another metaclass
    return [each for each in found.values() if type(each) is type and issubclass(each, base)]


def test_the_hosts_find_one_script_which_has_one_argument(webui, monkeypatch):
    (kind,) = loaded(monkeypatch, per_request.script())
    script = kind()
    assert script.title() == "Stable Fast" and script.show(False) is webui.AlwaysVisible
    (argument,) = script.ui(False)
    assert argument.value is None
    p = SimpleNamespace(override_settings={})
    # as the page calls it, and as the API does
    script.before_process(p, None)
    assert p.override_settings == {}
    script.before_process(p, {"enabled": False})
    assert p.override_settings == {"sfast_enabled": False}


def test_a_host_without_it_finds_none(webui, monkeypatch):
    assert loaded(monkeypatch, None) == []
