"""The script that the WebUI loads: it starts the extension in this WebUI."""

from __future__ import annotations

from sfast_ext import __version__, hosts

PerRequest = hosts.start(__version__)
