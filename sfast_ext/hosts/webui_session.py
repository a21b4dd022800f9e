"""What the sessions of AUTOMATIC1111's WebUI and of its forks share: their flags, their scripts and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfast_ext.hosts.session import Session


class WebUISession(Session):
    """A session in a WebUI with `modules.shared.cmd_opts`, `modules.scripts` and `modules.errors`."""

    def show_error(self, exc: Exception) -> None:
        """Show an exception once, where the WebUI would log it at every step."""
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
