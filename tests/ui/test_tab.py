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

    def click(self, fn=None, _js=None, **event):
        self.events.append({"fn": fn, "_js": _js, **event})
        return SimpleNamespace(then=lambda **event: self.events.append(event))


@pytest.fixture
def gradio(monkeypatch):
    Component.made = []
    names = dict.fromkeys(("Blocks", "HTML", "Row", "Button", "Textbox", "CheckboxGroup"), Component)
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(**names, update=dict))


def by_id(name):
    return next(each for each in Component.made if each.options.get("elem_id") == f"stable_fast_{name}")


def actions(**more):
    nothing = {
        "drop": lambda: 3, "report": lambda: "a report", "prepare": lambda wanted: None, "measure": lambda wanted: None,
        "compare": lambda: None, "cancel": lambda: False, "switch": lambda on: None,
    }  # fmt: skip
    return tab.Actions(**{**nothing, **more})


def test_it_has_a_place_for_the_tables_and_its_buttons(gradio):
    ((page, title, key),) = tab.tabs(actions())
    assert (title, key) == ("Stable Fast", "stable_fast") and page is Component.made[0]
    assert 'id="stable_fast_view"' in by_id("tables").args[0] and 'id="stable_fast_job"' in by_id("progress").args[0]
    assert "Sizes forgotten:</span> 3." in by_id("drop").events[0]["fn"]()
    assert by_id("report").events[0]["fn"]() == "a report"
    buttons = ("drop", "report", "prepare", "measure", "compare", "cancel", "on", "off")
    # the page's own functions, under the page's own authentication, and not among the named ones of its API
    assert all(by_id(name).events[0]["api_name"] is False for name in buttons)
    fields = ("report_text", "sizes", "images", "tokens", "refresh", *buttons)
    assert all(by_id(name).do_not_save_to_config for name in fields)


def test_what_may_not_be_read_is_not_shown(gradio):
    sys.modules["gradio"].Request = type("Request", (), {})
    asked = []
    tab.tabs(actions(may_read=lambda request: asked.append(request) or request == "admitted"))
    report = by_id("report").events[0]["fn"]
    # by this, Gradio knows that it is to give the request
    assert get_type_hints(report)["request"] is sys.modules["gradio"].Request
    assert report("admitted") == "a report"
    for request in (None, "another"):
        assert report(request) == tab.PASSWORD
    assert asked == ["admitted", None, "another"]


@pytest.mark.parametrize("name", ["prepare", "measure"])
def test_sizes_of_the_fields_are_started_and_followed(gradio, name):
    asked = []
    tab.tabs(actions(**{name: asked.append}))
    click, then = by_id(name).events
    assert click["inputs"] == [by_id(field) for field in ("sizes", "images", "tokens")]
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


def test_a_comparison_is_started_and_followed_or_says_why_not(gradio):
    started = []
    tab.tabs(actions(compare=lambda: started.append(1)))
    click, then = by_id("compare").events
    assert click["fn"]() == "" and started == [1] and click["outputs"] == [by_id("told")] and "watch" in then["_js"]
    Component.made = []

    def refused():
        raise requests.Refused("make <one> image first")

    tab.tabs(actions(compare=refused))
    assert "Not started:</span> <span>make &lt;one&gt; image first" in by_id("compare").events[0]["fn"]()


@pytest.mark.parametrize(
    ("sizes", "images", "tokens", "field"),
    [
        ("", "1", [], "sizes"),
        (" ; ", "1", [], "sizes"),
        ("500x500", "1", [], "sizes"),
        ("512x512, 8192x64", "1", [], "sizes"),
        ("wide", "1", [], "sizes"),
        ("512", "2", [], "sizes"),
        (",".join(f"{64 + 8 * n}x64" for n in range(33)), "1", [], "sizes"),
        ("512x512", "0", [], "images"),
        ("512x512", "1, 17", [], "images"),
        ("512x512", "two", [], "images"),
        ("512x512", "-1", [], "images"),
        ("512x512", "1.5", [], "images"),
        ("512x512", "1", ["76"], "tokens"),
        ("512x512", "1", ["many"], "tokens"),
    ],
)
def test_a_fault_names_its_field_for_the_cursor(gradio, sizes, images, tokens, field):
    for name in ("prepare", "measure"):
        Component.made = []
        tab.tabs(actions())
        click, then = by_id(name).events
        assert f'data-field="stable_fast_{field}"' in click["fn"](sizes, images, tokens)
        assert "toFault" in then["_js"] and by_id(field) is not None


def test_a_fault_of_no_field_leaves_the_cursor(gradio):
    def prepare(wanted):
        raise requests.Refused("another job is running")

    tab.tabs(actions(prepare=prepare))
    assert "data-field" not in by_id("prepare").events[0]["fn"]("512x512", "1", [])


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
