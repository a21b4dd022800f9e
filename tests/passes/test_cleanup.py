from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes import cleanup as passes
from sfast_ext.passes import supported

from .support import Traced, randn

X = randn(2, 3, 4, 5)
HALF = X.to(torch.bfloat16)

# Each stands between sin() and cos(), so that what comes in is no input and what comes out no output.
NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout not training": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, training=True),
    "detach": lambda x: x.detach(),
    "cast to what it is": lambda x: x.to(torch.float32).float(),
    "view back and forth": lambda x: x.view(6, 20).view(2, 3, 4, 5),
    "unsqueeze, squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand to its own shape": lambda x: x.expand(2, 3, 4, 5),
    "permute there and back": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "transpose twice": lambda x: x.transpose(1, -1).transpose(-1, 1),
    "three permutes": lambda x: x.permute(1, 2, 3, 0).transpose(0, 3).permute(0, 3, 1, 2),
    "identity permute": lambda x: x.permute(0, -3, 2, 3),
    "slice of everything": lambda x: x[:, :, 0:],
    "times one": lambda x: x * 1 * 1.0,
    "divided by one": lambda x: x / 1.0 / 1,
    "plus nothing": lambda x: x + 0.0 - 0,
    "contiguous, clone": lambda x: x.contiguous().clone(),
    "parts of a value, joined again": lambda x: torch.cat([x[:, :1], x[:, 1:]], 1),
    "three parts, joined again": lambda x: torch.cat([x[..., :2], x[..., 2:3], x[..., 3:5]], -1),
    "contiguous between permutes": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("what", NOTHING)
def test_goes(what: str) -> None:
    traced = Traced(lambda x: NOTHING[what](x.sin()).cos(), X)
    assert traced.rewrite(passes.cleanup) > 0
    assert traced.ops() == {"sin": 1, "cos": 1}
    assert traced.error() == 0


STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout in training": lambda x: F.dropout(x, 0.5, training=True) * 0,
    "integer to float": lambda x: (x > 0).to(torch.int64) * 1.0,
    "broadcasting expand": lambda x: x.mean(1, keepdim=True).expand(2, 3, 4, 5),
    "broadcasting addition of zero": lambda x: x.mean(1) + 0.5,
    "slice with a step": lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, 3, 2),
    "true permute": lambda x: x.permute(0, 2, 3, 1),
    "times two": lambda x: x * 2,
    "times a tensor of one": lambda x: x * x.new_ones(()),
}


@pytest.mark.parametrize("what", STAYS)
def test_stays(what: str) -> None:
    traced = Traced(lambda x: STAYS[what](x.sin()).cos(), X)
    before = traced.ops()
    traced.rewrite(passes.cleanup)
    assert traced.ops() == before
    assert traced.error() == 0


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "another order": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "a part twice": lambda x: torch.cat([x[:, :2], x[:, 1:]], 1),
    "a part that lacks": lambda x: torch.cat([x[:, :1], x[:, 2:]], 1),
    "along another dimension": lambda x: torch.cat([x[:, :, :2], x[:, :, 2:]], 1),
    "of two values": lambda x: torch.cat([x[:, :1], x.exp()[:, 1:]], 1),
    "not all": lambda x: torch.cat([x[:, :1], x[:, 1:2]], 1),
    "with a step": lambda x: torch.cat([x[:, :1], torch.ops.aten.slice.Tensor(x, 1, 1, 3, 2), x[:, 2:]], 1),
    "not from the first": lambda x: torch.cat([x[:, 1:2], x[:, 2:]], 1),
}


@pytest.mark.parametrize("what", JOINED)
def test_other_parts_are_joined(what: str) -> None:
    traced = Traced(lambda x: JOINED[what](x.sin()).cos(), X)
    traced.rewrite(passes.cleanup)
    assert traced.ops()["cat"] == 1 and traced.error() == 0


