"""When a host is ready for its first image before there is one: see `jobs.ahead`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import host_queue, webui_probes
from sfast_ext.hosts.installation import Installation
from sfast_ext.jobs.ahead import Ahead
from sfast_ext.jobs.rehearsals import Rehearsals
from sfast_ext.report import Report
from sfast_ext.ui import settings_table
from sfast_ext.ui.settings_table import HostConfig

LITTLE_MEMORY = ("lowvram", "medvram", "medvram_sdxl", "always_low_vram", "always_no_vram", "always_offload_from_vram")
"""Flags of hosts with which a model is on the GPU while it runs alone."""


class Session(Protocol):
    """What is asked of a session."""

    report: Report
    rehearsals: Rehearsals
    installation: Installation

    def config(self) -> HostConfig:
        """The user's settings."""

    def loaded(self) -> Accelerator | None:
        """The accelerator of the UNet that is loaded."""

    def busy(self) -> bool:
        """Whether the host is at a job."""

    def callback(self, action: Callable[..., object]) -> Callable[..., None]:
        """A function that does the same, and whose exceptions do not reach the host."""

    def guarded(self, action: Callable[[], object]) -> None:
        """Run an action. An exception goes to the report."""


class _Host:
    """A session as `Ahead` asks it."""

    def __init__(self, session: Session) -> None:
        self._session, self.report = session, session.report

    def prepares_ahead(self) -> bool:
        return permitted(self._session)

    def loaded(self) -> Accelerator | None:
        return self._session.loaded()

    def busy(self) -> bool:
        return self._session.busy()


def permitted(session: Session) -> bool:
    """Whether the settings and the host's flags leave room for a plan that nobody has asked for yet."""
    from modules import shared

    flags, opts, config = getattr(shared, "cmd_opts", None), shared.opts, session.config()
    small = getattr(opts, settings_table.PRESET.key, None) == settings_table.SMALL
    offloaded = getattr(opts, "diffusers_offload_mode", "none") != "none"
    little = small or offloaded or any(getattr(flags, name, False) for name in LITTLE_MEMORY)
    return config.enabled and config.ahead and not little


def install(session: Session) -> None:
    """Begin once the host serves its page, and end with the first image."""
    host = session.installation
    ahead = Ahead(_Host(session), session.rehearsals, host_queue.waiting)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.guarded(ahead.image_begins)
        result = original(*args, **kwargs)
        session.guarded(ahead.remember)
        return result

    host.add(ahead.end)
    begin = session.callback(lambda *_: ahead.start())
    host.feature(webui_probes.PAGE, lambda: host.callback("on_app_started", begin))
    host.feature(webui_probes.ANSWERS, lambda: host.wrap("process_images_inner", around))
