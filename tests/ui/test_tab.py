"""The tab is made of what Gradio 3 has, and is missed by nobody where gradio is not."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sfast_ext.ui import tab


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
    names = dict.fromkeys(("Blocks", "HTML", "Row", "Button", "Textbox"), Component)
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(**names))


def by_id(name):
    return next(each for each in Component.made if each.options.get("elem_id") == f"stable_fast_{name}")


def test_it_has_a_place_for_the_tables_and_three_buttons(gradio):
    ((page, title, key),) = tab.tabs(lambda: 3, lambda: "a report")
    assert (title, key) == ("Stable Fast", "stable_fast") and page is Component.made[0]
    assert 'id="stable_fast_view"' in by_id("tables").args[0]
    assert by_id("drop").events[0]["fn"]() == "Plans dropped: 3. They are made anew when they are needed."
    assert by_id("report").events[0]["fn"]() == "a report"
    # the page's own functions, under the page's own authentication, and not among the named ones of its API
    assert all(by_id(name).events[0]["api_name"] is False for name in ("drop", "report"))
    assert by_id("report_text").do_not_save_to_config


def test_without_gradio_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert tab.tabs(lambda: 0, str) == []
