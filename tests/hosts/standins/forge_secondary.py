"""A Forge's VAE and ControlNets, for its stand-ins: what they are, and how it calls them."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from hosts.standins import a1111_vae
from hosts.standins.a1111 import CONTEXT, _module
from sfast_ext.tools.lib import models


class Silu(nn.SiLU):
    """Writes in place, as Forge's does."""

    def __init__(self) -> None:
        super().__init__(inplace=True)


class Network(nn.Module):
    """The encoder beside the UNet, tiny: it makes residuals of the shapes of the UNet's skips."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.hint = nn.Conv2d(3, 32, 3, padding=1)
        self.time = nn.Linear(1, 32)
        self.text = nn.Linear(CONTEXT, 32)
        self.input_blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, into), Silu(), nn.Conv2d(into, out, 3, stride=stride, padding=1))
            for into, out, stride in ((32, 32, 1), (32, 32, 1), (32, 32, 2), (32, 64, 1))
        )
        self.conv_in = nn.Conv2d(4, 32, 3, padding=1)
        self.zero_convs = nn.ModuleList(nn.Conv2d(width, width, 1) for width in (32, 32, 32, 64))
        self.middle_block_out = nn.Conv2d(64, 64, 1)

    def forward(self, x, hint, timesteps, context, y=None):
        emb = self.time(timesteps[:, None] / 1000) + self.text(context).mean(1)
        h = self.conv_in(x) + self.hint(hint) + emb[:, :, None, None]
        outs = []
        for block, zero in zip(self.input_blocks, self.zero_convs):
            h = block(h)
            outs.append(zero(h))
        return [*outs, self.middle_block_out(h)]


class ControlNet:
    """One unit of an image: the network, its image and strength, and the unit before it."""

    def __init__(self, control_model: nn.Module, strength: float = 1.0) -> None:
        self.control_model, self.strength = control_model, strength
        self.previous_controlnet: ControlNet | None = None
        self.calls = 0

    def set_previous_controlnet(self, previous_controlnet: ControlNet | None) -> None:
        self.previous_controlnet = previous_controlnet

    def get_control(self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor) -> dict[str, list[Any]]:
        """The residuals, scaled in place, and those of the unit before added in place."""
        hint = torch.linspace(0, 1, 3 * x.shape[2] * x.shape[3], device=x.device).view(1, 3, *x.shape[2:])
        found = self.control_model(x=x, hint=hint.expand(len(x), -1, -1, -1), timesteps=timestep, context=context)
        for each in found:
            each *= self.strength
        self.calls += 1
        before = self.previous_controlnet
        if before is not None:
            earlier = before.get_control(x, timestep, context)
            for mine, theirs in zip(found, [*earlier["output"], *earlier["middle"]]):
                mine += theirs
        return {"input": [], "middle": found[-1:], "output": found[:-1]}


class T2IAdapter(ControlNet):
    """Another kind of unit, whose network runs once for each image."""


def network(seed: int) -> nn.Module:
    """One of random weights."""
    return models.randomise(models.copied(_network()), seed).eval().requires_grad_(False)


@functools.lru_cache(maxsize=None)
def _network() -> nn.Module:
    return Network()


def modules(package: str) -> dict[str, ModuleType]:
    """What imports find of them."""
    return {f"{package}.controlnet": _module(f"{package}.controlnet", ControlNet=ControlNet)}


class VAE:
    """Forge Neo's `backend.patcher.vae.VAE`, and reForge's `ldm_patched.modules.sd.VAE`: it asks for memory before it
    decodes or encodes, and decodes in tiles if that was too little."""

    def __init__(self, first_stage_model: nn.Module, patcher: Any = None, device: Any = "cpu") -> None:
        self.first_stage_model, self.patcher, self.device = first_stage_model, patcher, torch.device(device)
        self.vae_dtype = next(first_stage_model.parameters()).dtype
        self.tiled = 0

    @property
    def _memory(self) -> Any:
        name = "backend.memory_management"
        return sys.modules[name if name in sys.modules else "ldm_patched.modules.model_management"]

    def memory_used(self, shape: Any) -> int:
        """By a formula; of each image."""
        return 2178 * shape[2] * shape[3] * 4 * self.vae_dtype.itemsize

    def _in_batches(self, run: Any, operand: torch.Tensor) -> torch.Tensor:
        needed = self.memory_used(operand.shape)
        self._memory.load_models_gpu([self.patcher], memory_required=needed)
        most = max(1, int(self._memory.get_free_memory(self.device) / needed))
        return torch.cat([run(each.to(self.device).to(self.vae_dtype)).float() for each in operand.split(most)])

    def decode(self, samples_in: torch.Tensor) -> torch.Tensor:
        try:
            return self._in_batches(self.first_stage_model.decode, samples_in).movedim(1, -1)
        except torch.cuda.OutOfMemoryError:
            self.tiled += 1
        self._memory.load_models_gpu([self.patcher], memory_required=self.memory_used(samples_in.shape))
        return torch.zeros(())

    def encode(self, pixel_samples: torch.Tensor) -> torch.Tensor:
        return self._in_batches(self.first_stage_model.encode, pixel_samples.movedim(-1, 1))


def vae(seed: int) -> Any:
    """The object that has a checkpoint's VAE."""
    made = a1111_vae.make_vae(seed)
    for module in list(made.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, nn.Dropout(0.0, inplace=True))
    return VAE(made.eval())


def control(host: Any, *units: ControlNet) -> None:
    """The units of the next images, in a clone of the UNet's patcher, as a script adds them."""
    objects = host.model_data.sd_model.forge_objects
    # an image begins with the patcher that had none yet
    before = getattr(objects.unet, "before_control", objects.unet)
    objects.unet = before.clone()
    objects.unet.before_control = before
    linked: ControlNet | None = None
    for unit in units:
        unit.set_previous_controlnet(linked)
        linked = unit
    objects.unet.controlnet_linked_list = linked
    calls = iter(range(10_000))

    def found() -> Any:
        if linked is None:
            return None
        generator = torch.Generator().manual_seed(7)
        x = torch.randn((2, 4, 8, 8), generator=generator)
        context = torch.randn((2, 7, CONTEXT), generator=generator)
        timestep = torch.full((2,), 900.0 - 10 * next(calls))
        return linked.get_control(*(each.to(host.place) for each in (x, timestep, context)))

    host.control = found


@torch.inference_mode()
def encode(host: Any, size: int = 16) -> torch.Tensor:
    """What img2img begins with: the job's function is called, then the VAE, then the sampler."""
    job = SimpleNamespace(override_settings={}, extra_generation_params={})
    sys.modules["modules.processing"].process_images_inner(job)
    image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
    return host.model_data.sd_model.forge_objects.vae.first_stage_model.encode(image.to(host.place)).cpu()


@torch.inference_mode()
def decode(host: Any, size: int = 8, seed: int = 4) -> torch.Tensor:
    """The end of each image."""
    latent = torch.randn((1, 4, size, size), generator=torch.Generator().manual_seed(seed))
    return host.model_data.sd_model.forge_objects.vae.first_stage_model.decode(latent.to(host.place)).cpu()
