"""What all adapters do the same way: start and stop, settings, status, and callbacks that raise nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from sfast_ext import environment, parallel_png, preparation, reasons
from sfast_ext.accelerator import Accelerator
from sfast_ext.hosts import host_queue, idle, last_request, tab_actions, webui_probes, xyz
from sfast_ext.hosts.answers import Answers
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.eight_bits import EightBits
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.probes import Examined, Probe, examine
from sfast_ext.jobs.job import Jobs
from sfast_ext.jobs.rehearsals import Rehearsals
from sfast_ext.reasons import Reason
from sfast_ext.report import Report, logger, words_of
from sfast_ext.ui import api, bug_report, settings, settings_table, tab, words
from sfast_ext.ui.requests import refusing
from sfast_ext.ui.settings_table import HostConfig

INSTEAD = "the WebUI's own code makes the image"
REMEDY = "the tab Stable Fast, 'Copy a report', or /sfast/v1/help#failed"
"""What the log says after an error."""


class NotInstalled(Exception):
    """The extension could not be put into the host; nothing of it stays there. The message says why."""


class Session:
    """The extension in one run of a host's scripts, from their loading to their unloading.

    An adapter derives from it. It sets `HOST` and `PROBES`, fills `attachments`, and defines `install`, `host_version`,
    `model_name`, `follow_loaded`, `loaded` and `name_images`. It may extend the other methods.

    Args:
        found: what `examine` found of `PROBES` in the host.
    """

    HOST: ClassVar[str]
    """The host's name in the status."""
    PROBES: ClassVar[tuple[Probe, ...]] = webui_probes.COMMON
    """What the session relies on in the host."""
    TESTED: ClassVar[tuple[str, ...]] = ()
    """How the versions begin that it was run in, as `host_version` has them, up to the end of a number or of a commit's
    short name. Others are served as well."""
    FOLLOWS_RESIDENCE: ClassVar[bool] = False
    """Whether half-precision weights may stay in system memory, see `Accelerator.keeping_aside` and `on_gpu`."""
    running: ClassVar[Session | None] = None
    """The session of the loaded scripts. Each adapter's class has its own."""

    def __init__(self, version: str, found: Examined | None = None) -> None:
        self.version = version
        self.report = Report(INSTEAD, REMEDY)
        self.report.on_stage = self.show_stage
        jobs = Jobs(self.report, host_queue.queue, host_queue.interrupted, host_queue.interrupt)
        self.rehearsals = Rehearsals(self, jobs)
        self.last_request = last_request.LastRequest(self)
        self.attachments: tuple[Attachment, ...] = ()
        """They keep accelerators on the host's networks. The status lists them in this order."""
        self.found = examine(self.PROBES) if found is None else found
        self.installation = Installation(self.found, self.report.error)
        self.script: type | None = None
        """What `request_script` has made."""
        loaded = (lambda: self.loaded() if self.follows_residence() else None) if self.FOLLOWS_RESIDENCE else None
        self.eight_bits = EightBits(self.report, self.model_name, loaded)
        self._log_level: int | None = None
        self._described: tuple[bool, dict[str, Any], Reason | None] | None = None

    @classmethod
    def is_host(cls) -> bool:
        """Whether the host calls itself so. Another host is served as well if all that is relied on is there."""
        return True

    @classmethod
    def start(cls, version: str, found: Examined | None = None) -> Session:
        """Start a session, after releasing the one of the scripts that were loaded before. Returns it.

        Raises:
            NotInstalled: a step failed. All steps are undone.
        """
        if cls.running is not None:
            cls.running.release()
        session = cls.running = cls(version, found)
        try:
            session.register()
        except Exception as exc:
            cls.running = None
            session.rehearsals.close()
            session.release_models()
            session.installation.fail()
            raise NotInstalled(words_of(exc)) from exc
        return session

    @classmethod
    def stop(cls) -> None:
        """Release the running session."""
        if cls.running is not None:
            cls.running.release()
            cls.running = None

    def greeting(self) -> str:
        """The line that an adapter writes to the host's log once it has started: what was found, what will happen."""
        config = self.config()
        try:
            missing = None if config.allow_cpu else reasons.text(environment.no_gpu())
            found = environment.in_short()
        except Exception as exc:  # of a broken driver
            missing, found = f"{type(exc).__name__}: {exc}", ""
        if missing is not None:
            will = f"no supported NVIDIA GPU ({missing}); the WebUI's own code makes every image"
        else:
            will = f"{found}; {'on' if config.enabled else 'off, see Settings > Stable Fast'}"
        return f"Stable Fast {self.version}: {will}"

    def lost(self) -> list[str]:
        """What the user has to do without in this host, and what is missing for it, a sentence each."""
        return [f"{feature.lost}: {why}" for feature, why in self.installation.lost.items()]

    def remarks(self) -> list[str]:
        """What the report says of the host, a sentence each."""
        if not self.is_host():
            said = [f"this WebUI is not known; it is served as {self.HOST}, and was not tested by us"]
        else:
            said = [] if self.is_tested() else [f"{self.HOST} {self.host_version()} was not tested by us"]
        return [*said, *self.lost()]

    def say(self, line: str) -> None:
        """Write a line to the host's console."""
        print(line)

    def is_tested(self) -> bool:
        """Whether the adapter was run in this version of the host."""
        version = self.host_version()
        # "2.26" begins 2.26.1, and does not begin 2.260
        begun = (version[len(each) :] for each in self.TESTED if version.startswith(each))
        return self.is_host() and any(not rest[:1].isdigit() for rest in begun)

    def register(self) -> None:
        """Register settings and callbacks with the host."""
        host, opts, option_info = self.installation, self.found["opts"], self.found["OptionInfo"]
        # At once, and not only in on_ui_settings: the host may load its model, or answer a request, before it builds
        # the settings page; and with --nowebui it never builds the page.
        host.on_failure(settings.forgetting(opts))
        settings.register(opts, option_info)
        self._follow_log_level()
        host.add(lambda: logger.setLevel(logging.NOTSET))
        host.callback("on_script_unloaded", self.callback(self.release))
        again = self.callback(lambda: settings.register(opts, option_info))
        host.feature(webui_probes.SETTINGS_PAGE, lambda: host.callback("on_ui_settings", again))
        axes = self.callback(self._add_axes)
        host.feature(webui_probes.XYZ, lambda: host.callback("on_before_ui", axes))
        pasted = self.callback(lambda _text, params: settings.restored(params))
        host.feature(webui_probes.PASTED, lambda: host.callback("on_infotext_pasted", pasted))
        host.feature(webui_probes.TAB, lambda: host.callback("on_ui_tabs", lambda: self._tab(), []))
        page = self.callback(lambda _demo, app: api.register(app, self.source))
        host.feature(webui_probes.PAGE, lambda: host.callback("on_app_started", page))
        host.feature(webui_probes.PER_REQUEST, self._make_script)
        host.add(parallel_png.install(self._compresses))
        self.install(host)
        host.feature(webui_probes.ANSWERS, self._answer)
        host.feature(webui_probes.JOBS, lambda: idle.install(self))

    def _make_script(self) -> None:
        self.script = self.request_script()

    def request_script(self) -> type | None:
        """The class of the script for settings of one request; None if the host takes none."""
        return None

    def _answer(self) -> None:
        answers = Answers(self.report, self.attachments, self.config, self.guarded, self.eight_bits)
        self.installation.wrap("process_images_inner", answers.process)
        self.installation.wrap("process_images_inner", self.last_request.around)

    def install(self, host: Installation) -> None:
        """Register the adapter's own callbacks and wrap functions of the host, by the names of its probes."""
        raise NotImplementedError

    def release(self) -> None:
        """Release everything. Called when the host unloads its scripts, which it may load again."""
        self.rehearsals.close()
        self.last_request.forget()
        self.release_models()
        self.installation.undo()

    def release_models(self) -> None:
        """Release every network that is accelerated."""
        for attachment in self.attachments:
            attachment.release()

    def callback(self, action: Callable[..., object]) -> Callable[..., None]:
        """A function that does the same, and whose exceptions do not reach the host."""

        def guarded_action(*args: Any, **kwargs: Any) -> None:
            self.guarded(lambda: action(*args, **kwargs))

        return guarded_action

    def guarded(self, action: Callable[[], object]) -> None:
        """Run an action in the host's thread. An exception goes to the report, and the host continues."""
        guarded(self.report, "host callback", action, self.show_error)

    def show_error(self, exc: Exception) -> None:
        """Show an exception to the user in the host's own way, in addition to the report."""

    def follows_residence(self) -> bool:
        """See `FOLLOWS_RESIDENCE`."""
        return self.FOLLOWS_RESIDENCE

    def config(self) -> HostConfig:
        """The configuration that the user has chosen in the host's settings."""
        from modules import shared

        self._follow_log_level()
        resident = None if self.follows_residence() else False
        config = dataclasses.replace(settings.config_from(shared.opts, self.report), resident=resident)
        if config.allow_cpu or self.last_request.comparing:
            # plans on a CPU are for trying things out, and earn nothing; what is compared was asked for
            config = dataclasses.replace(config, earned=False)
        if config.check == "never" and not self.is_tested():
            # what nobody has seen is served as far as it is seen to work
            return dataclasses.replace(config, check="first")
        return config

    def _follow_log_level(self) -> None:
        from modules import shared

        level = settings.log_level(shared.opts, self.report)
        if level != self._log_level:
            self._log_level = level
            logger.setLevel(level)

    @functools.cached_property
    def source(self) -> api.Source:
        """What the API and the tab answer with."""
        why = self.installation.lost.get(webui_probes.JOBS)
        refused = None if why is None else refusing(f"{webui_probes.JOBS.lost}: {why}")
        made, last = self.rehearsals, self.last_request
        prepare, measure, kept = refused or made.prepare, refused or made.measure, made.measurements.all
        compare = refused or last.compare
        jobs = api.Jobs(prepare, measure, made.jobs.cancel, made.jobs.status, kept, compare, last.compared)
        known = self.status, self.bug_report, self.drop_plans, jobs
        return api.Source(*known, self.api_passwords, self.api_is_on, self.subpath, self.busy)

    def status(self, names: bool = True) -> dict[str, Any]:
        """What GET /sfast/v1/status answers. It asks the GPU nothing once a first answer was given.

        Args:
            names: whether reasons have the names that belong to the user.
        """
        config = self.config()
        described, missing = self._machine()
        accelerators = [each for attachment in self.attachments for each in attachment.status()]
        found = {
            "version": self.version,
            "host": self.host_status(),
            "environment": described,
            "busy": self.busy(),
            "no_gpu": None if config.allow_cpu else missing,
            "enabled": config.enabled,
            "unserved": None,
            "model": self.model_name(),
            "job": self.rehearsals.jobs.status(),
            "accelerators": accelerators,
            "eight_bits": self.eight_bits.status(config, accelerators, names),
            **self.report.as_dict(names),
        }
        last = found["last_pass"]
        if not last["accelerated"] and (last["bypassed"] or not last["prepared"]):
            # an accelerator knows the last pass that it ran a plan in, which was another image's
            for plan in (plan for each in found["accelerators"] for plan in each.get("plans", ())):
                plan["last_pass"] = False
        return {**found, "no_gpu": reasons.text(found["no_gpu"]), "badge": words.badge(found)}

    def host_status(self) -> dict[str, Any]:
        """What is known of the host, as the status has it."""
        return {"name": self.HOST, "version": self.host_version(), "remarks": self.remarks()}

    def _machine(self) -> tuple[dict[str, Any], Reason | None]:
        """What this machine has, and why nothing can be accelerated on it. Read again after the first plan: kernels
        were tried by then."""
        tried = self.report.counter("captures") > 0
        if self._described is None or self._described[0] != tried:
            self._described = tried, environment.describe(), environment.no_gpu()
        return self._described[1:]

    def bug_report(self) -> str:
        """The text for a bug report, see `bug_report.text`."""
        from modules import shared

        chosen = {key: getattr(shared.opts, key, None) for key in settings_table.KEYS}
        return bug_report.text(self.status(names=False), chosen)

    def drop_plans(self) -> int:
        """Drop all plans; they are made anew when they are needed. Returns how many there were."""
        return sum(attachment.drop_plans() for attachment in self.attachments)

    def _compresses(self) -> bool:
        """Whether PNG files are compressed by `parallel_png` now."""
        config = self.config()
        return config.enabled and config.png and (config.allow_cpu or environment.no_gpu() is None)

    def _add_axes(self) -> None:
        grid = self.xyz_grid()
        if grid is not None:
            xyz.add_axes(grid)

    def xyz_grid(self) -> Any:
        """The host's module that has the axes of its X/Y/Z plot; None if it has none."""
        return None

    def _tab(self) -> list[Any]:
        # a host goes through the result: our exceptions must leave it an empty one
        try:
            return tab.tabs(tab_actions.actions(self.source))
        except Exception as exc:
            self.report.error("the tab", exc)
            return []

    def busy(self) -> bool:
        """Whether the host is at a job."""
        from modules import shared

        if getattr(getattr(shared, "state", None), "job", ""):
            return True
        # SD.Next forgets its job at the end of each part of it, such as the prompt's encoding
        queue = getattr(sys.modules.get("modules.call_queue"), "queue_lock", None)
        return bool(getattr(queue, "locked", bool)())

    def show_stage(self, stage: str | None) -> None:
        """Show a stage of a preparation in the host's progress bar; None: it has ended."""
        from modules import shared

        state = getattr(shared, "state", None)
        if state is not None and hasattr(state, "textinfo"):
            preparation.show(state, "textinfo", stage)

    def api_is_on(self) -> bool:
        """Whether the host's own API answers."""
        return True

    def subpath(self) -> str:
        """Below which path the host serves its page as well; "" if nowhere."""
        return ""

    def follow_loaded(self) -> None:
        """Accelerate the model that the host has loaded now."""
        raise NotImplementedError

    def loaded(self) -> Accelerator | None:
        """The accelerator of its UNet; None if it has none."""
        raise NotImplementedError

    def name_images(self, images: int | None) -> None:
        """Calls are of so many images from now on; None if that is not known."""
        raise NotImplementedError

    def prompts_one_by_one(self) -> bool:
        """Whether the host calls the model for the prompt and the negative prompt one by one if lengths differ."""
        return False

    def host_version(self) -> str:
        """The host's version, or "unknown"."""
        raise NotImplementedError

    def model_name(self) -> str | None:
        """The name of the loaded model; None if none is loaded."""
        raise NotImplementedError

    def api_passwords(self) -> Mapping[str, str]:
        """The passwords of the host's API by user; empty if it requires none."""
        return {}


def guarded(
    report: Report, stage: str, action: Callable[[], object], show: Callable[[Exception], object] | None = None
) -> None:
    """Run an action inside the host's work. An exception goes to the report, and the host continues.

    Args:
        stage: how the report calls the action.
        show: called with the exception after the report; its exceptions are dropped.
    """
    try:
        action()
    except Exception as exc:
        report.error(stage, exc)
        if show is not None:
            with contextlib.suppress(Exception):
                show(exc)
