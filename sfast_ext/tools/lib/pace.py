"""How long a run will take on a CPU, said before it begins."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from sfast_ext.tools.lib import models

SMALL = 20_000_000
"""Weights of a model below which one thread of a CPU is as fast as several."""
LONG_S = 60.0
"""Seconds from which a run is long: a person would wonder."""


@contextlib.contextmanager
def said(device: torch.device, calls: int) -> Iterator[None]:
    """Within, one call is made; afterwards it is said how long so many take on a CPU, if that is long."""
    began = time.perf_counter()
    yield
    told = remark(time.perf_counter() - began, calls) if device.type == "cpu" else None
    if told is not None:
        print(told, file=sys.stderr, flush=True)


def few_threads(model: torch.nn.Module) -> None:
    """From now on this process computes in one thread, if the model is small: threads that wait for each other cost
    more than they save, many times as much if other programs run."""
    if sum(weight.numel() for weight in model.parameters()) < SMALL:
        torch.set_num_threads(1)


@torch.no_grad()
def of_images(device: torch.device, unet: Any, size: tuple[int, int], calls: int) -> None:
    """The same for a run that makes images, by a call of the UNet."""
    if device.type == "cpu":
        args, kwargs = models.unet_inputs(unet, *size)
        with said(device, calls):
            unet(*args, **kwargs)


def remark(seconds: float, calls: int) -> str | None:
    """What to say of so many calls of so many seconds each; None if they are soon done."""
    total = seconds * calls
    if total < LONG_S:
        return None
    takes = f"{total / 60:.0f} min" if total < 5400 else f"{total / 3600:.1f} h"
    return (
        f"There is no NVIDIA GPU here. On the CPU one call of this model takes {seconds:.1f} s, and the whole run about"
        f" {takes}. Ctrl-C ends it; a model whose name begins with tiny-, a smaller --size or fewer calls take less."
    )
