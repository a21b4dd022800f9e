"""What a user starts: one at a time, behind the host's images, cancelled at any moment."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from sfast_ext.jobs.job import Jobs
from sfast_ext.report import Report
from sfast_ext.ui.requests import Refused

LONG = 30.0


class Host:
    """A queue, and a flag that its user sets."""

    def __init__(self):
        self.lock, self.interrupted, self.names, self.report = threading.Lock(), False, [], Report()
        self.jobs = Jobs(self.report, self.queue, lambda: self.interrupted, self.interrupt)

    def interrupt(self):
        self.interrupted = True

    @contextlib.contextmanager
    def queue(self, name):
        with self.lock:
            self.names.append(name)
            try:
                yield
            finally:
                self.interrupted = False

    def start(self, step, labels=("a", "b"), **more):
        return self.jobs.start("prepare", labels, lambda: contextlib.nullcontext(step), **more)

    def ended(self):
        self.jobs._thread.join(LONG)
        return self.jobs.status()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.jobs.close()
    assert not host.lock.locked() and not host.interrupted


def test_each_step_gives_a_row(host):
    kept = []
    assert host.jobs.status() is None
    first = host.start(lambda number: {"n": number}, end=lambda job: kept.extend(job.rows))
    assert first["total"] == 2
    job = host.ended()
    assert (job["state"], job["done"], job["label"], job["seconds_left"]) == ("done", 2, None, None)
    assert job["rows"] == kept == [{"n": 0}, {"n": 1}] and host.names == ["Stable Fast: prepare"]


def test_progress_and_seconds_left(host):
    go, seen = threading.Event(), threading.Event()

    def step(number):
        if number == 0:
            time.sleep(0.05)
        else:
            seen.set()
            assert go.wait(LONG)
        return {}

    host.start(step, ("a", "b", "c"))
    assert seen.wait(LONG)
    job = host.jobs.status()
    assert (job["state"], job["done"], job["label"]) == ("running", 1, "b")
    assert job["seconds_left"] == pytest.approx(2 * job["seconds"], abs=0.2)
    go.set()
    host.ended()


def test_one_at_a_time_and_none_beside_an_image(host):
    done = []
    with host.lock:
        assert host.start(lambda number: done.append(number) or {})["state"] == "waiting"
        with pytest.raises(Refused, match="another job"):
            host.start(lambda number: {})
        time.sleep(0.05)
        assert not done and host.jobs.status()["state"] == "waiting"
    assert host.ended()["state"] == "done"
    host.start(lambda number: {})
    assert host.ended()["state"] == "done"


def test_a_job_that_waits_is_cancelled_without_interrupting_the_image(host):
    done = []
    with host.lock:
        host.start(lambda number: done.append(number) or {})
        assert host.jobs.cancel() and not host.interrupted
    assert host.ended()["state"] == "cancelled" and not done
    assert not host.jobs.cancel()


@pytest.mark.parametrize("by", ["cancel", "the host", "the step itself"])
def test_a_job_that_runs_is_stopped(host, by):
    seen = []

    def step(number):
        {"cancel": host.jobs.cancel, "the host": host.interrupt, "the step itself": lambda: None}[by]()
        seen.append(host.interrupted)
        return None if by == "the step itself" else {}

    kept = []
    host.start(step, end=kept.append)
    job = host.ended()
    assert job["state"] == "cancelled" and job["done"] == (0 if by == "the step itself" else 1) and not kept
    # a preparation asks the host between its stages
    assert seen == [by != "the step itself"]


@pytest.mark.parametrize(("exc", "said"), [(Refused("make one image"), "make one"), (KeyError("x"), "KeyError")])
def test_a_job_that_fails_says_why(host, exc, said):
    def step(number):
        raise exc

    host.start(step)
    job = host.ended()
    assert job["state"] == "failed" and said in job["message"]
    assert (host.report.counter("errors") > 0) == isinstance(exc, KeyError)


def test_closing_does_not_wait_for_an_image(host):
    done = []
    with host.lock:
        host.start(lambda number: done.append(number) or {})
        started = time.monotonic()
        host.jobs.close()
        assert time.monotonic() - started < LONG / 2
    assert host.ended()["state"] == "cancelled" and not done


def test_closing_waits_for_the_end(host):
    begun = threading.Event()

    def step(number):
        begun.set()
        time.sleep(0.05)
        return {}

    host.start(step, [str(n) for n in range(1000)])
    assert begun.wait(LONG)
    host.jobs.close()
    assert host.jobs.status()["state"] == "cancelled"
