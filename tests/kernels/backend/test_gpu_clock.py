"""The GPU's time of launches: by a made-up GPU, and by a real one."""

from __future__ import annotations

import time

import pytest
import torch

from sfast_ext.kernels.backend import gpu_clock


class Gpu:
    """A GPU whose clock and whose CPU's clock are one number, in clock cycles."""

    def __init__(self, kernel: int, launch: int) -> None:
        self.kernel, self.launch = kernel, launch
        self.now = self.free = 0
        self.slept: list[int] = []

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles)
        self.free = max(self.now, self.free) + cycles

    def run(self) -> None:
        self.now += self.launch
        self.free = max(self.now, self.free) + self.kernel

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0

    def record(self) -> None:
        self.at = max(self.gpu.now, self.gpu.free)

    def query(self) -> bool:
        return self.at <= self.gpu.now

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.mark.parametrize(
    ("kernel", "launch", "slept"),
    [
        (10, 1, [100]),
        (1000, 90, [100, 400]),  # of three launches the last is late at first
        (10, 90, [100, 400]),
        (10, 200, [100, 400, 1600]),
    ],
)
def test_launches_that_are_late_are_timed_again_after_a_longer_sleep(monkeypatch, kernel, launch, slept) -> None:
    gpu = Gpu(kernel, launch)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    assert gpu_clock.milliseconds(gpu.run, 3, 100) == kernel
    assert gpu.slept == slept


def test_a_call_that_waits_for_the_gpu_is_tried_a_few_times(monkeypatch) -> None:
    gpu = Gpu(10, 1)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)

    def waits() -> None:
        gpu.run()
        gpu.now = gpu.free

    assert gpu_clock.milliseconds(waits, 3, 100) < 15
    assert gpu.slept == [100, 400, 1600, 6400]


@pytest.mark.gpu
def test_a_slow_cpu_does_not_count() -> None:
    x = torch.ones(1 << 20, device="cuda")

    def run() -> None:
        until = time.perf_counter() + 3e-4
        while time.perf_counter() < until:
            pass
        x.mul_(1.0)

    run()
    assert gpu_clock.milliseconds(run, 4, 400_000) < 0.1
