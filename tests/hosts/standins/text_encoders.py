"""Text encoders of random weights, small, as the hosts have them, and how they are called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from sfast_ext.tools.lib import models

WIDTH, WORDS, TOKENS, END = 64, 300, 77, 299


class Attention(nn.Module):
    """transformers 4.30's: products, masks and a softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.k_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden_states, attention_mask, causal_attention_mask, output_attentions=False):
        rows, tokens, width = hidden_states.shape

        def split(x):
            x = x.view(rows, tokens, self.heads, width // self.heads).transpose(1, 2).contiguous()
            return x.view(rows * self.heads, tokens, -1)

        query = split(self.q_proj(hidden_states) * self.scale)
        key, value = split(self.k_proj(hidden_states)), split(self.v_proj(hidden_states))
        weights = torch.bmm(query, key.transpose(1, 2)).view(rows, self.heads, tokens, tokens)
        for mask in (causal_attention_mask, attention_mask):
            if mask is not None:
                weights = weights + mask
        weights = nn.functional.softmax(weights.view(rows * self.heads, tokens, tokens), dim=-1)
        out = torch.bmm(nn.functional.dropout(weights, 0.1, self.training), value)
        out = out.view(rows, self.heads, tokens, -1).transpose(1, 2).reshape(rows, tokens, width)
        return self.out_proj(out), weights if output_attentions else None


class QuickGelu(nn.Module):
    """That of OpenAI's CLIP."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(width, 2 * width), QuickGelu(), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))


class Layer(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(width, heads), Mlp(width)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden_states, attention_mask, causal_attention_mask, output_attentions=False):
        found, weights = self.self_attn(
            hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask,
            causal_attention_mask=causal_attention_mask, output_attentions=output_attentions,
        )  # fmt: skip
        hidden_states = hidden_states + found
        outputs = (hidden_states + self.mlp(self.layer_norm2(hidden_states)),)
        return (*outputs, weights) if output_attentions else outputs


class CLIPEncoder(nn.Module):
    """The layers, which collect what they are asked for."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_attentions=False, output_hidden_states=False)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])

    def forward(
        self, inputs_embeds, attention_mask=None, causal_attention_mask=None, output_attentions=None,
        output_hidden_states=None, return_dict=None,
    ):  # fmt: skip
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = () if output_hidden_states else None
        attentions = () if output_attentions else None
        hidden_states = inputs_embeds
        for layer in self.layers:
            if output_hidden_states:
                states = (*states, hidden_states)
            outputs = layer(hidden_states, attention_mask, causal_attention_mask, output_attentions=output_attentions)
            hidden_states = outputs[0]
            if output_attentions:
                attentions = (*attentions, outputs[1])
        if output_hidden_states:
            states = (*states, hidden_states)
        if return_dict is False:
            return tuple(each for each in (hidden_states, states, attentions) if each is not None)
        return BaseModelOutput(last_hidden_state=hidden_states, hidden_states=states, attentions=attentions)


class Embeddings(nn.Module):
    """Of tokens and of places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)

    def forward(self, input_ids):
        return self.token_embedding(input_ids) + self.position_embedding.weight[: input_ids.shape[-1]]


class TextTransformer(nn.Module):
    """transformers 4's text model."""

    def __init__(self, width: int = WIDTH, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(width), CLIPEncoder(width, layers, heads)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, input_ids, output_attentions=None, output_hidden_states=None, return_dict=None):
        x = self.embeddings(input_ids)
        rows, tokens = input_ids.shape
        least = torch.finfo(x.dtype).min
        mask = torch.full((tokens, tokens), least, dtype=x.dtype, device=x.device).triu_(1)
        found = self.encoder(
            inputs_embeds=x, attention_mask=None, causal_attention_mask=mask.expand(rows, 1, tokens, tokens),
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=return_dict,
        )  # fmt: skip
        last = self.final_layer_norm(found.last_hidden_state)
        pooled = last[torch.arange(rows, device=last.device), input_ids.to(torch.int).argmax(dim=-1)]
        return BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=pooled, hidden_states=found.hidden_states, attentions=found.attentions
        )


class TextModel(nn.Module):
    """transformers' own name for it."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.text_model = TextTransformer(**sizes)

    def forward(self, input_ids, **options):
        return self.text_model(input_ids, **options)


class WithFixes(nn.Module):
    """What WebUIs put in the place of the embeddings of tokens: vectors of textual inversion at places in a prompt."""

    def __init__(self, wrapped: nn.Module, hijack: Any) -> None:
        super().__init__()
        self.wrapped, self.embeddings = wrapped, hijack

    def forward(self, input_ids):
        fixes, self.embeddings.fixes = self.embeddings.fixes, None
        found = self.wrapped(input_ids)
        if not fixes or not any(fixes):
            return found
        rows = []
        for row, each in zip(found, fixes):
            for offset, vectors in each:
                n = min(len(row) - offset - 1, len(vectors))
                row = torch.cat([row[: offset + 1], vectors[:n].to(row), row[offset + 1 + n :]])
            rows.append(row)
        return torch.stack(rows)


def clip_l(seed: int, fixes: bool = False, **sizes: int) -> Any:
    """transformers 4's text model as AUTOMATIC1111 has it."""
    return _made(SimpleEmbedder(TextModel(**sizes)), seed, fixes)


def open_clip(seed: int, kind: str = "FrozenOpenCLIPEmbedder2", fixes: bool = False, **sizes: Any) -> Any:
    """ldm's or sgm's embedder of OpenCLIP. `packages` has to be entered."""
    package = "ldm" if kind == "FrozenOpenCLIPEmbedder" else "sgm"
    return _made(getattr(sys.modules[f"{package}.text_standin"], kind)(**sizes), seed, fixes)


class SimpleEmbedder(nn.Module):
    """ldm's FrozenCLIPEmbedder, without its tokenizer."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer


def _made(embedder: Any, seed: int, fixes: bool) -> Any:
    models.randomise(embedder, seed).eval().requires_grad_(False)
    if fixes:
        owner = embedder.model if hasattr(embedder, "model") else embedder.transformer.text_model.embeddings
        embedder.hijack = SimpleNamespace(fixes=None)
        owner.token_embedding = WithFixes(owner.token_embedding, embedder.hijack)
    return embedder


@contextmanager
def packages() -> Iterator[None]:
    """Stand-ins of ldm's and sgm's embedders, in modules of these packages."""
    file = Path(__file__).with_name("open_clip_embedders.py")
    names = ("ldm.text_standin", "sgm.text_standin")
    try:
        for name in names:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            module: ModuleType = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


def ids(seed: int, rows: int = 1, tokens: int = TOKENS) -> torch.Tensor:
    """So many prompts of a chunk each."""
    found = torch.randint(0, END, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    found[:, tokens // 2] = END
    return found


@torch.no_grad()
def read(embedder: Any, tokens: torch.Tensor, skip: int = 1, fixes: Any = None) -> list[torch.Tensor]:
    """All that a host takes of an encoding."""
    if fixes is not None:
        embedder.hijack.fixes = fixes
    if hasattr(embedder, "model"):
        found = embedder.encode_with_transformer(tokens)
        return list(found.values()) if isinstance(found, dict) else [found]
    # a number, as AUTOMATIC1111 has it
    outputs = embedder.transformer(input_ids=tokens, output_hidden_states=-skip)
    z = outputs.last_hidden_state
    if skip > 1:
        z = embedder.transformer.text_model.final_layer_norm(outputs.hidden_states[-skip])
    return [z, outputs.pooler_output, *outputs.hidden_states]
