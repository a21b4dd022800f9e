from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.kernels.transformers import torch_rms_norm
from sfast_ext.kernels.pointwise import modulated_norm as kernel
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.modulated_norm import modulated_norm
from sfast_ext.passes.rms_norm import rms_norm

from .diffusion_transformers import HALF, available
from .support import Traced, randn

X, EMB = randn(2, 7, 32).to(HALF), randn(2, 96).to(HALF)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)


class Modulated(nn.Module):
    """Operations on a norm, RMS or layer, and three vectors of each sample."""

    def __init__(self, body: Callable[..., Any], rms: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(randn(32).to(HALF)) if affine else None for _ in range(2))
        self.body, self.rms = body, rms

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        x = x.sin()
        normed = torch_rms_norm(x, self.weight, 1e-5) if self.rms else F.layer_norm(
            x, [32], self.weight, self.bias, 1e-6)  # fmt: skip
        return self.body(normed, *emb.chunk(3, 1))


MODULATIONS: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "as Z-Image": (lambda y, a, b, c: y * (1.0 + a.unsqueeze(1)), True, False),
    "as Lumina": (lambda y, a, b, c: y * (1 + a[:, None]), True, False),
    "as Flux": (lambda y, a, b, c: y * (1 + a[:, None]) + b[:, None], True, True),
    "scale first": (lambda y, a, b, c: b.unsqueeze(1) + (a.unsqueeze(1) + 1) * y, True, True),
    "as a final layer": (lambda y, a, b, c: y * (1 + a)[:, None, :] + b[:, None, :], False, True),
    "a plain scale": (lambda y, a, b, c: y * a.unsqueeze(1) + b.unsqueeze(1), False, True),
    "1 twice": (lambda y, a, b, c: y * (1 + (1 + a.unsqueeze(1))), True, False),
    "of all samples": (lambda y, a, b, c: y * (1 + a[:1, None]) + b[0], True, True),
    "as Flux in Forge Neo": (lambda y, a, b, c: torch.addcmul(b[:, None], y, 1 + a[:, None]), True, True),
    "as Chroma in Forge Neo": (lambda y, a, b, c: torch.addcmul(b[:, None], (1 + a)[:, None], y), False, True),
    "as Qwen-Image in Forge Neo": (lambda y, a, b, c: torch.addcmul(b[0], a[:, None], y, value=1), False, True),
    "another number": (lambda y, a, b, c: y * (2 + a.unsqueeze(1)), False, False),
    "a shift in float32": (lambda y, a, b, c: (y * (1 + a[:, None])) + b[:, None].float(), True, False),
}


@pytest.mark.parametrize("rms", [True, False], ids=["RMS", "layer"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("how", MODULATIONS)
def test_modulations_become_one(how: str, rms: bool, affine: bool) -> None:
    body, plus_one, shifted = MODULATIONS[how]
    traced = Traced(Modulated(body, rms, affine), X, EMB)
    assert traced.rewrite(cleanup, rms_norm, modulated_norm) == 1
    (new,) = traced.launches(kernel)
    assert new.kwargs == {"rms": rms, "plus_one": plus_one} and (new.args[5] is not None) == shifted
    assert not traced.find("layer_norm") and traced.error() < 2e-2


def read_again(y: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    return y * (1 + a[:, None]), y


def written(y: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    y = y.clone()
    scaled = y * (1 + a[:, None])
    y.add_(1)
    return scaled


STAYS: dict[str, Callable[..., Any]] = {
    "a norm used elsewhere": read_again,
    "written between": written,
    "a number": lambda y, a, b, c: y * 2,
    "addcmul with a factor": lambda y, a, b, c: torch.addcmul(b[:, None], y, a[:, None], value=2),
    "addcmul onto tokens": lambda y, a, b, c: torch.addcmul(a.new_ones(2, 7, 32), y, a[:, None]),
    "addcmul of a norm by itself": lambda y, a, b, c: torch.addcmul(b[:, None], y, y),
    "addcmul onto a norm": lambda y, a, b, c: torch.addcmul(y, a[:, None], b[:, None]),
    "addcmul of each token": lambda y, a, b, c: torch.addcmul(b[:, None], y, a[:, None].expand(2, 7, 32).cos()),
    "by itself": lambda y, a, b, c: y * y.cos(),
    "of each token": lambda y, a, b, c: y * a[:, None].expand(2, 7, 32).cos(),
    "of some tokens": lambda y, a, b, c: y * (1 + torch.cat([a[:, None], b[:, None].expand(2, 6, 32)], 1)),
    "of tokens": lambda y, a, b, c: y * a[0, :7, None],
    "of some channels": lambda y, a, b, c: y * a[:, None, :1],
    "in float32": lambda y, a, b, c: y * (1 + a[:, None].float()),
    "divided": lambda y, a, b, c: y / (1 + a[:, None]),
    "squared": lambda y, a, b, c: y * y,
    "more dimensions": lambda y, a, b, c: y * a[:, None, None],
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    for rms in (True, False):
        traced = Traced(Modulated(STAYS[what], rms), X, EMB)
        traced.rewrite(cleanup, rms_norm)
        before = traced.ops()
        assert traced.rewrite(modulated_norm) == 0
        assert traced.ops() == before


def test_a_product_used_elsewhere_keeps_its_shift() -> None:
    def forward(y: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        scaled = y * (1 + a[:, None])
        return scaled + b[:, None], scaled

    traced = Traced(Modulated(forward), X, EMB)
    assert traced.rewrite(cleanup, rms_norm, modulated_norm) == 1
    assert traced.launches(kernel)[0].args[5] is None and traced.ops()["add"] == 1
    assert traced.error() < 2e-2


def test_a_shift_of_tokens_or_with_a_factor_stays() -> None:
    for shift in (lambda y, b: y + y.cos(), lambda y, b: torch.add(y, b[:, None], alpha=2), lambda y, b: y + 1.0):
        traced = Traced(Modulated(lambda y, a, b, c, s=shift: s(y * (1 + a[:, None]), b)), X, EMB)
        assert traced.rewrite(cleanup, rms_norm, modulated_norm) in (0, 1)
        assert all(new.args[5] is None for new in traced.launches(kernel) if len(new.args) > 5)
        assert traced.error() < 2e-2


def test_two_dimensions_have_no_samples_apart_from_rows() -> None:
    traced = Traced(Modulated(lambda y, a, b, c: y * a), randn(2, 32).to(HALF), EMB)
    assert traced.rewrite(cleanup, rms_norm, modulated_norm) == 0


def test_it_is_closer_to_float32() -> None:
    body = MODULATIONS["as Flux"][0]
    module = Modulated(body, rms=False)
    traced = Traced(module, X, EMB)
    y = F.layer_norm(X.sin().double(), [32], module.weight.double(), module.bias.double(), 1e-6)  # type: ignore[union-attr]
    exact = body(y, *EMB.double().chunk(3, 1))
    before = (traced.expected.double() - exact).norm()
    traced.rewrite(cleanup, modulated_norm)
    assert (traced.outputs()[0].double() - exact).norm() < before
