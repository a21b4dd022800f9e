"""A transformer in the stand-in of Forge Neo."""

from __future__ import annotations

import torch
from torch import nn

from hosts.standins.forge import CONTEXT, Linear


class NextDiT(nn.Module):
    """A transformer as of Lumina 2 and Z-Image; the place in its blocks is noted in the options."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.context = Linear(4, 32), Linear(CONTEXT, 32)
        self.layers = nn.ModuleList(Linear(32, 32) for _ in range(3))
        self.last = Linear(32, 4)
        self.dtype = torch.float32

    def forward(self, x, timesteps, context, num_tokens=None, attention_mask=None, transformer_options={}, **kwargs):  # noqa: B006
        h = self.patches(x.flatten(2).transpose(1, 2)) + timesteps[:, None, None] / 1000
        h = torch.cat([self.context(context), h], dim=1)
        transformer_options["total_blocks"] = len(self.layers)
        for i, layer in enumerate(self.layers):
            transformer_options["block_index"] = i
            h = h + torch.tanh(layer(h))
        return -self.last(h[:, context.shape[1] :]).transpose(1, 2).reshape(x.shape)
