"""The page of troubleshooting as the WebUI serves it."""

from __future__ import annotations

import re

import pytest

from sfast_ext.reasons import TABLE
from sfast_ext.ui import help_page


@pytest.fixture(autouse=True)
def fresh():
    help_page.html.cache_clear()
    yield
    help_page.html.cache_clear()


def test_every_entry_can_be_reached_by_its_anchor():
    page = help_page.html()
    assert not [kind for kind in TABLE if f'<a id="{kind.code}"></a><h3>' not in page]


def test_a_former_anchor_leads_to_the_same_entry():
    assert '<a id="different-picture"></a><a id="different-image"></a><h3>The result' in help_page.html()


def test_nothing_of_the_markup_is_left():
    text = re.sub(r"<[^>]+>", "", help_page.html())
    assert not [mark for mark in ("**", "`", "](", "<a id", "\n#") if mark in text]


def test_text_is_text(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# A <b>\n\n<script>x</script> `<i>` & *so*", encoding="utf-8")
    monkeypatch.setattr(help_page, "PAGE", page)
    found = help_page.html()
    assert "&lt;script&gt;" in found and "<script>" not in found
    assert "<code>&lt;i&gt;</code> &amp; <i>so</i>" in found


def test_a_missing_file_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(help_page, "PAGE", tmp_path / "none.md")
    assert "is missing" in help_page.html()
