"""Upscalers and preview decoders of random weights in the shapes of the real ones, full size or tiny."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.tools.lib.models import randomise, without_initialisation

TILE = 192
"""Pixels along each side of the tiles in which WebUIs upscale with ESRGAN."""


class DenseBlock(nn.Module):
    """Five convolutions, each of which reads the results of all before it."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        for i in range(5):
            last = features if i == 4 else growth
            setattr(self, f"conv{i + 1}", nn.Conv2d(features + i * growth, last, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        known = [x]
        for i in range(4):
            known.append(F.leaky_relu(getattr(self, f"conv{i + 1}")(torch.cat(known, 1)), 0.2))
        out: Tensor = self.conv5(torch.cat(known, 1))
        return out * 0.2 + x


class Residual(nn.Module):
    """Three dense blocks."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(DenseBlock(features, growth) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        out: Tensor = self.blocks(x)
        return out * 0.2 + x


class Esrgan(nn.Module):
    """ESRGAN's generator, which enlarges an image four times along each side."""

    def __init__(self, blocks: int = 23, features: int = 64, growth: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, features, 3, padding=1)
        self.body = nn.Sequential(*(Residual(features, growth) for _ in range(blocks)))
        self.trunk = nn.Conv2d(features, features, 3, padding=1)
        self.up1, self.up2 = (nn.Conv2d(features, features, 3, padding=1) for _ in range(2))
        self.hr, self.last = nn.Conv2d(features, features, 3, padding=1), nn.Conv2d(features, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The enlarged image of an image."""
        x = self.first(x)
        x = x + self.trunk(self.body(x))
        for up in (self.up1, self.up2):
            x = F.leaky_relu(up(F.interpolate(x, scale_factor=2.0, mode="nearest")), 0.2)
        out: Tensor = self.last(F.leaky_relu(self.hr(x), 0.2))
        return out


class Clamp(nn.Module):
    """Bounds a latent smoothly."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        return torch.tanh(x / 3) * 3


class PreviewBlock(nn.Module):
    """Three convolutions and what they read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.conv, self.skip, self.fuse = nn.Sequential(*layers[:-1]), nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        out: Tensor = self.fuse(self.conv(x) + self.skip(x))
        return out


def _preview_decoder(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [Clamp(), nn.Conv2d(4, width, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [PreviewBlock(width) for _ in range(3)]
        layers += [nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1, bias=False)]
    return nn.Sequential(*layers, PreviewBlock(width), nn.Conv2d(width, 3, 3, padding=1))


def preview_decoder(
    width: int = 64, seed: int = 0, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> nn.Module:
    """A decoder as TAESD has it, of random weights, in evaluation mode."""
    with without_initialisation(torch.device(device)):
        made = _preview_decoder(width)
    return randomise(made.to(dtype), seed).eval().requires_grad_(False)


def esrgan(
    blocks: int = 23,
    features: int = 64,
    growth: int = 32,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A generator as ESRGAN has it, of random weights, in evaluation mode."""
    with without_initialisation(torch.device(device)):
        made = Esrgan(blocks, features, growth)
    return randomise(made.to(dtype), seed).eval().requires_grad_(False)
