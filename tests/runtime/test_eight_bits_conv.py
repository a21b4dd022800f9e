"""Plans whose convolutions are computed with 8-bit integers: weights that change, memory, and what the report says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext import Accelerator, accelerate
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.eight_bits import conv2d8
from sfast_ext.runtime import verify

from .eight_bits import HALF, OFF, ON, C


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    eight_bit_kernels.available(monkeypatch)
    with torch.no_grad():
        yield
    health.clear()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, C), nn.GroupNorm(8, C)
        self.conv1, self.conv2 = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x)))))) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, C, 3, padding=1), nn.Conv2d(C, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


LAYERS = 4


class On:
    """A model under an accelerator, and its twin."""

    def __init__(self, config: Any = ON) -> None:
        torch.manual_seed(0)
        self.twin = Net().to(HALF).eval()
        self.ours = copy.deepcopy(self.twin)
        self.acc: Accelerator = accelerate(self.ours, config)
        self.seed = 0

    def error(self, size: int = 12) -> float:
        self.seed += 1
        x = torch.randn(2, 4, size, size, generator=torch.Generator().manual_seed(self.seed)).to(HALF)
        return verify.relative_error([self.ours(x)], [self.twin(x)])

    def status(self) -> dict[str, Any]:
        return self.acc.status()["eight_bits"]

    def both(self, change: Callable[[Net], Any]) -> None:
        change(self.ours)
        change(self.twin)


def test_convolutions_are_layers_of_the_report() -> None:
    on = On()
    on.error()
    assert all(0.003 < on.error() < 0.04 for _ in range(3))
    told = on.status()
    assert told["layers"] == LAYERS and told["kept"] == [] and told["reason"] is None
    # a byte for each value, and 16 for each row
    assert told["bytes"] == LAYERS * (9 * C * C + 48 * C)
    (plan,) = on.acc.plans.values()
    assert plan.fused["eight_bits_conv"] == LAYERS and plan.fused["eight_bits"] == 0
    off = On(OFF)
    off.error()
    assert off.error() < 0.01 and off.status() == {"layers": 0, "kept": [], "bytes": 0, "reason": None}


def changed(how: str, factor: float) -> Callable[[Net], None]:
    """Changes a layer as a LoRA does."""

    def change(m: Net) -> None:
        layer = m.blocks[1].conv1
        if how == "in place":
            layer.weight.mul_(factor)
        elif how == "data":
            layer.weight.data = layer.weight.data * factor
        elif how == "a channel":
            layer.weight[3] *= factor
        elif how == "a tap":
            layer.weight[:, :, 2, 0] *= factor
        else:
            layer.weight = nn.Parameter(layer.weight.detach() * factor, requires_grad=False)

    return change


@pytest.mark.long(but=[0, 3, 4, 7, 8])
@pytest.mark.parametrize("generations", [True, False])
@pytest.mark.parametrize("how", ["in place", "data", "a channel", "a tap", "replaced"])
def test_a_lora_whose_weight_changes_each_step(how: str, generations: bool) -> None:
    on = On()
    if generations:
        on.acc.new_generation()
    on.error()
    before = on.error()
    for step in range(6):
        on.both(changed(how, (1.7, 0.4, -1.3)[step % 3]))
        assert on.error() < 2 * before
    assert on.acc.report.counter("captures") == 1 and on.status()["layers"] == LAYERS


def test_sizes_share_the_second_copies() -> None:
    on = On()
    for size in (12, 16, 18):
        on.error(size)
        assert on.error(size) < 0.04
    assert len(on.acc.plans) == 3 and on.status()["bytes"] == LAYERS * (9 * C * C + 48 * C)


def test_memory_that_is_given_back_and_filled_again() -> None:
    on = On()
    on.error()
    before = on.error()
    banks = on.acc.arena.banks
    for _ in range(2):
        banks.vacate()
        banks.occupy()
        assert on.error() < 2 * before


def test_a_kernel_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    on = On()
    real = conv2d8.launch.function

    def broken(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("no")

    monkeypatch.setattr(conv2d8.launch, "function", broken)
    for _ in range(4):
        assert on.error() < 0.01
    monkeypatch.setattr(conv2d8.launch, "function", real)
    assert on.status()["layers"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu(graphs: bool) -> None:
    torch.manual_seed(0)
    twin = Net().to(torch.float16).eval()
    ours = copy.deepcopy(twin).cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv2d8, "profitable", lambda *sizes: True)
        acc = accelerate(ours, replace(ON, cuda_graphs=graphs, drop_slower=False))
        x = torch.randn(2, 4, 32, 24).half()
        wanted = twin.float()(x.float())
        for _ in range(3):
            found = ours(x.cuda()).cpu().float()
            assert verify.relative_error([found], [wanted]) < 0.04
        assert acc.status()["eight_bits"]["layers"] == LAYERS
        for factor in (0.5, 3.0):
            for m in (ours, twin):
                m.blocks[0].conv2.weight.mul_(factor)
            found, wanted = ours(x.cuda()).cpu().float(), twin(x.float())
            assert verify.relative_error([found], [wanted]) < 0.05
        acc.release()
