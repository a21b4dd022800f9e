"""Adapters of host programs (WebUIs), see README.md. No other package imports a host's `modules.*`."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

ADAPTERS = ("a1111", "sdnext", "forge")


def find() -> ModuleType | None:
    """The adapter of the host that this process is; None where the host is not supported."""
    for name in ADAPTERS:
        adapter = importlib.import_module(f"sfast_ext.hosts.{name}.adapter")
        if adapter.detect():
            return adapter
    return None


def script_of(adapter: ModuleType) -> type | None:
    """The class of the script for settings of one request; None where the adapter has none."""
    make = getattr(adapter, "request_script", None)
    try:
        return None if make is None else make()
    except Exception as exc:  # of a host that was changed
        logging.getLogger("sfast_ext").warning("alwayson_scripts of requests are not read: %r", exc)
        return None
