from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.context import PassContext
from sfast_ext.passes.cse import cse
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.packed_linear import packed_linear

from .support import Traced, randn, relative

X = randn(2, 8, 5, 7)
EMB = randn(2, 8)


class Block(nn.Module):
    """A convolution, and a norm that `forward` (module, x, ...) puts after it."""

    def __init__(self, forward: Callable[..., Any], affine: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8, affine=affine, eps=1e-3)
        self.body = forward
        if affine:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("x", [X, X.flatten(2)], ids=["image", "sequence"])
def test_norm_and_silu_become_one(affine: bool, x: Tensor) -> None:
    traced = Traced(Block(lambda m, x: F.silu(m.norm(x)), affine), x)
    assert traced.rewrite(group_norm) == 1
    assert traced.ops() == {"group_norm": 1}
    assert traced.find("group_norm")[0].kwargs["silu"] is True
    assert traced.error() < 1e-6


def test_silu_is_left_if_others_need_the_norm() -> None:
    traced = Traced(Block(lambda m, x: F.silu(m.norm(x)) + m.norm.weight.sum() * m.norm(x)), X)
    assert traced.rewrite(cse, group_norm) == 1
    assert traced.ops()["silu"] == 1
    assert traced.error() < 1e-6


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("order", ["norm, silu, cast", "norm, cast, silu"])
def test_casts_go_into_the_kernel(silu: bool, order: str) -> None:
    """GroupNorm32, and what autocast does."""

    def forward(m: Block, x: Tensor) -> Tensor:
        y = F.group_norm(x.float(), 4, m.norm.weight.float(), m.norm.bias.float(), 1e-3)
        if order == "norm, silu, cast":
            return (F.silu(y) if silu else y).to(torch.bfloat16)
        y = y.to(torch.bfloat16)
        return F.silu(y) if silu else y

    traced = Traced(Block(forward).to(torch.bfloat16), X.to(torch.bfloat16))
    assert traced.rewrite(group_norm) == 1
    assert traced.ops() == {"group_norm": 1}
    assert traced.error() < 5e-3


def test_result_stays_wide_if_it_is_used_wide() -> None:
    traced = Traced(Block(lambda m, x: m.norm(x.float()).sin()), X.to(torch.bfloat16))
    assert traced.rewrite(group_norm) == 1
    assert traced.ops() == {"group_norm": 1, "sin": 1}
    assert traced.error() < 1e-6


def test_cast_that_loses_stays() -> None:
    traced = Traced(Block(lambda m, x: m.norm(x.to(torch.bfloat16))).to(torch.bfloat16), X)
    assert traced.rewrite(group_norm) == 1
    assert traced.ops() == {"to": 1, "group_norm": 1}


@pytest.mark.parametrize("order", ["x + emb", "emb + x"])
@pytest.mark.parametrize("batch", [2, 1])
def test_time_embedding_becomes_shift(order: str, batch: int) -> None:
    def forward(m: Block, x: Tensor, emb: Tensor) -> Tensor:
        emb = emb[:, :, None, None]
        return F.silu(m.norm(x + emb if order == "x + emb" else emb + x))

    traced = Traced(Block(forward), X, EMB[:batch])
    assert traced.rewrite(cleanup, group_norm) == 1
    assert traced.ops()["add"] == traced.ops()["unsqueeze"] == 0
    assert traced.error() < 1e-6


def test_bias_of_the_convolution_becomes_shift() -> None:
    traced = Traced(Block(lambda m, x: m.norm(m.conv(x))), X)
    assert traced.rewrite(group_norm) == 1
    assert traced.find("conv2d")[0].args[2] is None
    assert traced.error() < 1e-6


def test_both() -> None:
    traced = Traced(Block(lambda m, x, emb: m.norm(m.conv(x) + emb[..., None, None])), X, EMB)
    assert traced.rewrite(group_norm) == 1
    assert traced.ops() == {"conv2d": 1, "add": 1, "group_norm": 1}
    assert traced.find("add")[0].meta["val"].shape == (2, 8)
    assert traced.error() < 1e-6


class Blocks(nn.Module):
    """Two blocks whose time projections are siblings."""

    def __init__(self, last: Callable[[Tensor, Tensor], Tensor] = lambda x, emb: x) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(2))
        self.times = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
        self.last = last

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for conv, norm, time in zip(self.convs, self.norms, self.times, strict=True):
            x = norm(conv(x) + time(emb)[:, :, None, None])
        return self.last(x, self.times[0](emb))


