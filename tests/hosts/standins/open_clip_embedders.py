"""The embedders of ldm and sgm around OpenCLIP's text model; loaded under the names of their packages."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """OpenCLIP's, whose attention is torch's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attn_mask=None):
        normed = self.ln_1(x)
        attn_mask = attn_mask.to(x.dtype) if attn_mask is not None else None
        x = x + self.attn(normed, normed, normed, need_weights=False, attn_mask=attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Its blocks. Nobody calls it."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.resblocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])


class Model(nn.Module):
    """OpenCLIP's without its vision."""

    def __init__(self, width: int, layers: int, heads: int, words: int, tokens: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(words, width)
        self.positional_embedding = nn.Parameter(torch.zeros(tokens, width))
        self.transformer = Transformer(width, layers, heads)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.zeros(width, width))
        self.register_buffer("attn_mask", torch.full((tokens, tokens), float("-inf")).triu_(1), persistent=False)


class FrozenOpenCLIPEmbedder(nn.Module):
    """That of SD 2."""

    def __init__(self, width=64, layers=3, heads=4, words=300, tokens=77, layer="penultimate") -> None:
        super().__init__()
        self.model = Model(width, layers, heads, words, tokens)
        self.layer, self.layer_idx = layer, {"last": 0, "penultimate": 1}[layer]

    def encode_with_transformer(self, text):
        x = self.model.token_embedding(text) + self.model.positional_embedding
        x = self.text_transformer_forward(x.permute(1, 0, 2), attn_mask=self.model.attn_mask)
        return self.model.ln_final(x.permute(1, 0, 2))

    def text_transformer_forward(self, x: torch.Tensor, attn_mask=None):
        for i, block in enumerate(self.model.transformer.resblocks):
            if i == len(self.model.transformer.resblocks) - self.layer_idx:
                break
            if self.model.transformer.grad_checkpointing and not torch.jit.is_scripting():
                x = torch.utils.checkpoint.checkpoint(block, x, attn_mask)
            else:
                x = block(x, attn_mask=attn_mask)
        return x


class FrozenOpenCLIPEmbedder2(nn.Module):
    """The second of SDXL."""

    def __init__(self, width=64, layers=3, heads=4, words=300, tokens=77) -> None:
        super().__init__()
        self.model = Model(width, layers, heads, words, tokens)
        self.layer, self.legacy = "penultimate", False

    def encode_with_transformer(self, text):
        x = self.model.token_embedding(text) + self.model.positional_embedding
        x = self.text_transformer_forward(x.permute(1, 0, 2), attn_mask=self.model.attn_mask)
        last = self.model.ln_final(x["last"])
        x["pooled"] = last[torch.arange(len(text)), text.argmax(dim=-1)] @ self.model.text_projection
        return x

    def text_transformer_forward(self, x: torch.Tensor, attn_mask=None):
        outputs = {}
        for i, block in enumerate(self.model.transformer.resblocks):
            if i == len(self.model.transformer.resblocks) - 1:
                outputs["penultimate"] = x.permute(1, 0, 2)
            if self.model.transformer.grad_checkpointing and not torch.jit.is_scripting():
                x = torch.utils.checkpoint.checkpoint(block, x, attn_mask)
            else:
                x = block(x, attn_mask=attn_mask)
        outputs["last"] = x.permute(1, 0, 2)
        return outputs


class ScaledEmbedder(FrozenOpenCLIPEmbedder):
    """One whose blocks end with a parameter of the embedder."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 2.0))

    def text_transformer_forward(self, x: torch.Tensor, attn_mask=None):
        for block in self.model.transformer.resblocks:
            x = block(x, attn_mask=attn_mask)
        return self.scale * x