def test_parts_are_joined_if_something_writes_to_them_or_they_are_returned() -> None:
    def written(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = torch.cat([y[:, :1], y[:, 1:]], 1)
        y.add_(1)
        return z.cos(), y.cos()

    for forward in (
        written,
        lambda x: (y := torch.cat([x[:, :1], x[:, 1:]], 1), y.sin()),
        lambda x: torch.cat([x[:, :1], x[:, 1:]], 1).view(6, 20),
        lambda x: (y := x.sin(), torch.cat([y[:, :1], y[:, 1:]], 1)),
    ):
        traced = Traced(forward, X)
        traced.rewrite(passes.cleanup)
        assert traced.ops()["cat"] == 1 and traced.error() == 0


def test_casts_that_lose_nothing() -> None:
    traced = Traced(lambda x: x.float().to(torch.bfloat16).sin(), HALF)
    assert traced.rewrite(passes.cleanup) == 1
    assert traced.ops() == {"sin": 1}
    traced = Traced(lambda x: x.double().float().sin(), HALF)
    assert traced.rewrite(passes.cleanup) == 1
    assert traced.ops() == {"to": 1, "sin": 1}
    assert traced.error() == 0


def test_casts_that_lose_something() -> None:
    traced = Traced(lambda x: x.to(torch.bfloat16).float().sin(), X)
    assert traced.rewrite(passes.cleanup) == 0
    traced = Traced(lambda x: x.to(torch.float16).float().sin(), HALF)
    assert traced.rewrite(passes.cleanup) == 0
    assert traced.error() == 0


def test_view_becomes_reshape() -> None:
    """Without the copy before it the view would not be one."""
    traced = Traced(lambda x: x.permute(0, 2, 3, 1).contiguous().view(2, 20, 3).sin(), X)
    assert traced.rewrite(passes.cleanup) == 2
    assert traced.ops() == {"permute": 1, "reshape": 1, "sin": 1}
    assert traced.error() == 0


def test_mutated_values_are_left() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = y.clone()  # what y was before it was written to
        view = y.view(6, 20)
        view.add_(1)
        return y.cos(), z.cos()

    traced = Traced(forward, X)
    traced.rewrite(passes.cleanup)
    assert traced.ops()["clone"] == 1
    assert traced.error() == 0


def test_written_copy_is_left() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = y.contiguous().clone().detach()
        z[:, 0] = 0
        return y.cos(), z.cos()

    traced = Traced(forward, X)
    traced.rewrite(passes.cleanup)
    assert traced.ops()["clone"] == 1
    assert traced.error() == 0


def test_output_is_not_the_input() -> None:
    traced = Traced(lambda x: x.clone(), X)
    assert traced.rewrite(passes.cleanup) == 0


def test_asked_for_channels_last_stays() -> None:
    traced = Traced(lambda x: x.contiguous(memory_format=torch.channels_last).sin(), X)
    assert traced.rewrite(passes.cleanup) == 0


def test_dead_code_goes() -> None:
    def forward(x: Tensor) -> Tensor:
        x.cos().exp()
        return x.sin()

    traced = Traced(forward, X)
    traced.rewrite(passes.cleanup)
    assert traced.ops() == {"sin": 1}


def test_regions_without_autocast_go() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x.sin()
        return y.cos()

    traced = Traced(forward, X)
    traced.rewrite(passes.cleanup)
    assert traced.ops() == {"sin": 1, "cos": 1}


def test_regions_with_autocast_are_not_supported() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x.sin()
        return y.cos()

    traced = Traced(forward, X)
    if "_enter_autocast" in traced.ops():  # torch before 2.5 does not record them
        assert not supported(traced.graph)


def test_operations_on_strides_are_not_supported() -> None:
    assert not supported(Traced(lambda x: x.sin().as_strided((2, 2), (1, 2)), X).graph)
    assert supported(Traced(lambda x: x.sin().reshape(-1), X).graph)
