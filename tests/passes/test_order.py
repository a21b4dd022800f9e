"""The order of the passes, held to what each requires; and that what it requires is needed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import eight_bit_kernels
import pytest
import torch
from quantised_layer import Layer
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext import passes
from sfast_ext.capture.functionalize import functionalize
from sfast_ext.kernels.attention import query_attention
from sfast_ext.kernels.linear import linear_layer_norm
from sfast_ext.passes import PASSES, Pass, Phase, run_passes
from sfast_ext.passes.eight_bits_selection import Selection

from .attentions import apart, together
from .diffusion_transformers import available, half, traced, z_image
from .support import Traced, name, randn

HALF = torch.bfloat16
C = 128
Edge = tuple[int, int]
"""Places in the table: of a pass, and of one that requires it."""


def edges(table: Sequence[Pass]) -> list[Edge]:
    """What `requires` says, by places in the table. A name that is not there has the place -1."""
    found = []
    for place, entry in enumerate(table):
        for wanted in entry.requires:
            others = [i for i, other in enumerate(table) if other.name == wanted and other.phase <= entry.phase]
            found.append((max(others, key=lambda i: table[i].phase, default=-1), place))
    return found


def violations(table: Sequence[Pass]) -> list[str]:
    """What is wrong with an order, in words."""
    found = [
        f"{entry.name} of {entry.phase.name} comes after {before.name} of {before.phase.name}"
        for before, entry in zip(table, table[1:])
        if entry.phase < before.phase
    ]
    for earlier, later in edges(table):
        if earlier == -1:
            found.append(f"{table[later].name} requires a pass that is not there by its phase")
        elif earlier >= later:
            found.append(f"{table[later].name} comes before {table[earlier].name}, which it requires")
    return found


def exchanged(table: Sequence[Pass], edge: Edge) -> list[Pass]:
    """The order nearest to the table's in which these two are exchanged and all other requirements are met."""
    earlier, later = edge
    before: dict[int, set[int]] = {i: set() for i in range(len(table))}
    for a, b in edges(table):
        before[b].add(a)
    before[later].remove(earlier)
    before[earlier].add(later)
    order: list[int] = []
    while len(order) < len(table):
        # raises if the others require the same: then this requirement would say nothing
        order.append(next(i for i in range(len(table)) if i not in order and before[i] <= {*order}))
    return [table[i] for i in order]


EDGES = edges(PASSES)


def label(edge: Edge) -> str:
    return f"{PASSES[edge[1]].name} after {PASSES[edge[0]].name}"


def test_the_order_is_that_of_the_phases_and_of_what_passes_require() -> None:
    assert violations(PASSES) == []
    assert {entry.phase for entry in PASSES} == {*Phase}


def test_a_pass_is_called_like_its_function() -> None:
    assert all(entry.name == entry.function.__name__ for entry in PASSES)


@pytest.mark.parametrize("edge", EDGES, ids=label)
def test_the_wrong_order_is_noticed(edge: Edge) -> None:
    table = list(PASSES)
    table.insert(edge[0], table.pop(edge[1]))
    assert any(f"{PASSES[edge[1]].name} comes before {PASSES[edge[0]].name}" in words for words in violations(table))
    assert violations(exchanged(PASSES, edge))


def test_a_pass_of_an_earlier_phase_is_noticed() -> None:
    table = [Pass("a", len, Phase.FUSION), Pass("b", len, Phase.LAYOUT)]
    assert violations(table) == ["b of LAYOUT comes after a of FUSION"]
    assert not violations(table[::-1])


def test_a_pass_that_is_not_there_is_noticed() -> None:
    assert violations([Pass("a", len, Phase.LAYOUT, ("b",))])
    assert violations([Pass("a", len, Phase.LAYOUT, ("b",)), Pass("b", len, Phase.FUSION)])


def test_a_name_that_occurs_twice_stands_for_the_last_up_to_the_phase() -> None:
    one, two = Pass("a", len, Phase.CANONICALIZE), Pass("a", len, Phase.LAYOUT)
    assert edges([one, Pass("b", len, Phase.CANONICALIZE, ("a",)), two]) == [(0, 1)]
    assert edges([one, two, Pass("b", len, Phase.FUSION, ("a",))]) == [(1, 2)]


# --- what each requirement is for ---


