"""The tab is made of what Gradio 3 has, and is missed by nobody if gradio is not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from sfast_ext.ui import requests, tab


class Component:
    """Notes how it was made and what its events do."""

    made: list[Component] = []

    def __init__(self, *args, **options):
        self.args, self.options, self.events = args, options, []
        Component.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def click(self, **event):
        self.events.append(event)
        return SimpleNamespace(then=lambda **event: self.events.append(event))


@pytest.fixture
def gradio(monkeypatch):
    Component.made = []
    names = dict.fromkeys(("Blocks", "HTML", "Row", "Button", "Textbox", "CheckboxGroup", "Plot"), Component)
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(**names, update=dict))


def by_id(name):
    return next(each for each in Component.made if each.options.get("elem_id") == f"stable_fast_{name}")


def actions(**more):
    nothing = {
        "drop": lambda: 3, "report": lambda: "a report", "prepare": lambda wanted: None, "measure": lambda wanted: None,
        "cancel": lambda: False, "measurements": list,
    }  # fmt: skip
    return tab.Actions(**{**nothing, **more})


def test_it_has_a_place_for_the_tables_and_its_buttons(gradio):
    ((page, title, key),) = tab.tabs(actions())
    assert (title, key) == ("Stable Fast", "stable_fast") and page is Component.made[0]
    assert 'id="stable_fast_view"' in by_id("tables").args[0] and 'id="stable_fast_job"' in by_id("progress").args[0]
    assert "Plans dropped:</span> 3." in by_id("drop").events[0]["fn"]()
    assert by_id("report").events[0]["fn"]() == "a report"
    buttons = ("drop", "report", "prepare", "measure", "cancel", "chart")
    # the page's own functions, under the page's own authentication, and not among the named ones of its API
    assert all(by_id(name).events[0]["api_name"] is False for name in buttons)
    fields = ("report_text", "sizes", "pictures", "tokens", "refresh", *buttons)
    assert all(by_id(name).do_not_save_to_config for name in fields)


def test_what_may_not_be_read_is_not_shown(gradio):
    sys.modules["gradio"].Request = type("Request", (), {})
    asked = []
    tab.tabs(actions(may_read=lambda request: asked.append(request) or request == "admitted"))
    report, chart = (by_id(name).events[0]["fn"] for name in ("report", "chart"))
    # by this, Gradio knows that it is to give the request
    assert all(get_type_hints(each)["request"] is sys.modules["gradio"].Request for each in (report, chart))
    assert report("admitted") == "a report" and chart("admitted")[1] == tab.NO_CHART
    for request in (None, "another"):
        assert report(request) == tab.PASSWORD and chart(request) == ({"visible": False}, tab.PASSWORD)
    assert asked == ["admitted", "admitted", None, None, "another", "another"]


@pytest.mark.parametrize("name", ["prepare", "measure"])
def test_sizes_of_the_fields_are_started_and_followed(gradio, name):
    asked = []
    tab.tabs(actions(**{name: asked.append}))
    click, then = by_id(name).events
    assert click["inputs"] == [by_id(field) for field in ("sizes", "pictures", "tokens")]
    assert click["outputs"] == [by_id("told")]
    assert click["fn"]("512x512, 768x512", "2", []) == "Started." and "watch" in then["_js"]
    assert [each.label for each in asked[0]] == ["512x512, 2 images", "768x512, 2 images"]
    *_, longest = by_id("tokens").options["choices"]
    click["fn"]("512x512", "1", ["75", longest])
    assert [each.label for each in asked[1]] == ["512x512, 1 image, 77 tokens", "512x512, 1 image, 231 tokens"]


def test_what_cannot_be_started_says_why_as_text(gradio):
    def prepare(wanted):
        raise requests.Refused("make one image with <b>this</b> model first")

    tab.tabs(actions(prepare=prepare))
    start = by_id("prepare").events[0]["fn"]
    assert start("512x512", "1", []) == (
        "<span>Not started:</span> <span>make one image with &lt;b&gt;this&lt;/b&gt; model first</span>"
    )
    said = start("<img src=x onerror=alert(1)>", "1", [])
    assert "<img" not in said and "width x height" in said


@pytest.mark.parametrize(("there", "said"), [(True, "Cancelled."), (False, "Nothing is running.")])
def test_cancel_says_whether_there_was_a_job(gradio, there, said):
    tab.tabs(actions(cancel=lambda: there))
    assert by_id("cancel").events[0]["fn"]() == said


def test_the_chart_is_shown_once_there_is_one(gradio, monkeypatch):
    tab.tabs(actions(measurements=lambda: ["measured"]))
    assert by_id("plot").options["visible"] is False
    draw = by_id("chart").events[0]["fn"]
    monkeypatch.setattr(tab.chart, "figure", lambda kept: None)
    assert draw() == ({"value": None, "visible": False}, tab.NO_CHART)
    monkeypatch.setattr(tab.chart, "figure", lambda kept: kept)
    assert draw() == ({"value": ["measured"], "visible": True}, "")


def test_without_gradio_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert tab.tabs(actions()) == []
