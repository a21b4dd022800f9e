"""Which products of diffusion transformers are computed with 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.kernels.transformers import torch_rms_norm
from sfast_ext.passes import run_passes
from sfast_ext.passes.eight_bits_selection import Selection

from .diffusion_transformers import HALF, available, half, z_image
from .support import Traced, randn

C = 64
TOKENS, EMB = randn(2, 160, C), randn(2, 3 * C)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bit_kernels.available(monkeypatch, by_triton=True)
    available(monkeypatch)


class Layers(nn.Module):
    """`body` of a few layers and vectors of each sample."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.weight = body, nn.Parameter(torch.ones(C))
        self.one, self.two, self.three = nn.Linear(C, C), nn.Linear(C, 4 * C), nn.Linear(C, 4 * C)
        self.down, self.pixels, self.sum = nn.Linear(4 * C, C), nn.Linear(8 * C, 32), nn.Linear(5 * C, C)
        self.modulation, self.embed, self.bare = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C, bias=False)

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        a, b, c = emb.chunk(3, 1)
        return self.body(self, x, a[:, None], b[:, None], c[:, None])

    def normed(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch_rms_norm(x, self.weight, 1e-5) * (1 + scale)

    def attention(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q.sin(), q).transpose(1, 2).flatten(2, 3)


def measured(body: Callable[..., Any] | nn.Module, *inputs: Tensor) -> tuple[Traced, list[str]]:
    """A graph with all passes, and the names of the layers that are in 8 bits."""
    torch.manual_seed(0)
    module = body if isinstance(body, nn.Module) else Layers(body)
    given = tuple(half(list(inputs or (TOKENS, EMB))))
    traced = Traced(module.to(HALF), *given)
    traced.ctx.eight_bits = selection = Selection(inputs=given)
    with torch.no_grad():
        run_passes(traced.gm, traced.ctx)
    traced.graph.lint()
    traced.gm.recompile()
    names = sorted(set(selection.errors) - selection.kept)
    assert traced.ops()["linear8"] == len(names)
    return traced, names


TAKEN: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a modulated norm": (lambda m, x, a, b, c: m.one(m.normed(m.embed(x), a)).sin(), ["one"]),
    "a layer norm with a shift": (
        lambda m, x, a, b, c: m.one(F.layer_norm(m.embed(x), [C]) * (1 + a) + b).sin(), ["one"],
    ),
    "an RMS norm alone": (lambda m, x, a, b, c: m.one(torch_rms_norm(m.embed(x), m.weight, 1e-5)).sin(), ["one"]),
    "the norm of a gated sum": (
        lambda m, x, a, b, c: ((s := x + a * x.sin()), m.one(m.normed(s, b)).sin()), ["one"],
    ),
    "SwiGLU": (lambda m, x, a, b, c: m.down(F.silu(m.two(x)) * m.three(x)), ["down"]),
    "GELU": (lambda m, x, a, b, c: m.down(F.gelu(m.two(x), approximate="tanh")).sin(), ["down"]),
    "GELU, exact": (lambda m, x, a, b, c: m.down(F.gelu(m.two(x))).sin(), ["down"]),
    "a part of an attention": (lambda m, x, a, b, c: m.one(m.attention(x)[:, :150]).sin(), ["one"]),
    "parts of an attention": (
        lambda m, x, a, b, c: [m.one(y.contiguous()) for y in m.attention(x).split_with_sizes([150, 10], 1)[:1]],
        ["one"],
    ),
    "an attention and an activation": (
        lambda m, x, a, b, c: m.sum(torch.cat([m.attention(x), F.gelu(m.two(x), approximate="tanh")], 2)).sin(),
        ["sum"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TAKEN)
def test_products_of_blocks_are_taken(what: str) -> None:
    body, wanted = TAKEN[what]
    traced, names = measured(body)
    assert names == wanted and traced.error() < 0.05


KEPT: dict[str, Callable[..., Any]] = {
    "an embedder": lambda m, x, a, b, c: m.one(x).sin(),
    "an embedder with a norm": lambda m, x, a, b, c: m.one(torch_rms_norm(x, m.weight, 1e-5)).sin(),
    "an embedder of prompts that are joined and padded": lambda m, x, a, b, c: m.one(
        torch_rms_norm(torch.cat([x[:, :100], x[:, 100:].float().to(x.dtype), a.repeat(1, 9, 1)], 1), m.weight, 1e-5)
    ).sin(),
    "what modulates norms": lambda m, x, a, b, c: m.modulation(F.silu(x.mean(1))),
    "a layer that makes pixels": lambda m, x, a, b, c: m.pixels(F.gelu(x.sin().repeat(1, 1, 8))),
    "few rows": lambda m, x, a, b, c: m.one(m.normed(m.embed(x)[:, :100], a)).sin(),
    "an attention and something else": lambda m, x, a, b, c: m.sum(torch.cat([m.attention(x), x.repeat(1, 1, 4)], 2)),
    "a sum": lambda m, x, a, b, c: m.one(x.sin() + x.cos()),
    "SiLU of an embedding": lambda m, x, a, b, c: m.one(F.silu(x.sin())),
    "the sum of a gated sum and its norm": lambda m, x, a, b, c: (
        m.one(s := x + a * x.sin()), torch_rms_norm(s, None, 1e-6) * b,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", KEPT)
def test_others_stay_in_half_precision(what: str) -> None:
    traced, names = measured(KEPT[what])
    assert names == [] and traced.ops()["linear"] >= 1
    assert traced.error() < 1e-2


def test_a_block_of_z_image() -> None:
    class Model(nn.Module):
        """An embedder, a block and a last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.block, self.embed, self.last = z_image(tokens=160, width=192)[0], nn.Linear(64, 192), nn.Linear(192, 8)

        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            y = self.block(self.embed(x[..., :64]), *rest)
            return self.last(F.layer_norm(y, [192]))

    traced, names = measured(Model(), *z_image(tokens=160, width=192)[1])
    layers = "block.block."
    assert names == [
        f"{layers}attention.to_out.0",
        f"{layers}attention.to_q+to_k+to_v",
        f"{layers}feed_forward.w1+w3",
        f"{layers}feed_forward.w2",
    ]
    # the input of the last product of the attention alone is written in half precision
    wanted = {"quantise_rows": 1, "modulated_norm8": 1, "gated_norm8": 1, "swiglu8": 1, "swiglu": 0, "gated_norm": 0}
    assert {name: traced.ops()[name] for name in wanted} == wanted and traced.error() < 0.05


WRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "a modulated norm": (lambda m, x, a, b, c: m.one(m.normed(m.embed(x), a)).sin(), "modulated_norm8"),
    "a layer norm with a shift": (
        lambda m, x, a, b, c: m.one(F.layer_norm(m.embed(x), [C]) * (1 + a) + b).sin(), "modulated_norm8",
    ),
    "a norm that two products read": (
        lambda m, x, a, b, c: (y := m.normed(m.embed(x), a), m.one(y).sin(), m.two(y).cos())[1:], "modulated_norm8",
    ),
    "the norm of a gated sum": (
        lambda m, x, a, b, c: ((s := x + a * x.sin()), m.one(m.normed(s, b)).sin()), "gated_norm8",
    ),
    "the norm of a sum that nothing else reads": (
        lambda m, x, a, b, c: m.one(m.normed(m.embed(x) + a * x.sin(), b)).sin(), "gated_norm8",
    ),
    "SwiGLU": (lambda m, x, a, b, c: m.down(F.silu(m.two(x)) * m.three(x)), "swiglu8"),
    "GELU": (lambda m, x, a, b, c: m.down(F.gelu(m.two(x))).sin(), "gelu8"),
    "GELU by tanh": (lambda m, x, a, b, c: m.down(F.gelu(m.two(x), approximate="tanh")).sin(), "gelu8"),
    "GELU behind an attention": (
        lambda m, x, a, b, c: m.sum(torch.cat([m.attention(x), F.gelu(m.two(x), approximate="tanh")], 2)).sin(),
        "gelu8",
    ),
    "SwiGLU behind an attention": (
        lambda m, x, a, b, c: m.sum(torch.cat([m.attention(x), F.silu(m.two(x)) * m.three(x)], -1)).sin(), "swiglu8",
    ),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_writes_the_input_writes_it_in_8_bits(what: str) -> None:
    body, kernel = WRITTEN[what]
    traced, names = measured(body)
    assert names and traced.ops()[kernel] == 1 and traced.ops()["quantise_rows"] == 0
    assert traced.error() < 0.05


QUANTISED: dict[str, Callable[..., Any]] = {
    "a norm that is a result as well": lambda m, x, a, b, c: (y := m.normed(m.embed(x), a), m.one(y).sin()),
    "the norm of a sum, in a second sum": lambda m, x, a, b, c: m.one(y := m.normed(x + a * x.sin(), b)) + y,
    "SwiGLU that is read as it is": lambda m, x, a, b, c: (y := F.silu(m.two(x)) * m.three(x), m.down(y).sin()),
    "GELU that is cut": lambda m, x, a, b, c: m.down(F.gelu(m.two(x))[:, :140]).sin(),
    "GELU that is written to": lambda m, x, a, b, c: (y := F.gelu(m.two(x)), m.down(y).sin(), y.add_(1)),
    "an attention": lambda m, x, a, b, c: m.one(m.attention(x)).sin(),
    "GELU in front of an attention": lambda m, x, a, b, c: m.sum(torch.cat([F.gelu(m.two(x)), m.attention(x)], 2)),
    "GELU behind an attention, for others too": lambda m, x, a, b, c: (
        m.sum(torch.cat([m.attention(x), y := F.gelu(m.two(x))], 2)), y.sin(),
    ),
    "two activations behind an attention": lambda m, x, a, b, c: m.down(
        torch.cat([m.attention(x), F.gelu(m.two(x)[..., :64]), F.gelu(m.two(x)[..., 128:])], 2)
    ),
    "tokens of GELU behind others": lambda m, x, a, b, c: m.down(
        torch.cat([F.gelu(m.two(x)), F.gelu(m.two(x.sin()))], 1)
    ),
    "a concatenation that is a result as well": lambda m, x, a, b, c: (
        y := torch.cat([m.attention(x), F.gelu(m.two(x))], 2), m.sum(y).sin(),
    ),
    "GELU whose input is written to before the concatenation": lambda m, x, a, b, c: (
        y := m.two(x), z := F.gelu(y), y.mul_(2), m.sum(torch.cat([m.attention(x), z], 2)).sin(),
    )[3:],
}
"""What is quantised by one more kernel, or not at all."""


@pytest.mark.parametrize("what", QUANTISED)
def test_what_others_read_is_written_in_half_precision(what: str) -> None:
    traced, names = measured(QUANTISED[what])
    ops = traced.ops()
    assert not any(ops[name] for name in ("modulated_norm8", "gated_norm8", "swiglu8", "gelu8"))
    assert ops["quantise_rows"] == bool(names) and traced.error() < 0.05


def test_layers_that_are_rotated_in_two_ways_have_a_kernel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Selection, "group", lambda self, name, may_rotate: 64 if name == "one" else 0)
    body = lambda m, x, a, b, c: (y := m.normed(m.embed(x), a), m.one(y).sin(), m.bare(y).cos())[1:]
    traced, names = measured(body)
    assert names == ["bare", "one"] and traced.ops()["quantise_rows"] == 2 and not traced.ops()["modulated_norm8"]
    assert traced.error() < 0.05
    monkeypatch.setattr(Selection, "group", lambda self, name, may_rotate: 64)
    traced, _ = measured(body)
    assert traced.ops()["quantise_rows"] == 0 and traced.ops()["modulated_norm8"] == 1 and traced.error() < 0.05


def test_without_the_kernels_one_more_quantises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit_kernels, "AROUND", eight_bit_kernels.AROUND[:-4])
    traced, names = measured(TAKEN["SwiGLU"][0])
    assert names == ["down"] and traced.ops()["quantise_rows"] == traced.ops()["swiglu"] == 1
