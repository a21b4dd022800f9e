from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.pointwise import modulated_norm
from sfast_ext.passes import rms_norm as rms_norm_file
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.rms_norm import rms_norm

from .diffusion_transformers import HALF, available
from .support import Traced, randn

X = randn(2, 5, 32).to(HALF)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)


class Norm(nn.Module):
    """A norm of `body`, with a weight."""

    def __init__(self, body: Callable[..., Any], dtype: torch.dtype = HALF, width: int = 32) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(randn(width).to(dtype)), body

    def forward(self, x: Tensor) -> Any:
        return self.body(x.sin(), self.weight)


def diffusers(x: Tensor, w: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-5)
    return y.to(w.dtype) * w


def llama(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def weight_in_float(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(torch.mean(y * y, -1, True) + 1e-6) * w.float()).type_as(x)


WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "as diffusers": diffusers,
    "as LLaMA": llama,
    "weight in float32": weight_in_float,
    "without weight": lambda x, w: (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) + w,
    "square": lambda x, w: (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w,
    "epsilon first": lambda x, w: (x * (1e-5 + x.float().pow(2).mean(-1, keepdim=True)).rsqrt()).to(x.dtype),
    "dimension by number": lambda x, w: (torch.rsqrt(x.float().pow(2).mean(2, keepdim=True) + 1e-5) * x).to(x.dtype),
    "in half precision": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
}
if hasattr(F, "rms_norm"):
    WRITTEN["the operator"] = lambda x, w: F.rms_norm(x, [32], w, 1e-6)
    WRITTEN["the operator without weight"] = lambda x, w: F.rms_norm(x, [32], None, 1e-6) * w.sin()


@pytest.mark.parametrize("how", WRITTEN)
def test_norms_become_one(how: str) -> None:
    traced = Traced(Norm(WRITTEN[how]), X)
    assert traced.rewrite(cleanup, rms_norm) == 1
    (norm,) = traced.launches(modulated_norm)
    assert not traced.find("rsqrt") and not traced.find("mean") and not traced.find("pow")
    assert norm.args[3] in (1e-5, 1e-6) and norm.args[2] is None
    assert traced.error() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(2, 32), (2, 3, 4, 32), (1, 7, 32)], ids=str)
def test_dtypes_and_shapes(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    traced = Traced(Norm(diffusers, dtype), randn(*size).to(dtype))
    assert traced.rewrite(cleanup, rms_norm) == 1
    assert traced.launches(modulated_norm)[0].args[1].op == "get_attr"
    assert traced.error() < (1e-6 if dtype == torch.float32 else 1e-2)


def test_it_is_closer_to_float32() -> None:
    traced = Traced(Norm(diffusers), X)
    wide = X.sin().double()
    wanted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * randn(32).to(HALF).double()
    before = (traced.expected.double() - wanted).norm()
    traced.rewrite(cleanup, rms_norm)
    assert (traced.outputs()[0].double() - wanted).norm() <= before


def read_again(x: Tensor, w: Tensor) -> Any:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return (x * scale).to(x.dtype) * w, scale


def squares_read_again(x: Tensor, w: Tensor) -> Any:
    squares = x.float().pow(2)
    return (x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w, squares


def written(x: Tensor, w: Tensor) -> Any:
    x = x.clone()
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    x.add_(1)
    return (x * scale).to(x.dtype) * w


STAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "reciprocals used elsewhere": read_again,
    "squares used elsewhere": squares_read_again,
    "written between": written,
    "cubes": lambda x, w: (x * torch.rsqrt(x.float().pow(3).mean(-1, keepdim=True) + 9.0)).to(x.dtype),
    "of another value": lambda x, w: (
        x * torch.rsqrt(x.cos().float().pow(2).mean(-1, keepdim=True) + 1e-5)
    ).to(x.dtype),
    "of tokens": lambda x, w: (x * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-5)).to(x.dtype),
    "of two dimensions": lambda x, w: (x * torch.rsqrt(x.float().pow(2).mean((1, 2), keepdim=True) + 1e-5)).to(x.dtype),
    "sums": lambda x, w: (x * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-5)).to(x.dtype),
    "an epsilon that is a tensor": lambda x, w: (
        x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + w[:1].float())
    ).to(x.dtype),
    "a result in float32": lambda x, w: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5),
    "divided by": lambda x, w: (x / torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype),
    "a factor of the epsilon": lambda x, w: (
        x * torch.rsqrt(torch.add(x.float().pow(2).mean(-1, keepdim=True), 1e-5, alpha=3))
    ).to(x.dtype),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(Norm(STAYS[what]), X)
    traced.rewrite(cleanup)
    before = traced.ops()
    assert traced.rewrite(rms_norm) == 0
    assert traced.ops() == before


def test_a_scale_that_is_no_weight_is_left_to_other_passes() -> None:
    traced = Traced(Norm(lambda x, w: diffusers(x, w) * x.mean(1, keepdim=True)), X)
    assert traced.rewrite(cleanup, rms_norm) == 1
    assert traced.ops()["mul"] == 1 and traced.error() < 1e-2


@pytest.mark.skipif(not hasattr(F, "rms_norm"), reason="torch before 2.4 has no rms_norm")
def test_operators_of_more_dimensions_stay() -> None:
    assert Traced(Norm(lambda x, w: F.rms_norm(x, [5, 32], None, 1e-6)), X).rewrite(rms_norm) == 0


@pytest.mark.skipif(not hasattr(F, "rms_norm"), reason="torch before 2.4 has no rms_norm")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operators_without_epsilon(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values so small that the epsilon decides, with a weight and without."""
    x = X.to(dtype)
    for forward in (lambda x, w: F.rms_norm(x, [32], w), lambda x, w: F.rms_norm(x, [32])):
        traced = Traced(Norm(lambda x, w, forward=forward: forward(x * 2**-11, w), dtype), x)
        assert traced.rewrite(rms_norm) == 1 and traced.error() < 1e-2
        monkeypatch.setattr(rms_norm_file, "default_epsilon", lambda kind, device, weighted: None)
        assert Traced(Norm(forward, dtype), x).rewrite(rms_norm) == 0
        monkeypatch.undo()
        available(monkeypatch)


@pytest.mark.skipif(not hasattr(F, "rms_norm"), reason="torch before 2.4 has no rms_norm")
def test_another_default_is_not_taken_for_one_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float16):
        kinds = (dtype, torch.float32, torch.float64)
        for known in (*(torch.finfo(kind).eps for kind in kinds), 1e-5, 1e-6):
            rms_norm_file.default_epsilon.cache_clear()
            pretended = lambda x, size, weight, eps=known: torch.ops.aten.rms_norm(x, size, weight, eps)
            monkeypatch.setattr(rms_norm_file, "RMS_NORM", frozenset({pretended}))
            found = rms_norm_file.default_epsilon(dtype, cpu, weighted=True)
            assert found == (known if known not in (1e-5, 1e-6) else None)
    rms_norm_file.default_epsilon.cache_clear()


def test_other_dtypes_are_left() -> None:
    assert Traced(Norm(diffusers, torch.float64), X.double()).rewrite(rms_norm) == 0
    mixed = Traced(Norm(lambda x, w: llama(x, w.half()).to(x.dtype)), X)
    mixed.rewrite(rms_norm)
    assert mixed.error() < 1e-2