class Net(nn.Module):
    """What a UNet has, once: a residual block of two norms, a transformer block, a skip connection, an upsampling."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, C, 3, padding=1), nn.Conv2d(C, 4, 3, padding=1)
        self.conv, self.conv2, self.conv3 = (nn.Conv2d(C, C, 3, padding=1) for _ in range(3))
        self.wide = nn.Conv2d(2 * C, C, 3, padding=1)
        self.time, self.time2 = nn.Linear(C, C), nn.Linear(C, C)
        self.norms = nn.ModuleList(nn.GroupNorm(4, C) for _ in range(4))
        self.wide_norm = nn.GroupNorm(4, 2 * C)
        self.proj_in, self.proj_out = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.q, self.k, self.v = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.q2, self.k2, self.v2 = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.out, self.out2 = nn.Linear(C, C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(2 * C, C)
        self.layer_norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3))
        self.body = body

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)

    def resnet(self, x: Tensor, emb: Tensor) -> Tensor:
        y = self.conv(F.silu(self.norms[0](x))) + self.time(F.silu(emb))[:, :, None, None]
        return x + self.conv2(F.silu(self.norms[1](y)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(x.shape[0], -1, 4, C // 4).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(q.shape[0], -1, C)

    def transformer(self, x: Tensor, prompt: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.proj_in(self.norms[2](x)).permute(0, 2, 3, 1).reshape(n, h * w, c)
        z = self.layer_norms[0](y)
        y = self.out(self.attend(self.q(z), self.k(z), self.v(z))) + y
        z = self.layer_norms[1](y)
        y = self.out2(self.attend(self.q2(z), self.k2(prompt), self.v2(prompt))) + y
        value, gate = self.up(self.layer_norms[2](y)).chunk(2, -1)
        y = self.down(value * F.gelu(gate)) + y
        return self.proj_out(y.reshape(n, h, w, c).permute(0, 3, 1, 2)) + x


def embedded(t: Tensor) -> Tensor:
    """Of timesteps, as diffusers writes it."""
    angle = 1 * (t[:, None].float() * torch.exp(torch.arange(C // 2) * -0.1)[None])
    y = torch.cat([angle.sin(), angle.cos()], -1)
    return torch.cat([y[:, C // 2 :], y[:, : C // 2]], -1).to(HALF)


def unet(m: Net, x: Tensor, t: Tensor, prompt: Tensor) -> Tensor:
    emb = embedded(t)
    skip = m.conv_in(x)
    y = m.transformer(m.resnet(skip, emb), prompt)
    y = m.conv3(F.interpolate(y, scale_factor=2.0))[:, :, :4, :4]
    y = m.wide(F.silu(m.wide_norm(torch.cat([y, skip], 1)))) + m.time2(F.silu(emb))[:, :, None, None]
    return m.conv_out(F.silu(m.norms[3](y)))


LATENT, T, PROMPT = randn(2, 4, 4, 4).to(HALF), torch.tensor([981, 3]), randn(2, 5, C).to(HALF)
FEATURES, EMB, LARGE = randn(2, C, 4, 4).to(HALF), randn(2, C).to(HALF), randn(2, C, 9, 9).to(HALF)


def literal(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0]).exp()


def copied(x: Tensor) -> Tensor:
    return x.clone().sin() + x.sin()


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.transpose(-2, -1), -1), 0.0) @ v


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out, over some queries and then over the others."""
    q, k, v = (apart(x) for x in (q, k, v))
    return together(torch.cat([torch.softmax(part @ k.transpose(1, 2), -1) @ v for part in (q[:, :5], q[:, 5:])], 1))


def in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (apart(x) for x in (q, k, v))
    return together(F.scaled_dot_product_attention(q.double(), k.double(), v.double()).to(q.dtype))


def two_times(m: Net, x: Tensor, emb: Tensor) -> Tensor:
    """Two residual blocks, whose projections of the embedding are packed."""
    y = m.conv(x) + m.time(F.silu(emb))[:, :, None, None]
    y = m.conv2(F.silu(m.norms[0](y))) + m.time2(F.silu(emb))[:, :, None, None]
    return m.norms[1](y)


