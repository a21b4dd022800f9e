"""The tab is made of what Gradio 3 has, and is missed by nobody if gradio is not there."""

from __future__ import annotations

import html
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

    def click(self, fn=None, _js=None, **event):
        self.events.append({"fn": fn, "_js": _js, **event})
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
        "cancel": lambda: False, "measurements": list, "switch": lambda on: None,
    }  # fmt: skip
    return tab.Actions(**{**nothing, **more})


def test_it_has_a_place_for_the_tables_and_its_buttons(gradio):
    ((page, title, key),) = tab.tabs(actions())
    assert (title, key) == ("Stable Fast", "stable_fast") and page is Component.made[0]
    assert 'id="stable_fast_view"' in by_id("tables").args[0] and 'id="stable_fast_job"' in by_id("progress").args[0]
    assert "Sizes forgotten:</span> 3." in by_id("drop").events[0]["fn"]()
    assert by_id("report").events[0]["fn"]() == "a report"
    buttons = ("drop", "report", "prepare", "measure", "cancel", "chart", "on", "off")
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
    assert report("admitted") == "a report" and tab.NO_CHART in chart("admitted")[1]
    for request in (None, "another"):
        plot, told = chart(request)
        assert report(request) == tab.PASSWORD and plot == {"visible": False} and tab.PASSWORD in html.unescape(told)
    assert asked == ["admitted", "admitted", None, None, "another", "another"]


@pytest.mark.parametrize("name", ["prepare", "measure"])
def test_sizes_of_the_fields_are_started_and_followed(gradio, name):
    asked = []
    tab.tabs(actions(**{name: asked.append}))
    click, then = by_id(name).events
    assert click["inputs"] == [by_id(field) for field in ("sizes", "pictures", "tokens")]
    assert click["outputs"] == [by_id("told")]
    assert click["fn"]("512x512, 768x512", "2", []) == "" and "watch" in then["_js"]
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
        '<div class="sfast-error" role="alert"><span>Not started:</span>'
        " <span>make one image with &lt;b&gt;this&lt;/b&gt; model first</span></div>"
    )
    said = start("<img src=x onerror=alert(1)>", "1", [])
    assert "<img" not in said and "width x height" in said
    for nothing in ("", " , ", None):
        assert "write at least one size, such as 512x512" in start(nothing, "1", [])


@pytest.mark.parametrize(("there", "said"), [(True, "Cancelled."), (False, "Nothing is running.")])
def test_cancel_says_whether_there_was_a_job(gradio, there, said):
    tab.tabs(actions(cancel=lambda: there))
    assert by_id("cancel").events[0]["fn"]() == said


def test_the_chart_is_shown_once_there_is_one(gradio, monkeypatch):
    tab.tabs(actions(measurements=lambda: ["measured"]))
    assert by_id("plot").options["visible"] is False
    draw = by_id("chart").events[0]["fn"]
    monkeypatch.setattr(tab.chart, "figure", lambda kept: None)
    update, said = draw()
    assert update == {"value": None, "visible": False} and tab.NO_CHART in said and "sfast-error" in said
    monkeypatch.setattr(tab.chart, "figure", lambda kept: kept)
    assert draw() == ({"value": ["measured"], "visible": True}, "")


def test_one_button_is_the_primary_and_what_cannot_be_undone_is_marked(gradio):
    tab.tabs(actions())
    variants = {each.options["elem_id"]: each.options.get("variant") for each in Component.made if each.events}
    assert {name: variant for name, variant in variants.items() if variant} == {
        "stable_fast_measure": "primary", "stable_fast_drop": "stop",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "wanted"), [("on", True), ("off", False)])
def test_the_switch_says_why_a_host_refuses_it(gradio, name, wanted):
    asked = []
    tab.tabs(actions(switch=asked.append))
    assert by_id(name).events[0]["fn"]() == "" and asked == [wanted]
    Component.made = []

    def frozen(on):
        raise AssertionError("settings are <frozen>")

    tab.tabs(actions(switch=frozen))
    assert "Not switched:</span> <span>AssertionError: settings are &lt;frozen&gt;" in by_id(name).events[0]["fn"]()


class Known(Component):
    def __init__(self, *args, autoscroll=True, **options):
        super().__init__(*args, autoscroll=autoscroll, **options)


class Later(Component):
    def click(self, fn=None, js=None, **event):
        return super().click(fn, js, **event)


def test_each_gradio_gets_the_words_that_it_knows(gradio, monkeypatch):
    tab.tabs(actions())
    # Gradio 3.41 warns of it at each start
    assert "autoscroll" not in by_id("report_text").options
    Component.made = []
    monkeypatch.setattr(sys.modules["gradio"], "Textbox", Known)
    monkeypatch.setattr(sys.modules["gradio"], "Button", Later)
    tab.tabs(actions())
    assert by_id("report_text").options["autoscroll"] is False
    assert "refresh" in by_id("refresh").events[0]["_js"] and "js" in by_id("measure").events[1]


def test_without_gradio_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert tab.tabs(actions()) == []
