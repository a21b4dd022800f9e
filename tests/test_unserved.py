"""GPUs on which nothing is accelerated: the original forward runs from the first call on, and costs nothing more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretended_card import GPU, pretended_card

from sfast_ext import Config, accelerate, environment, reasons
from sfast_ext.kernels.backend import nvrtc as nvrtc_of_torch
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


@pytest.mark.long(but=[0, 1, 2, 4])
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


@pytest.mark.parametrize(
    ("capability", "hip", "triton", "nvrtc", "said"),
    [
        ((6, 1), None, True, True, [f"Nothing is accelerated: {reasons.OLD_GPU('6.1', '7.0')}."]),
        ((9, 4), "6.2", False, True, [f"Nothing is accelerated: {reasons.ROCM()}."]),
        ((8, 6), None, False, True, ["Triton does not import (no file); kernels in CUDA C++ are used instead."]),
        ((8, 6), None, False, False, ["Triton does not import (no file); PyTorch's own kernels are used instead."]),
        ((7, 5), None, "old", True, ["it is too old; kernels in CUDA C++ are used instead."]),
        ((8, 6), None, True, False, []),
    ],
)
def test_what_does_not_work_is_said_with_what_runs_instead(capability, hip, triton, nvrtc, said, monkeypatch):
    monkeypatch.setattr(environment, "has_triton", lambda: bool(triton))
    monkeypatch.setattr(environment, "triton_error", lambda: "no file")
    monkeypatch.setattr(environment, "triton_refusal", lambda *_: "it is too old" if triton == "old" else None)
    monkeypatch.setattr(environment, "left_out", lambda device: [])
    monkeypatch.setattr(nvrtc_of_torch, "supported", lambda device: nvrtc)
    with on_card(monkeypatch, capability, hip):
        assert environment.known_bad() == said


def test_without_a_gpu_nothing_else_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.known_bad() == ["There is no NVIDIA GPU that torch can use; nothing is accelerated."]
    assert environment.no_gpu() == reasons.NO_GPU()
