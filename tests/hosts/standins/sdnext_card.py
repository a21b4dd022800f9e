"""SD.Next's stand-in on a pretended GPU of so many GiB, with models whose parts have the proportions of real ones.

A GiB is as many bytes as make the UNet as large as that of the model, in GiB.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_card import GPU, Card, pretended_card
from torch import nn

from hosts.standins.sdnext import Host, diffusers, hosted
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.tools.lib import models
from sfast_ext.weights import digest

OUTSIDE = 0.5
"""GiB that CUDA and the desktop have."""
STEPS = 2


@dataclass(frozen=True)
class Proportions:
    """GiB of a model's parts in half precision, and a size at which its VAE takes what a real one does."""

    unet: float
    text_encoder: float
    width: int
    height: int


SD15 = Proportions(1.60, 0.23, 22, 22)  # 512x512: 0.375 GiB to decode
SDXL = Proportions(4.78, 1.55, 24, 24)  # 1024x1024: 1.5 GiB


_images: dict[Any, torch.Tensor] = {}


class CLIPTextModel(nn.Module):
    """A text encoder of so many bytes."""

    def __init__(self, size: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.layer = models.randomise(nn.Embedding(size // 16 // dtype.itemsize, 16, dtype=dtype), seed)

    @property
    def device(self) -> torch.device:
        return self.layer.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(torch.zeros(1, dtype=torch.int64, device=x.device))


def unet(seed: int = 0) -> Any:
    """Most of its weights are where its activations are small, as in a real one."""
    return models.copied(_unet(seed))


@functools.lru_cache(maxsize=None)
def _unet(seed: int) -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4, 16, 80),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
        cross_attention_dim=16,
        attention_head_dim=8,
    )
    return models.randomise(unet, seed).eval()


def vae(seed: int = 1) -> Any:
    return models.copied(_vae(seed))


@functools.lru_cache(maxsize=None)
def _vae(seed: int) -> Any:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
    )
    return models.randomise(vae, seed).eval()


def weights(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


class CardHost:
    """The host with a model loaded, as it comes: its defaults for a card of this size.

    Args:
        gib: the card's memory.
        like: the model's proportions.
    """

    def __init__(self, host: Host, card: Card, gib: float, like: Proportions, scale: float, dtype: torch.dtype) -> None:
        self.host, self.card, self.like, self.scale, self.dtype = host, card, like, scale, dtype
        self.devices, self.shared = host.sd_offload.devices, host.shared
        self.devices.device = GPU
        self.shared.gpu_memory = card.capacity / 2**30
        opts = host.opts
        opts.sfast_triton = opts.sfast_allow_cpu = False
        opts.diffusers_offload_mode = "balanced"
        if gib <= 12:
            opts.diffusers_offload_min_gpu_memory = 0
        elif gib >= 24:
            opts.diffusers_offload_max_gpu_memory = 0.8
            opts.diffusers_offload_never = "CLIPTextModel AutoencoderKL"
        host.sd_models.load_model(self.pipeline())

    def pipeline(self, seed: int = 0) -> Any:
        return SimpleNamespace(
            unet=unet(seed).to(self.dtype),
            text_encoder=CLIPTextModel(int(self.like.text_encoder * self.scale), self.dtype, seed),
            vae=vae().to(self.dtype),
            sd_checkpoint_info=SimpleNamespace(name=f"tiny-{seed}"),
        )

    @property
    def unet(self) -> Any:
        return self.host.modeldata.model_data.sd_model.unet

    def image(self, **job: Any) -> torch.Tensor:
        return self.host.image(**self._sized(job))

    def stock(self, **job: Any) -> torch.Tensor:
        return self.host.stock(**self._sized(job))

    def _stock_of_a_fresh_one(self, seed: int, **job: Any) -> torch.Tensor:
        """The same job of a model that was never touched, on a CPU."""
        data, device = self.host.modeldata.model_data, self.devices.device
        loaded = data.sd_model
        mode = self.host.opts.diffusers_offload_mode
        self.host.opts.diffusers_offload_mode, self.devices.device = "none", self.devices.cpu
        data.sd_model = self.pipeline(seed)
        try:
            return self.stock(**job)
        finally:
            data.sd_model, self.devices.device = loaded, device
            self.host.opts.diffusers_offload_mode = mode

    def expected(self, seed: int = 0, **job: Any) -> torch.Tensor:
        """What `stock` gives for a checkpoint, made once for all cards: for tests that ask for nothing else of it."""
        key = self.like, self.dtype, seed, tuple(job.items())
        if key not in _images:
            _images[key] = self._stock_of_a_fresh_one(seed, **job)
        return _images[key]

    def job(self, expected: torch.Tensor | None = None, **job: Any) -> dict[str, int]:
        """Make an image; what was counted meanwhile.

        Nothing may run out of memory, nor read what was freed.
        """
        names = ("captures", "graph_captures", "weights_away", "memory_given_back", "errors")
        report = self.host.session.report
        before = {name: report.counter(name) for name in names}
        runs, refused = self.host.runs(), self.card.refused
        self.card.peak = 0
        image = self.image(**job)
        assert self.card.refused == refused and not self.card.faults and not self.shared.warnings
        if expected is not None:
            half = self.dtype != torch.float32
            torch.testing.assert_close(image, expected, rtol=0.1 if half else 1e-3, atol=0.1 if half else 1e-4)
        counted = {name: report.counter(name) - before[name] for name in names}
        assert not counted.pop("errors"), self.host.status()["last_error"]
        return {"runs": self.host.runs() - runs, **counted}

    def used(self) -> float:
        """GiB in use, all told."""
        return self.card.used / self.scale + OUTSIDE

    def peak(self) -> float:
        """GiB in use at most since the last job began."""
        return self.card.peak / self.scale + OUTSIDE

    def _sized(self, job: dict[str, Any]) -> dict[str, Any]:
        return {"width": self.like.width, "height": self.like.height, "steps": STEPS, **job}


@contextlib.contextmanager
def card_host(
    patch: pytest.MonkeyPatch,
    gib: float,
    like: Proportions,
    dtype: torch.dtype = torch.float32,
    release: str = "july",
) -> Iterator[CardHost]:
    """The host on a card of `gib` GiB, of a release of `STANDINS`."""
    scale = weights(unet().to(dtype)) / like.unet
    for name in ("IDLE_RESERVE", "WORKSPACE", "DECODING_RESERVE"):
        patch.setattr(gpu_room, name, int(getattr(gpu_room, name) / 2**30 * scale))
    patch.setattr(digest, "COLUMNS", 2)
    patch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE)
    hosting = hosted(patch, release)
    host = next(hosting)
    with pretended_card(patch, int(gib * scale), int(OUTSIDE * scale)) as card:
        try:
            yield CardHost(host, card, gib, like, scale, dtype)
        finally:
            next(hosting, None)
