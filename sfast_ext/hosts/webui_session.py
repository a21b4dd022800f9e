"""What the sessions of AUTOMATIC1111's WebUI and of its forks share: their flags, their scripts and their errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sfast_ext.hosts import webui_probes
from sfast_ext.hosts.session import Session
from sfast_ext.report import logger


class WebUISession(Session):
    """A session in a WebUI with `modules.shared.cmd_opts`, `modules.scripts` and `modules.errors`."""

    PROBES = webui_probes.WEBUI

    def has_console(self) -> bool:
        """Whether the WebUI writes what is logged to the console, and whose it is."""
        return False

    def register(self) -> None:
        """Write to the console before anything else is done."""
        self._join_console()
        super().register()

    def _join_console(self) -> None:
        if self.has_console():
            return
        handler, was = _console(logging.Formatter("Stable Fast: %(message)s")), logger.propagate
        logger.addHandler(handler)
        # a handler of the root logger, the WebUI's or a package's, would write each line once more
        logger.propagate = False

        def leave() -> None:
            logger.removeHandler(handler)
            logger.propagate = was

        self.installation.add(leave)

    def show_error(self, exc: Exception) -> None:
        """Show an exception once, which the WebUI would log at every step."""
        from modules import errors

        errors.display_once(exc, "Stable Fast")

    def api_passwords(self) -> Mapping[str, str]:
        """The passwords of --api-auth by user, parsed as the WebUI parses them."""
        from modules import shared

        pairs = [pair.partition(":") for pair in (getattr(shared.cmd_opts, "api_auth", None) or "").split(",") if pair]
        return {user: password for user, _, password in pairs}

    def api_is_on(self) -> bool:
        """Whether --api was given, or --nowebui, which implies it."""
        from modules import shared

        return bool(getattr(shared.cmd_opts, "api", False) or getattr(shared.cmd_opts, "nowebui", False))

    def xyz_grid(self) -> Any:
        """The module of its script."""
        from modules import scripts

        found = (data.module for data in scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py")
        return next(found, None)

    def _unload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.guarded(self.release_models)
        return original(*args, **kwargs)


def _console(formatter: logging.Formatter) -> logging.Handler:
    """A handler that writes around the WebUI's progress bars, if the WebUI has them."""
    plain = logging.StreamHandler()
    # the WebUI's hands lines over to it while there is no bar
    plain.setFormatter(formatter)
    try:
        from modules.logging_config import TqdmLoggingHandler
    except ImportError:
        return plain
    if TqdmLoggingHandler is None:
        return plain
    around = TqdmLoggingHandler(plain)
    around.setFormatter(formatter)
    return around
