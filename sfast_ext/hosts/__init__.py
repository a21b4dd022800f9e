"""Adapters of host programs (WebUIs), see README.md. No other package imports a host's `modules.*`."""

from __future__ import annotations

import importlib

ADAPTERS = ("a1111", "sdnext", "forge")


def start(version: str) -> type | None:
    """Start the extension in this host. Returns the class of the script for settings of one request; None if there is
    none."""
    from sfast_ext.hosts import starting

    adapters = [importlib.import_module(f"sfast_ext.hosts.{name}.adapter") for name in ADAPTERS]
    session = starting.start(version, [kind for adapter in adapters for kind in adapter.SESSIONS])
    return None if session is None else session.script
