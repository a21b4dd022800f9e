"""What is shown in a host that cannot be served: the reason, and nothing else."""

from __future__ import annotations

from typing import Any

from sfast_ext import environment
from sfast_ext.hosts.session import Session
from sfast_ext.reasons import Reason
from sfast_ext.ui import api, bug_report, words
from sfast_ext.ui.requests import refusing


class Refusal:
    """Answers the badge, the tab and the API in place of a session that could not be started.

    Args:
        session: knows the host, and was not started.
        why: what the session lacks.
    """

    def __init__(self, session: Session, why: Reason) -> None:
        self._session, self._why = session, why

    def install(self) -> None:
        """Register the routes once the host serves them. Nothing of it stays in the host if that fails."""
        session = self._session
        show = session.callback(lambda _demo, app: api.register(app, self.source()))
        try:
            # whoever is not admitted by the host must not be admitted here
            session.api_passwords(), session.api_is_on(), session.subpath()
            session.installation.callback("on_app_started", show)
        except Exception:
            session.installation.fail()

    def source(self) -> api.Source:
        """What the routes answer with."""
        session, refuse = self._session, refusing(str(self._why))
        jobs = api.Jobs(refuse, refuse, lambda: False, lambda: None, list, refuse, lambda: None)
        return api.Source(
            self.status,
            lambda: bug_report.text(self.status(), {}),
            lambda: 0,
            jobs,
            session.api_passwords,
            session.api_is_on,
            session.subpath,
            lambda: False,
        )

    def status(self) -> dict[str, Any]:
        """What GET /sfast/v1/status answers."""
        session = self._session
        found = {
            "version": session.version,
            "host": session.host_status(),
            "environment": environment.describe(),
            "busy": False,
            "no_gpu": None,
            "enabled": False,
            "unserved": self._why,
            "model": None,
            "job": None,
            "accelerators": [],
            "eight_bits": None,
            **session.report.as_dict(),
        }
        return {**found, "unserved": str(self._why), "badge": words.badge(found)}
