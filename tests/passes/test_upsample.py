from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes.upsample import upsample

from .support import Traced, randn

X = randn(2, 8, 5, 7)

TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "by two": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "by two numbers": lambda x: F.interpolate(x, scale_factor=(1.5, 2.3), mode="nearest"),
    "to a size": lambda x: F.interpolate(x, size=(9, 13), mode="nearest"),
    "to a smaller size": lambda x: F.interpolate(x, size=(2, 7), mode="nearest"),
    "by the module": torch.nn.Upsample(scale_factor=2),
    "recomputed": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest", recompute_scale_factor=True),
    "channels last": lambda x: F.interpolate(x.to(memory_format=torch.channels_last), scale_factor=2.0),
}


@pytest.mark.parametrize("what", TAKEN)
def test_images_are_upsampled_by_the_kernel(what: str) -> None:
    traced = Traced(TAKEN[what], X)
    assert traced.rewrite(upsample) == 1
    assert traced.ops()["upsample"] == 1
    assert traced.error() == 0


def test_a_sum_is_made_as_it_is_read() -> None:
    traced = Traced(lambda x: F.interpolate(x.sin() + x.cos(), scale_factor=2.0), X)
    assert traced.rewrite(upsample) == 1
    assert traced.ops()["add"] == 0 and "residual" in traced.find("upsample")[0].kwargs
    assert traced.error() == 0


def test_without_triton(with_nvrtc: None) -> None:
    traced = Traced(lambda x: F.interpolate(x.sin() + x.cos(), scale_factor=2.0), X)
    traced.ctx.triton = False
    assert traced.rewrite(upsample) == 1 and traced.ops()["add"] == 0


def needed_elsewhere(x: Tensor) -> list[Tensor]:
    total = x.sin() + x.cos()
    return [F.interpolate(total, scale_factor=2.0), total * 2]


SUMS: dict[str, Callable[[Tensor], Any]] = {
    "needed elsewhere": needed_elsewhere,
    "with a factor": lambda x: F.interpolate(torch.add(x.sin(), x.cos(), alpha=2), scale_factor=2.0),
    "with a number": lambda x: F.interpolate(x.sin() + 1, scale_factor=2.0),
    "of other shapes": lambda x: F.interpolate(x.sin() + x.cos()[:, :1], scale_factor=2.0),
    "of other types": lambda x: F.interpolate(x.sin() + x.cos().half(), scale_factor=2.0),
}


@pytest.mark.parametrize("what", SUMS)
def test_other_sums_stay(what: str) -> None:
    traced = Traced(SUMS[what], X)
    assert traced.rewrite(upsample) == 1
    assert traced.ops()["add"] == 1
    assert traced.error() == 0


STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "exact": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"),
    "a sequence": lambda x: F.interpolate(x.flatten(2), scale_factor=2.0, mode="nearest"),
    "a volume": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="nearest"),
    "in float64": lambda x: F.interpolate(x.double(), scale_factor=2.0, mode="nearest"),
    "written to": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest").mul_(2),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(STAYS[what], X)
    before = traced.ops()
    assert traced.rewrite(upsample) == 0
    assert traced.ops() == before
    assert traced.error() == 0