def permuted(m: Net, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = m.q(x).reshape(2, -1, 4, C // 4).permute(0, 2, 1, 3)
    return F.scaled_dot_product_attention(q, k, v)


def in_8_bits() -> Traced:
    inputs = randn(2, C, 16, 16).to(HALF), PROMPT
    traced = Traced(Net(Net.transformer).to(HALF), *inputs)
    traced.ctx.eight_bits = Selection(inputs=inputs)
    return traced


class FeedForward(nn.Module):
    """Of Flux, with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(F.layer_norm(x, [C])), approximate="tanh"))


def in_8_bits_of(block: nn.Module, inputs: list[Tensor]) -> Traced:
    given = half(inputs)
    found = Traced(block.to(HALF), *given)
    found.ctx.eight_bits = Selection(inputs=given)
    return found


def convolution_in_8_bits() -> Traced:
    inputs = (randn(2, C, 16, 16).to(HALF),)
    traced = Traced(Net(of_a_sum).to(HALF), *inputs)
    traced.ctx.eight_bits = Selection(inputs=inputs)
    return traced


def of_a_sum(m: Net, x: Tensor) -> Tensor:
    return m.conv(F.silu(m.norms[0](x.sin() + x))).sin()


class Quantised(nn.Module):
    """A layer that a library quantised, between a norm and GEGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(C).to(HALF), Layer(C, 4 * C)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.layer(self.norm(x)).chunk(2, -1)
        return value * F.gelu(gate)


def by_a_library() -> Traced:
    traced = Traced(Quantised(), PROMPT)
    functionalize(traced.gm)
    return traced


HEADS = randn(2, 4, 5, C // 4).to(HALF)
TOKENS = [randn(2, 13, 24), randn(2, 13, 24).cos(), randn(2, 13, 24).sin()]
NETS: dict[str, Callable[[], Traced]] = {
    "a UNet": lambda: Traced(Net(unet).to(HALF), LATENT, T, PROMPT),
    "8 bits": in_8_bits,
    "a convolution in 8 bits": convolution_in_8_bits,
    "a quantised layer": by_a_library,
    "a residual block": lambda: Traced(Net(Net.resnet).to(HALF), LARGE, EMB),
    "two embeddings": lambda: Traced(Net(two_times).to(HALF), LARGE, EMB),
    "queries permuted": lambda: Traced(Net(permuted).to(HALF), PROMPT, HEADS, HEADS),
    "a literal": lambda: Traced(literal, randn(2, 3)),
    "a copy": lambda: Traced(copied, randn(2, 3)),
    "dropout": lambda: Traced(dropped, *TOKENS),
    "slices": lambda: Traced(sliced, *TOKENS),
    "casts": lambda: Traced(in_float, *TOKENS),
    "Z-Image": lambda: traced("Z-Image"),
    "Flux": lambda: traced("Flux"),
    "GELU in 8 bits": lambda: in_8_bits_of(FeedForward(), [randn(2, 160, C)]),
    "Z-Image in 8 bits": lambda: in_8_bits_of(*z_image(tokens=160, width=192)),
}


class Outcome:
    """Of the passes in an order: how often each rewrote, and which operations there are with which options."""

    def __init__(self, net: str, order: Sequence[Pass]) -> None:
        traced = NETS[net]()
        with mock.patch.object(passes, "PASSES", order):
            self.counts = run_passes(traced.gm, traced.ctx)
        self.operations: Counter[str] = Counter()
        for node in traced.graph.nodes:
            if node.op == "call_function":
                self.operations[name(node)] += 1
                self.operations.update(f"{name(node)}, {key}" for key, x in node.kwargs.items() if x)


@functools.lru_cache(maxsize=None)
def in_order(net: str) -> Outcome:
    return Outcome(net, PASSES)


@pytest.fixture(autouse=True)
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Triton is there."""
    eight_bit_kernels.available(monkeypatch, by_triton=True)
    available(monkeypatch)


@pytest.fixture
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the tensors are."""
    monkeypatch.setattr(linear_layer_norm, "profitable", lambda *sizes: True)
    monkeypatch.setattr(linear_layer_norm, "best", lambda *sizes: linear_layer_norm.Tile(64, 8, 0.0, 0.0))
    monkeypatch.setattr(query_attention, "profitable", lambda *sizes: True)


PROOFS: dict[str, tuple[str, str]] = {
    "cse after cleanup": ("a copy", "cse"),
    "fold_constants after cleanup": ("a literal", "fold_constants"),
    "scaled_dot_product after cleanup": ("dropout", "scaled_dot_product"),
    "sliced_attention after scaled_dot_product": ("slices", "sliced_attention"),
    "attention_heads after sliced_attention": ("slices", "sliced_attention"),
    "attention_casts after attention_heads": ("casts", "attention_casts"),
    "packed_linear after cse": ("two embeddings", "packed_linear"),
    "cleanup after channels_last": ("a UNet", "cleanup"),
    "group_norm after packed_linear": ("two embeddings", "+ add"),
    "attention_casts after rotary": ("Z-Image", "rotary"),
    "norm_rotary after rms_norm": ("Z-Image", "+ modulated_norm"),
    "joint_heads after norm_rotary": ("Flux", "joint_heads"),
    "gated_residual after rms_norm": ("Z-Image", "+ modulated_norm"),
    "modulated_norm after gated_residual": ("Z-Image", "gated_residual"),
    "gated_norm after modulated_norm": ("Flux", "gated_norm"),
    "add_layer_norm after gated_residual": ("Flux", "gated_residual"),
    "layer_norm after modulated_norm": ("Flux", "modulated_norm"),
    "eight_bits after swiglu": ("Z-Image in 8 bits", "eight_bits"),
    "layer_norm after add_layer_norm": ("a UNet", "add_layer_norm"),
    "linear_geglu after geglu": ("a UNet", "linear_geglu"),
    "linear_accumulate after add_layer_norm": ("a UNet", "linear_accumulate"),
    "eight_bits after layer_norm": ("8 bits", "eight_bits"),
    "eight_bits after geglu": ("8 bits", "eight_bits"),
    "eight_bits after linear_accumulate": ("8 bits", "linear_accumulate"),
    "quantised_norm after layer_norm": ("a quantised layer", "quantised_norm"),
    "quantised_geglu after geglu": ("a quantised layer", "quantised_geglu"),
    "linear_gelu after eight_bits": ("GELU in 8 bits", "eight_bits"),
    "linear_layer_norm after eight_bits": ("8 bits", "eight_bits"),
    "linear_layer_norm after cleanup": ("a UNet", "linear_layer_norm"),
    "bias_add after narrow_conv": ("a UNet", "+ add_group_norm"),
    "bias_add after group_norm": ("two embeddings", "conv_group_norm"),
    "bias_add after linear_accumulate": ("a UNet", "linear_accumulate"),
    "group_norm_inputs after bias_add": ("a UNet", "+ bias_add"),
    "eight_bits_conv after eight_bits": ("a convolution in 8 bits", "eight_bits_conv"),
    "eight_bits_conv after group_norm_inputs": ("a convolution in 8 bits", "- add_group_norm8"),
    "im2col after group_norm_inputs": ("a UNet", "- cat_group_norm, patches"),
    "upsample_conv2d after bias_add": ("a UNet", "upsample_conv2d"),
    "conv2d after im2col": ("a UNet", "im2col"),
    "conv2d after upsample_conv2d": ("a UNet", "upsample_conv2d"),
    "conv_group_norm after conv2d": ("a residual block", "conv_group_norm"),
    "upsample after upsample_conv2d": ("a UNet", "upsample_conv2d"),
    "query_attention after attention_heads": ("queries permuted", "query_attention"),
    "query_attention after packed_linear": ("a UNet", "- attention"),
    "attention after query_attention": ("queries permuted", "query_attention"),
}
"""Of each requirement: where exchanging the two is seen, and by what: a pass that rewrites less, or an operation that
is there more often (+) or less often (-)."""


def lost(what: str, base: Outcome, other: Outcome) -> bool:
    sign, _, operation = what.partition(" ")
    if sign == "+":
        return other.operations[operation] > base.operations[operation]
    if sign == "-":
        return other.operations[operation] < base.operations[operation]
    return other.counts[what] < base.counts[what]


def test_there_is_a_proof_of_each_requirement() -> None:
    assert sorted(PROOFS) == sorted(map(label, EDGES))


@pytest.mark.parametrize("edge", EDGES, ids=label)
def test_what_a_pass_requires_is_needed(edge: Edge, everything_pays: None) -> None:
    net, what = PROOFS[label(edge)]
    assert lost(what, in_order(net), Outcome(net, exchanged(PASSES, edge)))


@pytest.mark.parametrize(
    ("phase", "net", "what"),
    [
        (Phase.LAYOUT, "two embeddings", "packed_linear"),
        (Phase.FUSION, "a UNet", "linear_layer_norm"),
        (Phase.LOWERING, "a UNet", "im2col"),
    ],
)
def test_a_phase_expects_the_one_before_it(phase: Phase, net: str, what: str, everything_pays: None) -> None:
    keys = {entry.phase: float(entry.phase) for entry in PASSES} | {phase: phase - 1.5}
    order = sorted(PASSES, key=lambda entry: keys[entry.phase])
    assert lost(what, in_order(net), Outcome(net, order))
