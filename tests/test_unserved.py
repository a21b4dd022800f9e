"""GPUs on which nothing is accelerated: the original forward runs from the first call on, and costs nothing more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretended_card import GPU, pretended_card

from sfast_ext import Config, accelerate, environment
from sfast_ext.tools.lib import models


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    environment.unserved.cache_clear()
    yield
    environment.unserved.cache_clear()


@contextlib.contextmanager
def on_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None) -> Iterator[Any]:
    with pretended_card(monkeypatch, 1 << 30) as card, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.version, "hip", hip)
        yield card


@torch.no_grad()
@pytest.mark.parametrize(
    ("capability", "hip", "why"),
    [
        ((6, 1), None, "compute capability 6.1"),
        ((5, 2), None, "compute capability 5.2"),
        # an AMD card that answers as Hopper does
        ((9, 4), "6.2.41133", "ROCm"),
        ((7, 0), None, None),
        ((8, 6), None, None),
    ],
)
def test_it_is_asked_before_a_capture(capability, hip, why, monkeypatch):
    with on_card(monkeypatch, capability, hip):
        unet = models.tiny_unet().to(GPU)
        args, kwargs = models.unet_inputs(unet)
        accelerator = accelerate(unet, Config(triton=False))
        for _ in range(2):
            unet(*args, **kwargs)
        report = accelerator.report.as_dict()
        accelerator.release()
    assert report["last_error"] is None
    if why is None:
        assert report["counters"]["captures"] == 1 and not report["reasons"]
    else:
        ((reason, calls),) = report["reasons"].items()
        assert why in reason and calls == 2 and not report["counters"].get("captures")


def test_other_devices_are_not_asked():
    assert environment.unserved(torch.device("cpu")) is None
