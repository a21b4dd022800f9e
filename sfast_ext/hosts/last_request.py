"""The request that the last image was made of, and that image made again with and without the extension.

It is made as the host's own scripts make variations of a request, such as those of its X/Y/Z plot: from a copy of it,
by the function `process_images`, with the switch among the settings of that request.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from sfast_ext import environment, reasons
from sfast_ext.hosts import per_request
from sfast_ext.jobs.job import Job, Row
from sfast_ext.jobs.rehearsals import Rehearsals
from sfast_ext.report import Report, words_of
from sfast_ext.ui import settings_table
from sfast_ext.ui.comparison import Compared, Made, compared
from sfast_ext.ui.requests import Refused
from sfast_ext.ui.settings_table import HostConfig

COMPARE = "compare"
KEY = settings_table.ENABLED.key
LABELS = ("without Stable Fast", "with Stable Fast")
"""Without it first: what it does is undone for that, and is prepared again at the end."""
NO_IMAGE = "make one image first: it is made again, with the same seed"
NONE_MADE = "the WebUI made no image"


class Session(Protocol):
    """What is asked of a session."""

    report: Report
    rehearsals: Rehearsals

    def config(self) -> HostConfig:
        """The user's settings."""

    def guarded(self, action: Callable[[], object]) -> None:
        """Run an action. An exception goes to the report."""


class LastRequest:
    """Of one session: keeps a copy of the last request, as it was before the host worked on it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._request: Any = None
        self._within: set[int] = set()
        self.comparing = False
        """Whether the image with the extension is being made. Its plans were asked for."""
        self._found: Compared | None = None

    def around(self, original: Callable[..., Any], p: Any, *args: Any, **kwargs: Any) -> Any:
        """Laid around the host's `process_images_inner`. A request that another one makes within itself, such as that
        of an extension which draws faces anew, is a part of that."""
        thread = threading.get_ident()
        if thread in self._within:
            return original(p, *args, **kwargs)
        kept = None
        try:
            kept = _copied(p)
        except Exception as exc:  # of a class of the host's or of an extension's
            self._session.report.once("last image", f"cannot be compared: {words_of(exc)}")
        self._within.add(thread)
        try:
            result = original(p, *args, **kwargs)
        finally:
            self._within.discard(thread)
        self._session.guarded(lambda: self._keep(kept, result))
        return result

    def forget(self) -> None:
        """Keep nothing: the images and models that a request holds are the host's."""
        self._request = self._found = None

    def compared(self) -> Compared | None:
        """What came of the last comparison; None if there was none."""
        return self._found

    def compare(self) -> dict[str, Any]:
        """Start a job that makes the image with and without the extension. Returns its status.

        Raises:
            Refused: there is no image, or nothing is accelerated here.
        """
        missing = None if self._session.config().allow_cpu else environment.no_gpu()
        if missing is not None:
            raise Refused(f"nothing is accelerated on this machine: {reasons.text(missing)}")
        if self._request is None:
            raise Refused(NO_IMAGE)
        self._session.rehearsals.before_users_job()
        jobs = self._session.rehearsals.jobs
        made: list[Made] = []

        def step(number: int) -> Row | None:
            made.append(self.again(number == 1))
            if made[number].steps["prepared"] and not jobs.stopped():
                # what it is compared with has nothing to prepare
                made[number] = self.again(True)
            if jobs.stopped():
                return None
            return {"label": LABELS[number], "ready": True, "reason": made[number].reason}

        @contextlib.contextmanager
        def begin() -> Iterator[Callable[[int], Row | None]]:
            yield step

        def end(_job: Job) -> None:
            original, accelerated = made
            self._found = compared(accelerated, original)

        return jobs.start(COMPARE, LABELS, begin, end)

    def again(self, accelerated: bool) -> Made:
        """The image of the last request, which is saved nowhere.

        Raises:
            Refused: the host makes none.
        """
        from modules import processing, shared

        request = self._request
        if request is None:
            raise Refused(NO_IMAGE)
        p = _copied(request)
        p.do_not_save_samples = p.do_not_save_grid = True
        p.n_iter = 1
        # a grid of the host's keeps settings from one of its images to the next
        p.override_settings_restore_afterwards = True
        chosen = {KEY: accelerated}
        p.override_settings = {**(p.override_settings or {}), **chosen}
        setattr(p, per_request.FORCED, chosen)
        was, thread = getattr(shared.opts, KEY), threading.get_ident()
        self._within.add(thread)
        self.comparing = accelerated
        try:
            with self._session.report.tally() as tally:
                began = time.perf_counter()
                result = processing.process_images(p)
                seconds = time.perf_counter() - began
        finally:
            self.comparing = False
            self._within.discard(thread)
            if getattr(shared.opts, KEY) != was:
                setattr(shared.opts, KEY, was)
            close = getattr(p, "close", None)
            if close is not None:
                close()
        images = getattr(result, "images", None) or []
        first = getattr(result, "index_of_first_image", 0)
        if len(images) <= first:
            raise Refused(NONE_MADE)
        steps = {"accelerated": tally.accelerated, "prepared": tally.prepared, "original": tally.bypassed}
        return Made(images[first], seconds, steps, reasons.text(tally.reason) if accelerated else None, _asked(result))

    def _keep(self, p: Any, result: Any) -> None:
        if p is None or not getattr(result, "images", None):
            return
        # what was chosen at random is chosen now
        for name, all_of in (("seed", "all_seeds"), ("subseed", "all_subseeds")):
            chosen = getattr(result, all_of, None)
            if chosen and not isinstance(getattr(p, name, None), list):
                setattr(p, name, chosen[0])
        self._request = p


def _copied(p: Any) -> Any:
    """A copy of a request. Lists and dictionaries in it are copies too: hosts and scripts write to them."""
    copied = copy.copy(p)
    for name, value in vars(copied).items():
        if type(value) in (list, dict):
            copied.__dict__[name] = value.copy()
    return copied


def _asked(result: Any) -> tuple[Any, ...]:
    names = ("all_prompts", "all_negative_prompts", "all_seeds", "all_subseeds")
    return tuple(repr(getattr(result, name, None)) for name in names)
