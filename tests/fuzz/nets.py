"""The models that events are played on, and the calls they take: a net of all kinds of layers, small enough for
thousands of captures, and a real UNet."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.tools.lib import models

CONTEXT = 8
CHANNELS = {"small": 8, "wide": 32, "tokens": 64, "transformer": 8}
"""Of the nets of each kind that is no UNet; `mma_gemm` takes those of 32, 8-bit integers those of 64."""
CPU = torch.device("cpu")


class PlainProcessor:
    """Attention as a processor of diffusers computes it."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            layer(value).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer, value in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return attn.to_out(out.transpose(1, 2).flatten(2))


class Attention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)
        self.to_out = nn.Linear(width, width)
        self.processor: Any = PlainProcessor()

    def forward(self, hidden_states, encoder_hidden_states=None):
        return self.processor(self, hidden_states, encoder_hidden_states=encoder_hidden_states)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(width, width)
        self.norm2 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 1)
        self.token_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, width)
        self.cross_attention = Attention(width, CONTEXT)
        self.ff = nn.Linear(width, 2 * width)

    def forward(self, x, emb, context):
        h = self.conv(nn.functional.silu(self.norm(x))) + self.time(nn.functional.silu(emb))[:, :, None, None]
        h = x + self.conv2(nn.functional.silu(self.norm2(h)))
        tokens = h.flatten(2).transpose(1, 2)
        tokens = tokens + self.self_attention(self.token_norm(tokens))
        tokens = tokens + self.cross_attention(tokens, context)
        value, gate = self.ff(tokens).chunk(2, dim=-1)
        tokens = tokens + value * nn.functional.gelu(gate)
        return tokens.transpose(1, 2).reshape(h.shape)


class TokenBlock(Block):
    """With a whole transformer block, whose layers can be products of 8-bit integers."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.cross_norm, self.ff_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ff, self.ff_out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, emb, context):
        h = self.conv(nn.functional.silu(self.norm(x))) + self.time(nn.functional.silu(emb))[:, :, None, None]
        h = x + self.conv2(nn.functional.silu(self.norm2(h)))
        tokens = h.flatten(2).transpose(1, 2)
        tokens = self.self_attention(self.token_norm(tokens)) + tokens
        tokens = self.cross_attention(self.cross_norm(tokens), context) + tokens
        value, gate = self.ff(self.ff_norm(tokens)).chunk(2, dim=-1)
        tokens = self.ff_out(value * nn.functional.gelu(gate)) + tokens
        return tokens.transpose(1, 2).reshape(h.shape)


class LightBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(width, width)

    def forward(self, x, emb, context):
        return x + self.conv(nn.functional.silu(self.norm(x))) + self.time(nn.functional.silu(emb))[:, :, None, None]


class SmallNet(nn.Module):
    """A UNet's kinds of layers, one or two of each."""

    offset: torch.Tensor

    def __init__(self, width: int = 8, block: type[Block] = Block) -> None:
        super().__init__()
        self.time_embed = nn.Linear(4, width)
        self.conv_in = nn.Conv2d(4, width, 3, padding=1)
        self.blocks = nn.ModuleList([block(width), LightBlock(width)])
        self.norm_out = nn.GroupNorm(2, width)
        self.conv_out = nn.Conv2d(width, 4, 3, padding=1)
        self.register_buffer("offset", torch.ones(4))
        self.table = torch.ones(width)  # no buffer: only `.to` of the host's own would move it
        self.s1, self.b1 = 1.0, 1.0

    def forward(self, sample, timestep, encoder_hidden_states, residual=None, scale: float = 1.0, return_dict=True):
        t = timestep if torch.is_tensor(timestep) else torch.tensor(timestep)
        t = t.to(sample.device).reshape(-1).expand(sample.shape[0]).to(sample.dtype)[:, None] / 100
        emb = self.time_embed(torch.cat([t, t * t, t.sin(), t.cos()], dim=1))
        h = self.conv_in(sample)
        for i, block in enumerate(self.blocks):
            h = block(h, emb, encoder_hidden_states)
            if residual is not None:
                h = h + residual[i]
            h = torch.cat([h[:, :4] * self.b1, h[:, 4:] * self.s1], dim=1)
        h = h * self.table.to(h.dtype)[:, None, None]
        h = self.conv_out(nn.functional.silu(self.norm_out(h))) + self.offset.to(h.dtype)[:, None, None]
        h = h * scale
        return {"sample": h} if return_dict else (h,)


