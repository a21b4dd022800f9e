"""A model with layers that are fit for 8-bit integers, under an accelerator, and its twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext import Accelerator, Config, accelerate
from sfast_ext.plans.plan import Plan
from sfast_ext.runtime import verify

HALF = torch.bfloat16
C = 64
ON = Config(allow_cpu=True, eight_bits=True, tolerance=0.1)
OFF = Config(allow_cpu=True, tolerance=0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.to_q, self.to_k, self.to_v = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.to_out, self.ff_in, self.ff_out = nn.Linear(C, C), nn.Linear(C, 8 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        x = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)) + x
        value, gate = self.ff_in(self.norm2(x)).chunk(2, dim=-1)
        return self.ff_out(value * F.gelu(gate)) + x


class Net(nn.Module):
    """Two transformer blocks, whose layers are fit for 8 bits, between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, C), nn.Linear(C, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


LAYERS = 8


def net() -> Net:
    torch.manual_seed(0)
    return Net().to(HALF).eval()


class On:
    """A model under an accelerator, and its twin."""

    def __init__(self, config: Config = ON, device: str = "cpu") -> None:
        self.twin = net()
        self.ours = copy.deepcopy(self.twin).to(device)
        self.device = device
        self.acc: Accelerator = accelerate(self.ours, config)
        self.seed = 0

    def call(self, rows: int = 256) -> tuple[Tensor, float]:
        """The result of a call with other values, and how far it is from the twin's."""
        self.seed += 1
        x = torch.randn(2, rows // 2, 8, generator=torch.Generator().manual_seed(self.seed)).to(HALF)
        found, wanted = self.ours(x.to(self.device)).cpu(), self.twin(x)
        return found, verify.relative_error([found], [wanted])

    def error(self, rows: int = 256) -> float:
        return self.call(rows)[1]

    def both(self, change: Callable[[Net], Any]) -> None:
        change(self.ours)
        change(self.twin)

    def status(self) -> dict[str, Any]:
        return self.acc.status()["eight_bits"]

    def count(self, name: str) -> int:
        return self.acc.report.counter(name)

    def words(self) -> str:
        return str([event["message"] for event in self.acc.report.as_dict()["events"]])

    @property
    def plan(self) -> Plan:
        """The plan used last."""
        return next(reversed(self.acc.plans.values()))


def changed(how: str, factor: float) -> Callable[[Net], None]:
    """Changes a layer as a LoRA does: in place, or by another parameter."""

    def change(m: Net) -> None:
        layer = m.blocks[1].ff_in
        if how == "in place":
            layer.weight.mul_(factor)
        elif how == "data":
            layer.weight.data = layer.weight.data * factor
        elif how == "rows":
            layer.weight[::3] *= factor
        else:
            layer.weight = nn.Parameter(layer.weight.detach() * factor, requires_grad=False)

    return change


def outlier(m: Net) -> None:
    """Another checkpoint in the place of the first, with values that 8 bits cannot hold."""
    for block in m.blocks:
        for norm, layers in ((block.norm1, (block.to_q, block.to_k, block.to_v)), (block.norm2, (block.ff_in,))):
            norm.weight[3] *= 3000
            for layer in layers:
                layer.weight[:, 3] = 0
                layer.weight.mul_(1.01)
