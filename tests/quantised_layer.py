"""A linear layer of int8 weights and dynamic scales, written as a library writes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sfast_ext.hosts.sdnext.sdnq_layers import KNOWN

BF16 = torch.bfloat16
K, N = 64, 96


@torch.library.custom_op("sdnq::scaled_mm", mutates_args=())
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = BF16
) -> Tensor:
    """Stands for an operator that launches one kernel."""
    y = torch._int_mm(a, b).float() * scale_a * scale_b
    return (y if bias is None else y + bias).to(out_dtype)


@scaled_mm.register_fake
def _(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, bias: Any = None, out_dtype: torch.dtype = BF16) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


class Layer(nn.Linear):
    """Weights (K, N) in int8 with a float32 scale for each of N; the changes are what other formats have."""

    def __init__(self, k: int = K, n: int = N, bias: bool = True, dtype: torch.dtype = BF16, **change: Any) -> None:
        nn.Module.__init__(self)
        rows = torch.randn(n, k)
        scale = rows.abs().amax(1, keepdim=True) / 127
        codes = (rows / scale).round().to(torch.int8)
        held = codes if change.get("contiguous") else codes.t()
        self.weight = nn.Parameter(held.t().contiguous() if change.get("contiguous") else held, requires_grad=False)
        self.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(n).to(dtype), requires_grad=False) if bias else None
        self.change = change
        self.sdnq_dequantizer = SimpleNamespace(**KNOWN)

    def forward(self, x: Tensor) -> Tensor:
        flat, of = x.flatten(0, -2).float(), self.change
        levels = of.get("levels", 127)
        scale = flat.abs().amax(of.get("dim", -1), keepdim=True).div_(levels)
        codes = torch.div(flat, scale).round_().clamp_(of.get("least", -128), 127).to(torch.int8)
        if of.get("operator"):
            return scaled_mm(codes, self.weight, scale, self.scale, self.bias, x.dtype).view(*x.shape[:-1], -1)
        sums = torch._int_mm(codes, self.weight).to(torch.float32).mul_(scale)
        if of.get("zero_point"):
            sums = sums + codes.sum(-1, keepdim=True)
        if self.bias is None:
            y = sums.mul_(self.scale)
        else:
            y = torch.addcmul(self.bias, sums, self.scale, **of.get("more", {}))
        return y.to(of.get("result", x.dtype)).view(*x.shape[:-1], -1)
