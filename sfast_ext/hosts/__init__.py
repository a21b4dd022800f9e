"""Adapters of WebUIs: the only importers of `modules.*`, each imported only where it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

ADAPTERS = ("a1111", "sdnext")


def find() -> ModuleType | None:
    """The adapter of the WebUI this process is, or None where it is none we know."""
    for name in ADAPTERS:
        adapter = importlib.import_module(f"sfast_ext.hosts.{name}.adapter")
        if adapter.detect():
            return adapter
    return None
