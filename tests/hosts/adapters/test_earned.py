"""Hires fix and repainted faces in a WebUI: sizes that never repeat get no plan, and those that do get theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit")
from hosts.standins import a1111 as standin
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.hosts.session import Session
from sfast_ext.runtime import plan_cache
from sfast_ext.ui import settings, settings_table


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The WebUI, in which plans have to be earned as on a GPU."""
    # no clock decides: what plans save on a CPU depends on what else it does
    monkeypatch.setattr(plan_cache.Investment, "debt", lambda self: 1.0)
    monkeypatch.setattr(plan_cache.Earnings, "_expected", lambda self: 0.0)
    as_given = Session.config
    monkeypatch.setattr(Session, "config", lambda self: dataclasses.replace(as_given(self), earned=True))
    with standin.running(sfast_allow_cpu=True) as host:
        a1111.start("test")
        host.load(1)
        yield host
        a1111.A1111Session.stop()
        assert host.errors == []


def made(host: Any, *sizes: int) -> int:
    """How many plans are made for an image with passes of these sizes."""
    report = a1111.A1111Session.running.report
    before = report.counter("captures")
    for size in sizes:
        host.generate(size=size, steps=4)
    return report.counter("captures") - before


def test_sizes_that_never_repeat_get_no_plan(host):
    for sizes in ((8, 16, 10, 12, 14), (18, 20, 22, 24, 26), (28, 30)):
        assert made(host, *sizes) == 0
    report = a1111.A1111Session.running.report
    assert not report.counter("eager_runs")
    assert any("is new" in reason for reason in report.as_dict()["reasons_since_start"])


@pytest.mark.long
def test_faces_in_sizes_that_never_repeat_get_no_plan(host):
    assert made(host, 8, 16, 10, 12, 14) == 0
    assert made(host, 8, 18, 20, 22, 24) == 1
    assert made(host, 8, 26, 28, 30, 32) == 0
    assert a1111.A1111Session.running.report.counter("eager_runs") == 3 + 4


def test_who_switches_it_off_and_on_again_gets_a_plan_at_once(host):
    assert made(host, 8) == 0
    for _ in range(2):
        host.opts.sfast_enabled = False
        assert made(host, 8) == 0
        host.opts.sfast_enabled = True
        assert made(host, 8) == 1
    assert made(host, 8) == 0 and made(host, 16) == 0


def test_sizes_that_repeat_get_their_plans_with_the_second_image(host):
    assert made(host, 8, 16, 10) == 0
    assert made(host, 8, 16, 10) == 3
    assert made(host, 8, 16, 10) == 0
    assert made(host, 8, 16, 10, 12) == 0


def test_two_faces_of_one_size_in_one_image_repeat(host):
    assert made(host, 8, 10, 10, 10) == 1


def test_with_8_bits_the_first_plan_is_made_at_once(host):
    assert made(host, 10) == 0
    setattr(host.opts, settings.PRESET.key, settings.EIGHT)
    assert made(host, 8) == 1


@pytest.mark.parametrize("cpu", [True, False])
def test_plans_on_a_cpu_need_not_be_earned(cpu):
    with standin.running(**({"sfast_allow_cpu": True} if cpu else {})):
        a1111.start("test")
        try:
            assert a1111.A1111Session.running.config().earned is not cpu
            assert settings_table.HostConfig().earned
        finally:
            a1111.A1111Session.stop()
