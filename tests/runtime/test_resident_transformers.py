"""Transformers of which the GPU has the 8-bit integers alone: those of diffusers, and one as Forge Neo writes it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from passes import diffusion_transformers
from pretended_card import Card, apart
from quantised_layer import Layer
from small_transformers import KINDS, inputs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from sfast_ext import Config, accelerate
from sfast_ext.hooks import Hooks
from sfast_ext.passes import eight_bits as passes_eight_bits
from sfast_ext.runtime import verify
from sfast_ext.tools.lib import transformers

from .eight_bits import HALF
from .test_resident import CARD, OFF, card, kernels  # noqa: F401

WIDE: dict[str, dict[str, Any]] = {
    "lumina2": {"hidden_size": 128, "axes_dim_rope": (8, 12, 12), "cap_feat_dim": 64, "multiple_of": 64},
    "z-image": {"dim": 192, "n_heads": 6, "n_kv_heads": 6, "axes_dims": [8, 12, 12], "cap_feat_dim": 64},
    "anima": {"num_attention_heads": 2, "attention_head_dim": 64, "text_embed_dim": 64, "adaln_lora_dim": 32},
    "flux": {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "joint_attention_dim": 64},
    "chroma": {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "joint_attention_dim": 64},
}
"""Of the small models: layers that the kernels take."""
STAY = re.compile(r"(\.norm\d?(_context)?\.|norm\d\.|norm_out|adaLN|embed|final|distilled|^proj_out)")
"""Layers that keep half precision: of the timestep and the modulation, the first and the last ones."""
PIECES = re.compile(r"^layers\.0\.attn\.to_[qkv]")
"""Those of Lumina 2 that read what is written piece by piece."""
LORA = re.compile(r"\.1\..*(to_q|qkv|w2|linear_2|to_out\.0|out|net\.2|to_add_out)\.weight$")
C, HEADS = 64, 2
HOOKS = Hooks(scratch=frozenset({"transformer_options"}))


class Cast(nn.Linear):
    """Computes on the device of its input, wherever its weight is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.device), None if self.bias is None else self.bias.to(x.device))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight.to(x.device)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """(B, tokens, heads, columns) by 2x2 matrices, as comfy_kitchen's `apply_rope`."""
    y = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (angles[..., 0] * y[..., 0] + angles[..., 1] * y[..., 1]).reshape(x.shape).to(x.dtype)


class JointBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = (Norm(C) for _ in range(4))
        self.qkv, self.out = Cast(C, 3 * C, bias=False), Cast(C, C, bias=False)
        self.q_norm, self.k_norm = Norm(C // HEADS), Norm(C // HEADS)
        self.w1, self.w2, self.w3 = Cast(C, 192, bias=False), Cast(192, C, bias=False), Cast(C, 192, bias=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Cast(C, 4 * C))

    def forward(self, x: Tensor, vector: Tensor, angles: Tensor) -> Tensor:
        scale, gate, scale_mlp, gate_mlp = self.adaLN_modulation(vector)[:, None].chunk(4, -1)
        y = self.attention_norm1(x) * (1 + scale)
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = rotated(self.q_norm(q), angles), rotated(self.k_norm(k), angles)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + gate.tanh() * self.attention_norm2(self.out(y.transpose(1, 2).flatten(2)))
        y = self.ffn_norm1(x) * (1 + scale_mlp)
        return x + gate_mlp.tanh() * self.ffn_norm2(self.w2(F.silu(self.w1(y)) * self.w3(y)))


class NextDiT(nn.Module):
    """As Forge Neo's: queries, keys and values of one layer, the place in its blocks in the options."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.cap_embedder, self.t_embedder = Cast(16, C), Cast(C, C), Cast(C, C)
        self.layers = nn.ModuleList([JointBlock(), JointBlock()])
        self.final_layer = Cast(C, 16)

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        b, c, h, w = x.shape
        patches = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        together = torch.cat([self.cap_embedder(context), self.x_embedder(patches)], 1)
        vector = self.t_embedder((timesteps[:, None] * torch.arange(1, C + 1, device=x.device)).cos().to(x.dtype))
        places = torch.arange(together.shape[1], device=x.device)
        turn = torch.outer(places, torch.arange(1, C // HEADS // 2 + 1, device=x.device)).float() / 10
        angles = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], -1).unflatten(-1, (2, 2))[:, None]
        for i, layer in enumerate(self.layers):
            transformer_options["block_index"] = i
            together = layer(together, vector, angles)
        y = self.final_layer(together[:, context.shape[1] :])
        return -y.unflatten(1, (h // 2, w // 2)).unflatten(-1, (2, 2, c)).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def made(kind: str) -> nn.Module:
    if kind != "forge":
        return transformers.random_transformer(f"tiny-{kind}", dtype=HALF, **WIDE[kind])
    torch.manual_seed(0)
    return NextDiT().to(HALF).eval().requires_grad_(False)


class On:
    """A transformer under an accelerator, on a pretended GPU, and its twin."""

    def __init__(self, kind: str, config: Config = CARD, change: Callable[[nn.Module], Any] = lambda m: None) -> None:
        self.kind, self.seed, self.twin = kind, 0, made(kind)
        change(self.twin)
        self.ours = copy.deepcopy(self.twin).to("cuda")
        if kind == "lumina2":
            # the pretended GPU takes no table of the CPU
            tables = self.ours.rope_embedder
            tables.freqs_cis = [table.to("cuda") for table in tables.freqs_cis]
        self.acc = accelerate(self.ours, config, hooks=HOOKS)

    def given(self, size: tuple[int, int], tokens: int) -> tuple[Any, dict[str, Any]]:
        t = 0.9 - 0.05 * (self.seed % 10)
        if self.kind != "forge":
            return inputs(self.twin, size, (tokens,), seed=self.seed, timestep=t)
        generator = torch.Generator().manual_seed(self.seed)
        x, context = (torch.randn(s, generator=generator).to(HALF) for s in ((1, 4, *size), (1, tokens, C)))
        return (x, torch.tensor([t]), context), {"transformer_options": {"cond_or_uncond": [0]}}

    def result(self, size: tuple[int, int] = (8, 8), tokens: int = 5) -> tuple[Tensor, float]:
        """The result of a call with other values, and how far it is from the twin's."""
        self.seed += 1
        with apart():
            args, kwargs = self.given(size, tokens)
            wanted = self.only(self.twin(*args, **copy.deepcopy(kwargs)))
        args, kwargs = tree_map_only(Tensor, lambda x: x.to("cuda"), (args, kwargs))
        found = self.only(self.ours(*args, **kwargs)).cpu()
        return found, verify.relative_error([found], [wanted])

    def error(self, size: tuple[int, int] = (8, 8), tokens: int = 5) -> float:
        return self.result(size, tokens)[1]

    def only(self, found: Any) -> Tensor:
        return found if isinstance(found, Tensor) else transformers.result_of(found)

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        change(self.ours)
        with apart():
            change(self.twin)

    def away(self) -> set[str]:
        return {name for name, p in self.ours.named_parameters() if p.device.type == "cpu"}

    def leaving(self) -> set[str]:
        return {name for name, p in self.twin.named_parameters() if p.dim() == 2 and not STAY.search(name)
                and p.dtype == HALF and p.shape[0] % 32 == 0 and p.shape[1] % 64 == 0
                and not (self.kind == "lumina2" and PIECES.search(name))}  # fmt: skip

    def held(self) -> int:
        """What its weights have of the GPU."""
        return sum(p.nbytes for p in self.ours.parameters() if p.is_cuda) + self.acc.arena.banks.held

    def count(self, name: str) -> int:
        return self.acc.report.counter(name)

    def words(self) -> str:
        return str([event["message"] for event in self.acc.report.as_dict()["events"]])


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    diffusion_transformers.available(monkeypatch)
    with torch.no_grad():
        yield


def changed(how: str) -> Callable[[nn.Module], None]:
    """Changes layers as LoRAs do."""

    def change(model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters() if LORA.search(name)]
        assert len(names) > 2
        for name in names:
            layer = model.get_submodule(name.removesuffix(".weight"))
            if how == "in place":
                layer.weight.mul_(-1.3)
            elif how == "rows":
                layer.weight[::3] *= -1.5
            elif how == "data":
                layer.weight.data = layer.weight.data * -0.8
            elif how == "uncounted":
                layer.weight.data.neg_()
            else:
                layer.weight = nn.Parameter(layer.weight.detach() * -0.9, requires_grad=False)

    return change


def stays(on: On, **size: Any) -> None:
    """Calls run plans in 8 bits."""
    errors = [on.error(**size) for _ in range(4)]
    assert max(errors) < 0.07 and sorted(errors)[1] > 1e-4, errors
    assert on.away() == on.leaving() and on.count("errors") == 0, on.words()


@pytest.mark.long(but=[2, 4])
@pytest.mark.parametrize("kind", [*KINDS[:4], "forge"])
def test_the_life_of_a_transformer(card: Card, kind: str) -> None:  # noqa: F811
    on = On(kind)
    # the first call fills the tables of rotary embeddings, or shows what is read of a mask
    assert max(on.error() for _ in range(2)) < 0.07
    stays(on)
    (plan,) = on.acc.plans.values()
    assert plan.resident and plan.has_graph and on.acc.status()["eight_bits"]["kept"] == []
    size, leaving = sum(p.nbytes for p in on.twin.parameters()), on.leaving()
    aside = [p for name, p in on.twin.named_parameters() if name in leaving]
    halves = sum(p.nbytes for p in aside)
    assert len(aside) > 7
    assert on.held() == size - halves // 2 + 12 * sum(len(p) for p in aside)
    for how in ("in place", "rows", "data", "object"):
        on.both(changed(how))
        stays(on)
    on.both(changed("uncounted"))
    on.acc.new_generation()
    stays(on)
    assert on.count("captures") == 1
    # a layer that is patched goes to the model itself
    layer = on.ours.get_submodule(sorted(leaving)[0].removesuffix(".weight"))
    hook = layer.register_forward_hook(lambda module, given, result: result)
    assert on.error() < 0.01 and not on.away()
    hook.remove()
    stays(on)
    stays(on, size=(8, 12), tokens=7)
    assert on.count("captures") == 2
    on.acc.configure(OFF)
    assert not on.away() and on.acc.status()["eight_bits"]["bytes"] == 0
    assert all(on.error() < 0.02 for _ in range(3)) and on.count("errors") == 0
    on.acc.configure(CARD)
    stays(on)
    on.acc.release()
    assert not on.away() and on.held() == size and on.error() < 0.01


@pytest.mark.parametrize("kind", KINDS[1:2])
def test_the_bits_are_those_of_8_bits_next_to_half_precision(
    card: Card, monkeypatch: pytest.MonkeyPatch, kind: str  # noqa: F811
) -> None:
    matches = passes_eight_bits.matches
    monkeypatch.setattr(passes_eight_bits, "matches", lambda graph, few_too: matches(graph, few_too=True))
    results = []
    for resident in (False, True):
        on = On(kind, replace(CARD, resident=resident))
        results.append([on.result()[0] for _ in range(6)])
        assert bool(on.away()) == resident and on.count("replays") > 2
        on.acc.release()
    assert all(map(torch.equal, *results))


def test_weights_that_the_host_streams(card: Card) -> None:  # noqa: F811
    """It has some in system memory, and its layers take them to the GPU as they compute."""
    on = On("forge")
    block = on.ours.layers[1]
    block.to("cpu")
    streamed = on.away()
    for _ in range(3):
        assert on.error() < 1e-3 and on.away() == streamed
    assert list(on.acc.report.as_dict()["reasons"]) == ["some weights are on cpu, others on cuda:0"]
    assert on.count("captures") == 0 and on.count("weights_brought_back") == 0
    block.to("cuda")
    stays(on)
    # what a plan reads in half precision
    block.adaLN_modulation.to("cpu")
    for _ in range(2):
        assert on.error() < 1e-3 and on.away() == {name for name in streamed if "adaLN" in name}
    block.adaLN_modulation.to("cuda")
    stays(on)


def test_layers_that_the_host_quantised(card: Card) -> None:  # noqa: F811
    """They are used as they are, next to weights in system memory."""

    def quantise(model: nn.Module) -> None:
        torch.manual_seed(1)
        for name in ("w1", "w3"):
            setattr(model.layers[1], name, Layer(C, 192, bias=False))

    on = On("forge", change=quantise)
    stays(on)
    assert on.ours.layers[1].w1.weight.is_cuda and not {n for n in on.away() if n.startswith("layers.1.w1")}
    on.both(changed("in place"))
    stays(on)
    on.both(lambda m: m.layers[1].w1.scale.mul_(-1.5))
    stays(on)
    assert on.count("captures") == 1
