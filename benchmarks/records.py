"""Results as JSON: one line for each row, so that a change of a row is a change of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def text(found: Any) -> str:
    """`found` as JSON. Each item of the outermost object, and of the lists and objects of objects in it, has a line."""
    if not isinstance(found, (dict, list)):
        return _line(found) + "\n"
    return _lines(found, " ") + "\n"


def write(file: Path, found: Any) -> None:
    """Write `found` as `text` gives it."""
    file.write_text(text(found), encoding="utf-8")


def _line(found: Any) -> str:
    return json.dumps(found, ensure_ascii=False)


def _lines(found: dict[str, Any] | list[Any], indent: str) -> str:
    opened, closed = "{}" if isinstance(found, dict) else "[]"
    if isinstance(found, dict):
        items = [f"{_line(str(key))}: {_nested(value, indent)}" for key, value in found.items()]
    else:
        items = [_line(value) for value in found]
    inner = ",\n".join(indent + item for item in items)
    return f"{opened}\n{inner}\n{indent[1:]}{closed}" if items else opened + closed


def _nested(value: Any, indent: str) -> str:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    rows = bool(held) and all(isinstance(each, (dict, list)) for each in held)
    return _lines(value, indent + " ") if rows else _line(value)
