"""The extension's lines in SD.Next's log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sfast_ext.ui.api import STATUS


def join(log: logging.Logger) -> Callable[[], None]:
    """Write to SD.Next's log: it silences the root logger. Returns what undoes it."""
    logger = logging.getLogger("sfast_ext")
    before, logger.parent = logger.parent, log

    # SD.Next logs each request, and the badge asks every second while an image is made
    log.addFilter(_is_not_the_badge)

    def leave() -> None:
        log.removeFilter(_is_not_the_badge)
        logger.parent = before

    return leave


def _is_not_the_badge(record: logging.LogRecord) -> bool:
    return not (isinstance(record.msg, str) and record.msg.startswith("API ") and f"{STATUS} " in record.msg)