def test_biases_are_added_once_for_all_blocks() -> None:
    module = Blocks()
    traced = Traced(module, X, randn(2, 6))
    assert traced.rewrite(cleanup, packed_linear, group_norm) == 2
    assert traced.ops() == {"linear": 1, "add": 1, "slice": 2, "conv2d": 2, "group_norm": 2}
    with torch.no_grad():
        module.convs[1].bias.add_(1)
        module.times[0].bias.add_(1)
        traced.expected = module(*traced.inputs)
    assert traced.error() < 1e-6


def test_biases_are_added_apart_if_a_projection_has_other_users() -> None:
    traced = Traced(Blocks(lambda x, time: x * time[:, :, None, None]), X, randn(2, 6))
    assert traced.rewrite(cleanup, cse, packed_linear, group_norm) == 2
    assert traced.ops()["add"] == 2
    assert traced.error() < 1e-6


ADD_STAYS: dict[str, Callable[..., Any]] = {
    "sum used elsewhere": lambda m, x, emb: m.norm(y := x + emb[:, :, None, None]) + y,
    "per pixel": lambda m, x, emb: m.norm(x + x.mean(1, keepdim=True)),
    "per column": lambda m, x, emb: m.norm(x + emb[:1, None, :7]),
    "one number for each image": lambda m, x, emb: m.norm(x + emb[:, :1, None, None]),
    "with a factor": lambda m, x, emb: m.norm(torch.add(x, emb[:, :, None, None], alpha=2)),
    "a number": lambda m, x, emb: m.norm(x + 1.5),
    "promoted": lambda m, x, emb: m.norm(x.to(torch.bfloat16) + emb[:, :, None, None]),
    "to both images of one": lambda m, x, emb: m.norm(x[:1] + emb[:, :, None, None]),
}


@pytest.mark.parametrize("what", ADD_STAYS)
def test_other_additions_stay(what: str) -> None:
    traced = Traced(Block(ADD_STAYS[what]), X, EMB)
    adds = traced.ops()["add"]
    assert traced.rewrite(cleanup, group_norm) == 1
    assert traced.ops()["add"] == adds
    assert traced.error() < 1e-6


def test_bias_stays_if_the_convolution_has_other_users() -> None:
    traced = Traced(Block(lambda m, x: m.norm(y := m.conv(x)) + y), X)
    assert traced.rewrite(group_norm) == 1
    assert traced.find("conv2d")[0].args[2] is not None
    assert traced.error() < 1e-6


def test_other_dtypes_and_ranks_are_left() -> None:
    assert Traced(Block(lambda m, x: m.norm(x)).double(), X.double()).rewrite(group_norm) == 0
    assert Traced(Block(lambda m, x: m.norm(x)), X[..., None]).rewrite(group_norm) == 0
    assert Traced(Block(lambda m, x: m.norm(x)), randn(4, 8)).rewrite(group_norm) == 0


def test_written_values_are_left() -> None:
    def forward(m: Block, x: Tensor, emb: Tensor) -> Tensor:
        y = x + emb[:, :, None, None]
        z = m.norm(y)
        y.mul_(2)
        return F.silu(z)

    traced = Traced(Block(forward), X, EMB)
    assert traced.rewrite(group_norm) == 0
    assert traced.error() == 0


SMOOTH = 8 + 0.01 * torch.linspace(-1, 1, 16).view(1, 1, 1, 16) + torch.zeros(2, 8, 16, 16)


def without_kernels(x: Tensor, device: str = "cpu") -> tuple[Block, Traced]:
    """A norm that reads channels-last memory, as behind a convolution of a plan."""
    block = Block(lambda m, x: m.norm(x))
    traced = Traced(block, x)
    traced.ctx = PassContext(traced.arena, torch.device(device), triton=False)
    return block, traced


def test_on_a_cpu_the_norm_of_an_image_reads_contiguous_memory() -> None:
    x = SMOOTH.contiguous(memory_format=torch.channels_last)
    block, traced = without_kernels(x)
    exact = copy.deepcopy(block).double()(x.double())
    before = relative(traced.outputs()[0].double(), exact)
    assert traced.rewrite(group_norm) == 0 and traced.ops() == {"clone": 1, "group_norm": 1}
    after = relative(traced.outputs()[0].double(), exact)
    assert after < 1e-4 and before > 10 * after


def test_on_a_cpu_the_norm_of_a_sequence_is_left_alone() -> None:
    _, traced = without_kernels(X.flatten(2))
    assert traced.rewrite(group_norm) == 0 and traced.ops() == {"group_norm": 1}


def test_without_the_kernel_nothing_is_copied_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, traced = without_kernels(X, "cuda")
    monkeypatch.setattr(PassContext, "supported", lambda *given: False)
    assert traced.rewrite(group_norm) == 0 and traced.ops() == {"group_norm": 1}