class Rope:
    """Rotary tables as transformers have them: made at the first use, in a list of an object that is no module."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.tables: list[torch.Tensor] | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens, of which each pair of channels is turned by an angle of its place."""
        if self.tables is None:
            angles = torch.outer(torch.arange(512.0), 0.5 ** torch.arange(self.width // 2))
            self.tables = [torch.polar(torch.ones_like(angles), angles)]
        turns = self.tables[0].to(tokens.device)[torch.arange(tokens.shape[1], device=tokens.device)]
        pairs = torch.view_as_complex(tokens.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(tokens)


class RotaryBlock(Block):
    """With a transformer block as of Lumina 2: RMS norms, modulation, rotary embedding and SwiGLU."""

    rope: Rope

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.modulation, self.rms_norm = nn.Linear(width, 3 * width), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x, emb, context):
        h = x + self.conv(nn.functional.silu(self.norm(x))) + self.time(nn.functional.silu(emb))[:, :, None, None]
        tokens = h.flatten(2).transpose(1, 2)
        scale, gate, shift = self.modulation(nn.functional.silu(emb)).unsqueeze(1).chunk(3, dim=-1)
        turned = self.rope(self.rms_norm(tokens) * (1 + scale) + shift)
        tokens = tokens + gate.tanh() * self.token_norm(self.self_attention(turned))
        tokens = tokens + self.cross_attention(tokens, context)
        value, gate = self.ff(self.rms_norm(tokens)).chunk(2, dim=-1)
        tokens = tokens + nn.functional.silu(value) * gate
        return tokens.transpose(1, 2).reshape(h.shape)


class TransformerNet(SmallNet):
    """What transformers do and UNets do not: tables of rotary embeddings, and lengths of prompts that are read."""

    def __init__(self, width: int) -> None:
        super().__init__(width, RotaryBlock)
        self.rope = self.blocks[0].rope = Rope(width)  # type: ignore[assignment]

    def forward(self, sample, timestep, encoder_hidden_states, residual=None, scale=1.0, return_dict=True, mask=None):
        tokens = encoder_hidden_states.shape[1]
        prompts = zip(encoder_hidden_states, mask.sum(dim=1).tolist())
        context = torch.stack([nn.functional.pad(each[:n], (0, 0, 0, tokens - n)) for each, n in prompts])
        return super().forward(sample, timestep, context, residual, scale, return_dict)


@dataclass
class Request:
    """What is asked for until the next event changes it; values are drawn anew at each call."""

    width: int = 8
    height: int = 8
    batch: int = 2
    tokens: int = 7
    timestep: str = "1-d"
    style: str = "positional"
    residual: bool = False
    scale: str | None = None
    strided: bool = False
    missing: int = 0
    """Tokens that the first prompt of a transformer has less."""


TIMESTEPS = ("int", "float", "0-d", "0-d float", "1-d", "1-d of one")
STYLES = ("positional", "keywords", "mixed", "tuple result")


def arguments(
    request: Request, rng: random.Random, dtype: torch.dtype, *, kind: str, device: torch.device = CPU
) -> tuple[tuple, dict]:
    """Positional and keyword arguments of one call, with values of its own."""

    def noise(*shape: int) -> torch.Tensor:
        # drawn on the CPU: a seed plays the same everywhere
        generator = torch.Generator().manual_seed(rng.getrandbits(48))
        return torch.randn(shape, generator=generator).to(device, dtype)

    unet, step = kind == "unet", rng.randrange(1, 999)
    # a single number may lie on the CPU while the model is on a GPU
    home = rng.choice((device, CPU))
    timestep: Any = {
        "int": step,
        "float": step + 0.25,
        "0-d": torch.tensor(step, device=home),
        "0-d float": torch.tensor(step + 0.5, device=home),
        "1-d": torch.full((request.batch,), float(step), device=device),
        # diffusers moves a number alone
        "1-d of one": torch.tensor([step], device=device if unet else home),
    }[request.timestep]
    # a real UNet halves the size three times
    # of a sequence of tokens, products of 8-bit integers take 256 rows or more
    half = 1 if unet or kind == "tokens" else 2
    height, width = request.height // half, request.width // half
    sample = noise(request.batch, 4, height, width)
    if request.strided:
        sample = sample.contiguous(memory_format=torch.channels_last)
    context = noise(request.batch, request.tokens, 32 if unet else CONTEXT)
    named: dict[str, Any] = {"sample": sample, "timestep": timestep, "encoder_hidden_states": context}
    if not unet:
        if request.residual:
            shapes = ((request.batch, CHANNELS[kind], height, width), (1, CHANNELS[kind], 1, 1))
            named["residual"] = [noise(*shape) for shape in shapes]
        if request.scale is not None:
            value = rng.uniform(0.5, 1.5)
            named["scale"] = torch.tensor(value) if request.scale == "tensor" else value
    if kind == "transformer":
        named["mask"] = torch.ones(request.batch, request.tokens, dtype=torch.int64, device=device)
        named["mask"][0, request.tokens - request.missing :] = 0
    if request.style == "tuple result":
        named["return_dict"] = False
    positional: list[Any] = []
    if request.style in ("positional", "mixed"):
        names = ("sample", "timestep", "encoder_hidden_states") if request.style == "positional" else ("sample",)
        positional = [named.pop(n) for n in names]
    return tuple(positional), named


def make(kind: str, seed: int) -> nn.Module:
    """A model of random weights, in fp32 on the CPU: "small", "wide", "tokens", "transformer" or "unet"."""
    if kind == "unet":
        return models.tiny_unet("sd15", seed=seed)
    if kind == "transformer":
        return models.randomise(TransformerNet(CHANNELS[kind]), seed).eval()
    return models.randomise(SmallNet(CHANNELS[kind], TokenBlock if kind == "tokens" else Block), seed).eval()


def move(model: nn.Module, device: torch.device) -> None:
    """All that a model reads to a device, as its host does."""
    nn.Module.to(model, device)
    if isinstance(model, SmallNet):
        model.table = model.table.to(device)
