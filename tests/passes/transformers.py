"""Transformer blocks and parts of them, as graphs to be rewritten with 8-bit integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.passes import run_passes
from sfast_ext.passes.eight_bits_selection import Selection

from .support import Traced, randn

HALF = torch.bfloat16
C = 64


class Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int = 2) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)
        self.to_out, self.heads = nn.Linear(width, width), heads

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (
            self.to_q(x), self.to_k(context), self.to_v(context)))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A transformer block of a UNet."""

    def __init__(self, width: int = C, context: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attn1, self.attn2 = Attention(width, width), Attention(width, context)
        self.ff_in, self.ff_out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context) + x
        value, gate = self.ff_in(self.norm3(x)).chunk(2, dim=-1)
        return self.ff_out(value * F.gelu(gate)) + x


def traced(module: nn.Module, *inputs: Tensor, selection: Selection | None = None, half: bool = True) -> Traced:
    """The forward as a graph, to be rewritten with 8 bits."""
    if half:
        module, inputs = module.to(HALF), tuple(x.to(HALF) for x in inputs)
    found = Traced(module, *inputs)
    found.ctx.eight_bits = selection or Selection()
    found.ctx.eight_bits.inputs = inputs
    return found


def rewritten(on: Traced) -> Counter[str]:
    """Rewrites by all passes; the operations that are left."""
    with torch.no_grad():
        run_passes(on.gm, on.ctx)
    on.gm.graph.lint()
    on.gm.recompile()
    return on.ops()


TOKENS = randn(2, 160, C)
PROMPT = randn(2, 7, 32)


class Wrapped(nn.Module):
    """`body` of a few layers."""

    def __init__(self, body: Callable[..., Any], width: int = C) -> None:
        super().__init__()
        self.body, self.norm, self.other = body, nn.LayerNorm(width), nn.LayerNorm(width)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.wide, self.attention = nn.Linear(width, 2 * width), Attention(width, width)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def count(body: Callable[..., Any], x: Tensor = TOKENS, **more: Any) -> tuple[Traced, Counter[str]]:
    torch.manual_seed(0)
    on = traced(Wrapped(body, x.shape[-1]), x, **more)
    return on, rewritten(on)


def after_a_norm(m: Wrapped, x: Tensor) -> Any:
    return m.one(m.norm(x)).sin()


def after_an_attention(m: Wrapped, x: Tensor) -> Any:
    return m.attention(x.sin()).sin()
