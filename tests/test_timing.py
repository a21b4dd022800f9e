"""The timer, on stand-in clocks: fine, in steps of 4 ms, one that stands still, one that becomes coarser."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from clocks import StandInClock
from coarse_clock import sitecustomize as coarse_clock

from sfast_ext import timing
from sfast_ext.config import Config
from sfast_ext.runtime import verify
from sfast_ext.timing import MAX_S, STEPS, Pace, Timer
from sfast_ext.tools.lib import engines, rates

CPU = torch.device("cpu")


def test_one_call_is_enough_on_a_fine_clock():
    clock = StandInClock()
    assert Timer(clock).milliseconds(clock.work(0.003)) == pytest.approx(3.0, rel=1e-3)
    assert clock.calls == 1 and clock.now < 0.0031


@pytest.mark.parametrize("seconds", [2e-5, 0.0013, 0.003, 0.004, 0.0501, 0.3])
def test_calls_are_repeated_on_a_coarse_clock(seconds):
    clock = StandInClock(0.004)
    assert Timer(clock).milliseconds(clock.work(seconds)) == pytest.approx(1e3 * seconds, rel=1 / STEPS + 0.005)
    least = STEPS * 0.004 / seconds
    assert least - 1 <= clock.calls <= 1.02 * least + 2


@pytest.mark.parametrize("step", [1e-9, 1e-7, 1e-6, 1e-3, 0.004, 0.0156])
def test_a_step_is_what_the_clock_moves_by(step):
    # that of a fine clock is what a reading takes
    clock = StandInClock(step)
    assert Timer(clock).step() == pytest.approx(max(step, clock.reading), rel=0.03)


def test_a_fine_clock_is_not_taken_for_a_coarse_one_if_the_thread_is_interrupted():
    clock = StandInClock()
    interrupted = iter([0.0, 0.0, 0.02])  # between the readings of the second change

    def read():
        clock.now += next(interrupted, 0.0)
        return clock()

    assert Timer(read).step() < 1e-6


def test_a_clock_that_gives_each_value_several_times():
    values = iter(range(10**9))
    timer = Timer(lambda: next(values) // 5 * 1e-3)
    assert timer.step() == pytest.approx(1e-3)
    assert timer.milliseconds(lambda: None) == pytest.approx(1 / 5, rel=1 / STEPS)


def test_of_very_coarse_steps_fewer_are_waited_for():
    clock = StandInClock(0.1, reading=1e-4)
    assert Timer(clock).milliseconds(clock.work(0.01)) == pytest.approx(10, rel=0.25)
    assert clock.calls <= 1.25 * MAX_S / 0.01
    clock = StandInClock(2.0, reading=1e-3)
    assert Timer(clock).milliseconds(clock.work(0.5)) > 0


def test_a_core_whose_clock_is_coarser():
    clock = StandInClock()
    work = clock.work(0.003)

    def migrate():
        clock.step = 0.004
        work()

    assert Timer(clock).milliseconds(migrate) == pytest.approx(3.0, rel=1 / STEPS + 0.005)
    assert clock.calls > STEPS


def test_a_clock_that_stands_still_is_told(monkeypatch):
    monkeypatch.setattr(timing, "_READINGS", 1000)
    with pytest.raises(RuntimeError, match="stood still for 1,000 readings"):
        Timer(lambda: 7.0).milliseconds(lambda: None)


@pytest.mark.parametrize(("step", "seconds", "means"), [(1e-9, 0.003, 7), (0.004, 0.1, 3), (0.004, 0.3, 7)])
def test_of_many_calls_each_is_timed_or_several_together(step, seconds, means):
    clock = StandInClock(step)
    taken = Timer(clock).times(clock.work(seconds), 7)
    assert taken == pytest.approx([1e3 * seconds] * means, rel=0.03) and 7 <= clock.calls <= 9


@pytest.fixture
def coarse(monkeypatch):
    """The timer of plans has a clock of 4 ms steps."""
    clock = StandInClock(0.004)
    monkeypatch.setattr(verify, "timer", Timer(clock))
    return clock


@pytest.mark.parametrize("times", [1, 3])
def test_a_plans_time_on_a_coarse_clock(coarse, times):
    assert verify.milliseconds(coarse.work(0.0007), CPU, times) == pytest.approx(0.7, rel=0.03)


def test_the_benchmarks_clock_and_its_rates(coarse):
    clock = engines.Clock(CPU, Timer(coarse))
    product = rates.Product(CPU, 16)
    taken = clock.times(coarse.work(1e-4), 5)
    assert taken == pytest.approx([0.1], rel=0.03) and coarse.calls > 5
    assert rates.tera(product, taken) == pytest.approx(product.work / 1e-4 / 1e12, rel=0.03)


@pytest.mark.parametrize(("original_s", "told"), [(0.0, None), (0.008, 8.0)])
def test_an_original_too_quick_for_the_clock_has_no_time(coarse, original_s, told):
    class Proven:
        device = CPU
        ms_before = ms_after = error = rounding_error = noise = None
        banks, rounds_inputs = (), False

    proven, x = Proven(), torch.ones(3)
    work = coarse.work(0.001)
    new = verify.Verification(proven, Config(), lambda: work() or [x], pytest.fail, x, original_s)
    refused = verify.verify_plan(new)
    assert refused is None and proven.error == 0
    assert proven.ms_before == told and proven.ms_after == pytest.approx(1.0, rel=0.03)


def test_stepped_clocks():
    readings = iter([0, 3_999_999, 4_000_000, 11_000_000])
    seconds, nanoseconds = coarse_clock.stepped(lambda: next(readings), 0.004)
    assert [seconds(), nanoseconds(), seconds(), nanoseconds()] == [0.0, 0, 0.004, 8_000_000]


@pytest.mark.parametrize("asked", ["4 ms", "0", "-1", "nan", "5"])
def test_a_step_that_is_none_is_refused(asked):
    assert coarse_clock.step_asked({}) is None
    assert coarse_clock.step_asked({coarse_clock.VARIABLE: "0.004"}) == 0.004
    with pytest.raises(ValueError, match="give the step in seconds"):
        coarse_clock.step_asked({coarse_clock.VARIABLE: asked})


CHILD = """
import coarse_clock.sitecustomize
import subprocess, sys
from time import monotonic, perf_counter, perf_counter_ns, time
print(*({read() for _ in range(300)}.__len__() < 9 for read in (monotonic, perf_counter, perf_counter_ns, time)))
# a process of its own has them before it imports anything
script = "from time import perf_counter_ns as read; print({read() % 100_000_000 for _ in range(300)} == {0})"
print(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
"""


def test_the_suites_coarse_clock_reaches_child_processes(monkeypatch):
    monkeypatch.setenv(coarse_clock.VARIABLE, "0.1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    told = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600
    )
    assert told.stdout.split() == ["True"] * 5, told


def test_the_suites_clock_is_what_was_asked_for():
    step = getattr(time, "sfast_test_clock_step", None)
    assert step == coarse_clock.step_asked(coarse_clock.os.environ)
    if step is not None:
        # on a busy machine the thread may be interrupted for several steps, again and again
        assert min(timing.timer.step() for _ in range(20)) == pytest.approx(step, rel=1e-3)


def test_the_pace_is_that_of_calls_one_after_the_other():
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.per_second() is None
    for _ in range(5):
        pace.tick()
        now[0] += 0.25
    assert pace.per_second() == 4
    now[0] += 100
    pace.restart()
    pace.tick()
    # two calls do not make a pace: that of the image before is kept
    pace.tick()
    assert pace.per_second() == 4
    for _ in range(3):
        now[0] += 0.5
        pace.tick()
    assert pace.per_second() == pytest.approx(4 / 1.5)
