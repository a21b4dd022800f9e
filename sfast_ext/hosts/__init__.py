"""Adapters of host programs (WebUIs), see README.md. No other package imports a host's `modules.*`."""

from __future__ import annotations

import importlib
from types import ModuleType

ADAPTERS = ("a1111", "sdnext", "forge")


def find() -> ModuleType | None:
    """The adapter of the host that this process is; None where the host is not supported."""
    for name in ADAPTERS:
        adapter = importlib.import_module(f"sfast_ext.hosts.{name}.adapter")
        if adapter.detect():
            return adapter
    return None
