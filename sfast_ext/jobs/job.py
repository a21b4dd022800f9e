"""Work that a user starts and may cancel: in its own thread, alone on the GPU, with progress."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from sfast_ext.report import Report, words_of
from sfast_ext.ui.requests import Refused

Row = dict[str, Any]


@dataclass
class Job:
    """One piece of work. Each of its steps gives a row of the result."""

    kind: str
    labels: Sequence[str]
    state: str = "waiting"
    """waiting (for an image to end), running, done, cancelled or failed"""
    rows: list[Row] = field(default_factory=list)
    message: str | None = None
    """Why it failed, in words for the user."""
    began: float | None = None
    ended: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    alone: bool = False
    """Whether it is within the host's queue: what the host is at is this job."""

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self.ended is not None

    def status(self) -> dict[str, Any]:
        """For the tab and the API."""
        done, total = len(self.rows), len(self.labels)
        seconds = 0.0 if self.began is None else (self.ended or time.monotonic()) - self.began
        left = seconds / done * (total - done) if done and not self.over else None
        return {
            "kind": self.kind,
            "state": self.state,
            "done": done,
            "total": total,
            "label": self.labels[done] if done < total and not self.over else None,
            "seconds": round(seconds, 1),
            "seconds_left": None if left is None else round(left, 1),
            "message": self.message,
            "rows": list(self.rows),
        }


class Jobs:
    """Runs one job at a time.

    Args:
        host: the host's own queue: within it nothing else runs on the GPU. Called with the name of the job.
        interrupted: whether the user has interrupted what the host is at.
        interrupt: interrupts it.
    """

    def __init__(
        self,
        report: Report,
        host: Callable[[str], AbstractContextManager[object]],
        interrupted: Callable[[], bool],
        interrupt: Callable[[], object],
    ) -> None:
        self._report, self._host = report, host
        self._interrupted, self._interrupt = interrupted, interrupt
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        kind: str,
        labels: Sequence[str],
        begin: Callable[[], AbstractContextManager[Callable[[int], Row | None]]],
        end: Callable[[Job], object] = lambda _job: None,
    ) -> dict[str, Any]:
        """Start a job and return its status.

        Args:
            labels: of its steps.
            begin: entered within the host's queue; gives the function that does a step by its number. That returns None
                if it was interrupted.
            end: called within the queue when all steps are done.

        Raises:
            Refused: another job runs.
        """
        with self._lock:
            if self._job is not None and not self._job.over:
                raise Refused("another job is running: wait for its end, or cancel it")
            job = self._job = Job(kind, labels)
            # a daemon: if it waits for an image that never ends, it must not keep the process from ending
            self._thread = threading.Thread(
                target=self._run, args=(job, begin, end), name=f"sfast: {kind}", daemon=True
            )
            self._thread.start()
            # but killed inside a compiler, it might crash it
            atexit.unregister(self.close)
            atexit.register(self.close)
            return job.status()

    def cancel(self) -> bool:
        """Cancel the job that runs or waits. Returns whether there is one."""
        with self._lock:
            job = self._job
            if job is None or job.over:
                return False
            job.cancelled.set()
            if job.alone:
                # stops a preparation between its stages; an image that the job waits for is not interrupted
                self._interrupt()
            return True

    def status(self) -> dict[str, Any] | None:
        """The status of the last job; None if there was none."""
        job = self._job
        return None if job is None else job.status()

    def close(self, timeout: float = 30.0) -> None:
        """Cancel the job, and wait for its end if it runs. One that waits for an image does nothing any more."""
        atexit.unregister(self.close)
        self.cancel()
        job, thread = self._job, self._thread
        if job is not None and job.alone and thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def stopped(self, job: Job | None = None) -> bool:
        """Whether the job that runs is to end: it is cancelled, or the host is interrupted."""
        job = job or self._job
        return (job is not None and job.cancelled.is_set()) or self._interrupted()

    def _run(
        self,
        job: Job,
        begin: Callable[[], AbstractContextManager[Callable[[int], Row | None]]],
        end: Callable[[Job], object],
    ) -> None:
        state = "failed"
        try:
            with self._host(f"Stable Fast: {job.kind}"), self._running(job):
                state = self._steps(job, begin)
                if state == "done":
                    end(job)
        except Refused as exc:
            job.message = str(exc)
        except Exception as exc:
            job.message = words_of(exc)
            self._report.error(job.kind, exc)
            state = "failed"
        finally:
            with self._lock:
                job.state, job.ended = state, time.monotonic()

    def _steps(self, job: Job, begin: Callable[[], AbstractContextManager[Callable[[int], Row | None]]]) -> str:
        if job.cancelled.is_set():
            return "cancelled"
        with begin() as step:
            for number in range(len(job.labels)):
                row = None if self.stopped(job) else step(number)
                if row is None:
                    return "cancelled"
                job.rows.append(row)
        return "done"

    @contextlib.contextmanager
    def _running(self, job: Job) -> Any:
        with self._lock:
            job.state, job.began, job.alone = "running", time.monotonic(), True
        try:
            yield
        finally:
            # from here on a cancellation must not interrupt the image that comes after it
            with self._lock:
                job.alone = False
