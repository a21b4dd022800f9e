"""What the user has measured, kept on disk so that another driver, torch or version can be compared with it later."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from sfast_ext import cache_folder, environment
from sfast_ext.ui.requests import FORMER

KEPT = 100
VERSIONS = ("gpu", "driver", "torch", "cuda", "triton")
"""Of `environment.describe`, with each measurement."""


class Measurements:
    """Measurements, oldest first. No name of a model, no prompt and no folder is in them.

    Args:
        folder: the cache folder that keeps them.
    """

    def __init__(self, folder: Callable[[], Path] = environment.kept_in) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def all(self) -> list[dict[str, Any]]:
        """Those on disk; none if the file is missing, not ours, or may be written by others."""
        with self._lock:
            return self._read()

    def add(self, module: nn.Module, rows: list[dict[str, Any]], version: str, host: str) -> dict[str, Any]:
        """Keep a measurement, and return it.

        Raises:
            OSError, RuntimeError: it cannot be kept.
        """
        known = environment.describe()
        entry = {
            "when": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "version": version,
            "host": host,
            "model": kind_of(module),
            **{name: known.get(name) for name in VERSIONS},
            "rows": rows,
        }
        folder = self._folder()
        with self._lock, cache_folder.turn(folder):
            kept = [*self._read(), entry][-KEPT:]
            cache_folder.write(folder / "measurements.json", folder, json.dumps(kept, allow_nan=False).encode())
        return entry

    def _read(self) -> list[dict[str, Any]]:
        try:
            folder = self._folder()
            found = json.loads(cache_folder.read(folder / "measurements.json", folder))
        except (OSError, RuntimeError, ValueError):
            return []
        if not isinstance(found, list):
            return []
        kept = [each for each in found if isinstance(each, dict) and isinstance(each.get("rows"), list)][-KEPT:]
        for row in (row for each in kept for row in each["rows"] if isinstance(row, dict)):
            # in files that an earlier version wrote
            if FORMER in row:
                row.setdefault("images", row.pop(FORMER))
        return kept


def kind_of(module: nn.Module) -> str:
    """The kind of a model, without its name: "UNetModel, 860 million parameters, float16"."""
    weights = list(module.parameters())
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in weights})
    millions = sum(each.numel() for each in weights) / 1e6
    return f"{type(module).__name__}, {millions:.3g} million parameters, {' and '.join(dtypes)}"
