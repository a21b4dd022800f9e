"""Texts with their pieces, which the page translates one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfast_ext.ui import bug_report, phrases, words


def of(text: str) -> list[str]:
    """A text in pieces, names and numbers apart from words, without folders."""
    # without folders first: a piece of a path does not look like one
    return list(phrases.pieces(bug_report.without_paths(text)))


def badge(status: Mapping[str, Any]) -> dict[str, Any]:
    """The badge of a status, with its pieces."""
    found = words.badge(status)
    return {**found, **{f"{name}_parts": of(found[name] or "") for name in ("text", "detail")}}
