"""The host's one logger; the root logger is silent there."""

from __future__ import annotations

import logging

log = logging.getLogger("sd")
