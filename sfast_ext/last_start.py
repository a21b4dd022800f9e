"""What the extension said of the WebUI at its last start, kept on disk for `doctor`, which runs without the WebUI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfast_ext import cache_folder, environment

_FILE = "last_start.json"
FOLDER: Callable[[], Path] = environment.kept_in
"""Gives the cache folder that keeps it."""


def keep(told: dict[str, Any]) -> None:
    """Keep what was said in place of what was said before.

    Raises:
        OSError, RuntimeError: it cannot be kept.
    """
    kept_in = FOLDER()
    cache_folder.write(kept_in / _FILE, kept_in, json.dumps(told).encode())


def read() -> dict[str, Any] | None:
    """What was said last; None if nothing was, or the file may be written by others."""
    try:
        kept_in = FOLDER()
        found = json.loads(cache_folder.read(kept_in / _FILE, kept_in))
    except (OSError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("lines"), list) else None
