"""What every host adapter does alike: start and stop, settings, status, and callbacks that raise nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from sfast_ext import environment
from sfast_ext.config import Config
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.report import Report
from sfast_ext.ui import api, settings


class Session:
    """The extension in one run of a host's scripts, from their loading to their unloading.

    An adapter derives from it. It sets `HOST`, fills `attachments`, and defines `install`, `host_version` and
    `model_name`; the other methods are there to be extended.
    """

    HOST: ClassVar[str]
    """The host's name in the status."""
    running: ClassVar[Session | None] = None
    """The session of the scripts that are loaded; each adapter's class has its own."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.report = Report()
        self.attachments: tuple[Attachment, ...] = ()
        """What keeps accelerators on the host's networks; the status lists them in this order."""
        self._undo: list[Callable[[], object]] = []

    @classmethod
    def start(cls, version: str) -> None:
        """Start a session; the one of the scripts that were loaded before is released first."""
        if cls.running is not None:
            cls.running.release()
        cls.running = cls(version)
        cls.running.register()

    @classmethod
    def stop(cls) -> None:
        """Release the session, and forget it."""
        if cls.running is not None:
            cls.running.release()
            cls.running = None

    def register(self) -> None:
        """Give the host our settings and callbacks."""
        from modules import script_callbacks, shared

        # Now, and not only in on_ui_settings: the model may be loaded, or a request answered, before the settings page
        # is built, and a host without its page never builds it.
        settings.register(shared.opts, shared.OptionInfo)
        script_callbacks.on_ui_settings(self.callback(lambda: settings.register(shared.opts, shared.OptionInfo)))
        script_callbacks.on_script_unloaded(self.callback(self.release))
        script_callbacks.on_app_started(
            self.callback(lambda _demo, app: api.register(app, self.status, self.api_passwords))
        )
        self._undo.extend(self.install())

    def install(self) -> Iterable[Callable[[], object]]:
        """Register the adapter's own callbacks and wrap functions of the host; returns what takes these away again."""
        raise NotImplementedError

    def release(self) -> None:
        """Give everything back; the scripts are unloaded, and loaded again perhaps."""
        self.release_models()
        while self._undo:
            self._undo.pop()()

    def release_models(self) -> None:
        """Give back every network that is accelerated."""
        for attachment in self.attachments:
            attachment.release()

    def callback(self, action: Callable[..., object]) -> Callable[..., None]:
        """The same function, of which no exception reaches the host."""

        def guarded_action(*args: Any, **kwargs: Any) -> None:
            self.guarded(lambda: action(*args, **kwargs))

        return guarded_action

    def guarded(self, action: Callable[[], object]) -> None:
        """Do something in the host's thread. What it raises goes to the report, and the host goes on."""
        guarded(self.report, "host callback", action, self.show_error)

    def show_error(self, exc: Exception) -> None:
        """Tell the user of an exception in the host's own way, beside the report."""

    def config(self) -> Config:
        """What the user has chosen in the host's settings."""
        from modules import shared

        return settings.config_from(shared.opts, self.report)

    def status(self) -> dict[str, Any]:
        """What GET /sfast/v1/status answers."""
        return {
            "version": self.version,
            "host": {"name": self.HOST, "version": self.host_version()},
            "environment": environment.describe(),
            "enabled": self.config().enabled,
            "model": self.model_name(),
            "accelerators": [each for attachment in self.attachments for each in attachment.status()],
            **self.report.as_dict(),
        }

    def host_version(self) -> str:
        """The host's version, or "unknown"."""
        raise NotImplementedError

    def model_name(self) -> str | None:
        """The name of the model that is loaded."""
        raise NotImplementedError

    def api_passwords(self) -> Mapping[str, str]:
        """The passwords of the host's API, by user; empty where it asks for none."""
        return {}


def ready(version: str) -> str:
    """The line that an adapter writes to the host's log once it has started."""
    return f"Stable Fast {version} is ready. Settings: Settings > Stable Fast. Status: {api.STATUS}"


def guarded(
    report: Report, stage: str, action: Callable[[], object], show: Callable[[Exception], object] | None = None
) -> None:
    """Do something in the midst of the host's work, which goes on whatever becomes of ours.

    Args:
        stage: what the report says was done.
        show: told of an exception beside the report; what it raises itself is dropped.
    """
    try:
        action()
    except Exception as exc:
        report.error(stage, exc)
        if show is not None:
            with contextlib.suppress(Exception):
                show(exc)
