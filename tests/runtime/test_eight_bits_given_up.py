"""Plans with 8-bit integers that fail, or that a lower tolerance does not allow: calls are accelerated without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import eight_bit_kernels
import pytest
import torch

from sfast_ext import Config
from sfast_ext.kernels.backend import health
from sfast_ext.runtime import plan_builder

from .eight_bits import LAYERS, ON, On, outlier


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    eight_bit_kernels.available(monkeypatch)
    with torch.no_grad():
        yield
    health.clear()


@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, ValueError])
def test_a_run_that_fails_is_left_for_a_plan_without_8_bits(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    on = On()
    for _ in range(3):
        on.call()
    with monkeypatch.context() as patch:
        # from no kernel, which would be disabled
        patch.setattr(on.plan, "run_eagerly", lambda leaves: (_ for _ in ()).throw(kind("CUDA out of memory")))
        assert max([on.error() for _ in range(3)]) < 0.01
    on.call()
    runs = on.count("eager_runs")
    assert on.error() < 0.01 and on.count("eager_runs") == runs + 1
    assert on.status()["layers"] == 0 and "the accelerated step failed" in on.status()["reason"]["text"]


def test_a_lower_tolerance_keeps_further_layers_and_does_not_bypass() -> None:
    on = On()
    for _ in range(3):
        on.call()
    error = on.plan.error
    assert error is not None
    # twice the tolerance is the limit
    on.acc.configure(Config(allow_cpu=True, eight_bits=True, tolerance=0.3 * error))
    on.call()
    runs = on.count("eager_runs")
    assert 0 < on.error() < 0.05 and on.count("eager_runs") == runs + 1
    assert on.status()["layers"] < LAYERS


def test_another_tolerance_forgets_why_8_bits_were_not_used() -> None:
    on = On(Config(allow_cpu=True, eight_bits=True, tolerance=1e-9))
    on.call()
    assert on.status()["reason"] is not None and on.status()["kept"]
    on.acc.configure(ON)
    on.call()
    assert 0 < on.error() < 0.05
    assert on.status()["layers"] == LAYERS and on.status()["reason"] is None and on.status()["kept"] == []


def test_another_tolerance_leaves_plans_and_what_is_told_of_them() -> None:
    on = On()
    on.both(outlier)
    for _ in range(2):
        on.call()
    told = on.status()
    assert told["kept"] and told["layers"]
    on.acc.configure(Config(allow_cpu=True, eight_bits=True, tolerance=0.2))
    on.call()
    assert on.status() == told and on.count("captures") == 1


def test_a_plan_whose_weights_cannot_be_read_back_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(plan_builder, "state_of_weights", broken)
    on = On()
    on.call()
    assert on.status()["layers"] == 0 and on.status()["bytes"] == 0
    assert on.error() < 0.01 and "injected" in on.status()["reason"]["text"]
