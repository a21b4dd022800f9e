from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.conv import narrow_conv as kernel
from sfast_ext.passes.bias_add import bias_add
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.narrow_conv import narrow_conv

from .support import OTHER_CONVOLUTIONS, Traced, randn

HALF = torch.bfloat16
X = randn(2, 4, 9, 11).to(HALF)


class Ends(nn.Module):
    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        some = {"kernel_size": 3, "padding": 1} | options
        self.first, self.last = nn.Conv2d(4, 32, **some), nn.Conv2d(32, 4, **some)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


PLAIN: Callable[..., Any] = lambda m, x: m.last(F.silu(m.first(x)))


def rewritten(forward: Callable[..., Any] = PLAIN, triton: bool = True, x: Tensor = X, **options: Any) -> Any:
    module = Ends(forward, **options).to(x.dtype)
    traced = Traced(module, x)
    traced.ctx.triton = triton
    count = traced.rewrite(channels_last, narrow_conv)
    traced.rewrite(bias_add)
    return traced, count, module


@pytest.mark.parametrize("bias", [True, False])
def test_the_first_and_the_last(bias: bool) -> None:
    traced, count, module = rewritten(bias=bias)
    first, last = traced.launches(kernel)
    assert count == 2 and not traced.convolutions()
    for node, conv in ((first, module.first), (last, module.last)):
        assert node.args[1].meta["weight"] is traced.arena.locate(conv.weight)
        assert node.args[2] is None if not bias else node.args[2].meta["weight"] is traced.arena.locate(conv.bias)
    assert traced.error() < 1e-2


def test_few_channels_are_read_as_they_lie() -> None:
    traced, _, _ = rewritten()
    assert traced.launches(kernel)[0].args[0].op == "placeholder"
    assert traced.ops()["contiguous"] == 0
    traced, _, _ = rewritten(lambda m, x: (m.first(x), F.silu(x)))  # laid out for another
    assert traced.launches(kernel)[0].args[0].op == "placeholder"
    assert traced.error() < 1e-2


def test_without_triton(with_nvrtc: None) -> None:
    traced, count, _ = rewritten(triton=False)
    assert count == 2 == len(traced.launches(kernel)) and not traced.convolutions()


@pytest.mark.parametrize("options", OTHER_CONVOLUTIONS, ids=str)
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    traced, count, _ = rewritten(**options)
    assert count == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


def write_the_image(m: Ends, x: Tensor) -> Tensor:
    y = m.first(x)
    z = m.last(y)
    y.add_(1)
    return y.sum() * z


STAYS: dict[str, tuple[Callable[..., Any], int]] = {
    "a computed weight": (lambda m, x: F.conv2d(x, m.first.weight * 2, padding=1), 0),
    "a computed bias": (lambda m, x: F.conv2d(x, m.first.weight, m.first.bias * 2, padding=1), 0),
    "many channels": (lambda m, x: F.conv2d(m.first(x), m.first.weight.new_ones(20, 32, 3, 3), padding=1), 1),
    "one image alone": (lambda m, x: m.first(x[0]), 0),
    "an image that is written to": (write_the_image, 0),
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    forward, count = STAYS[what]
    traced, found, _ = rewritten(forward)
    assert found == count == len(traced.launches(kernel)) and traced.convolutions()
    assert traced.error() < 1e-2


@pytest.mark.parametrize(("x", "triton"), [(X.float(), True), (X, False)], ids=["float32", "neither Triton nor NVRTC"])
def test_where_it_is_not_there(x: Tensor, triton: bool) -> None:
    traced, count, _ = rewritten(triton=triton, x=x)
    assert count == 0 and len(traced.convolutions()) == 2
    assert traced.error() < 1e-2


def test_a_weight_that_a_plan_reads_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(Ends(PLAIN).to(HALF), X)
    traced.ctx.triton = True
    monkeypatch.setattr(traced.arena, "channels_last", lambda weight: False)
    assert traced.rewrite(narrow_conv) == 0 and len(traced.convolutions()) == 2
