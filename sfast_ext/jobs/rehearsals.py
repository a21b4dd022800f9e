"""Prepare and Measure: what the tab and the API start, on the host's own model and within its own queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch

from sfast_ext.accelerator import Accelerator
from sfast_ext.config import Config
from sfast_ext.jobs.job import Job, Jobs, Row
from sfast_ext.jobs.kept_calls import KeptCall
from sfast_ext.jobs.measurements import Measurements
from sfast_ext.jobs.rehearsal import Rehearsal
from sfast_ext.report import Report
from sfast_ext.ui.requests import Refused, Wanted

PREPARE, MEASURE = "prepare", "measure"


class Host(Protocol):
    """What is asked of a session."""

    HOST: ClassVar[str]
    version: str
    report: Report

    def config(self) -> Config:
        """The user's settings."""

    def follow_loaded(self) -> None:
        """Accelerate the model that is loaded now."""

    def loaded(self) -> Accelerator | None:
        """The accelerator of its UNet."""

    def name_images(self, images: int | None) -> None:
        """Calls are of so many images from now on."""

    def prompts_one_by_one(self) -> bool:
        """Whether prompts of different lengths are separate calls."""


class Rehearsals:
    """Starts the jobs of one session.

    Args:
        jobs: runs them in the host's queue.
    """

    def __init__(self, host: Host, jobs: Jobs) -> None:
        self._host, self.jobs = host, jobs
        self.measurements = Measurements()
        self.before_users_job: Callable[[], object] = lambda: None
        """Called before a job that the user starts: what was begun without him ends."""

    def prepare(self, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """Make plans ahead of time. Returns the job's status.

        Raises:
            Refused: nothing can be prepared now.
        """
        return self._start(PREPARE, wanted, Rehearsal.prepare)

    def measure(self, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """Measure the original and the accelerated model in turns, and keep the result; see `prepare`."""

        def keep(job: Job) -> None:
            accelerator = self._host.loaded()
            if accelerator is not None:
                try:
                    self.measurements.add(accelerator.module, job.rows, self._host.version, self._host.HOST)
                except (OSError, RuntimeError) as exc:
                    job.message = f"measured, but not kept: {exc}"

        if self._host.config().check == "always":
            raise Refused(
                "every call is made twice while 'Compare steps with the WebUI's own' is set to always: "
                "set it to first use in Settings > Stable Fast"
            )
        return self._start(MEASURE, wanted, Rehearsal.measure, keep)

    def close(self) -> None:
        """End what runs, and what would begin by itself."""
        self.before_users_job()
        self.jobs.close()

    def ahead(self, kept: KeptCall, wanted: Callable[[Accelerator | None], bool]) -> dict[str, Any]:
        """Make the plan of a call that an earlier process kept. Returns the job's status.

        Args:
            wanted: asked within the host's queue, of the model that is loaded then.

        Raises:
            Refused: another job runs.
        """

        @contextlib.contextmanager
        def begin() -> Iterator[Callable[[int], Row | None]]:
            if not wanted(self._host.loaded()):
                yield lambda number: None
                return
            with self._begun(lambda rehearsal, number: rehearsal.prepare(kept.wanted), kept) as step:
                try:
                    yield step
                finally:
                    if torch.cuda.is_initialized():
                        # what the calls worked in: nothing needs it until an image is made
                        torch.cuda.empty_cache()

        return self.jobs.start(PREPARE, [kept.wanted.label], begin)

    def _start(
        self,
        kind: str,
        wanted: Sequence[Wanted],
        work: Callable[[Rehearsal, Wanted], Row | None],
        end: Callable[[Job], object] = lambda _job: None,
    ) -> dict[str, Any]:
        if not self._host.config().enabled:
            raise Refused("Stable Fast is switched off: switch it on in Settings > Stable Fast")
        self.before_users_job()
        self._rehearsal()
        labels = [each.label for each in wanted]
        return self.jobs.start(
            kind, labels, lambda: self._begun(lambda rehearsal, number: work(rehearsal, wanted[number])), end
        )

    @contextlib.contextmanager
    def _begun(
        self, work: Callable[[Rehearsal, int], Row | None], kept: KeptCall | None = None
    ) -> Iterator[Callable[[int], Row | None]]:
        """Around a job, within the host's queue: gives the function that does a step."""
        # while the job waited, another model may have been loaded
        self._host.follow_loaded()
        rehearsal = self._rehearsal(kept)
        try:
            with rehearsal.begun():
                yield lambda number: work(rehearsal, number)
        finally:
            self._host.name_images(None)

    def _rehearsal(self, kept: KeptCall | None = None) -> Rehearsal:
        host = self._host
        one_by_one = host.prompts_one_by_one()
        return Rehearsal(host.loaded(), host.report, host.name_images, lambda: self.jobs.stopped(), one_by_one, kept)
