"""How a WebUI makes an image of a model's parts, and where it has them meanwhile.

The WebUIs themselves need more than torch: they are stood in for by what the tests of the adapters have, with the
adapters as they are.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.small_cards.parts import SCALE, Conditioner, Parts, conditioning
from sfast_ext.accelerator import accelerator_of

TESTS = Path(__file__).parents[2] / "tests"
GUIDANCE, STRIDE = 3.0, 0.05
LOWVRAM_BLOCKS = ("time_embedding", "down_blocks", "mid_block", "up_blocks")
A1111_MODES = ("none", "medvram", "medvram-sdxl", "lowvram")
MODES = (*A1111_MODES, "balanced")

At = Callable[[str], None]
"""Called when a part of an image begins, with its name; a step of the sampler is called STEP."""
STEP = "a step"


class Host:
    """A WebUI with a model loaded."""

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self.parts, self.device, self.dtype = parts, device, parts.unet.dtype
        self.unet_mb: float | None = None
        """What the UNet's weights had of the GPU at the end of the last image's steps, those in 8 bits included."""

    @torch.no_grad()
    def image(self, width: int, height: int, steps: int, at: At) -> torch.Tensor:
        """Make one from the prompt to the decoded image; returns its latent, on the CPU."""
        at("the prompt")
        given = conditioning(self.parts, self.encode(self.parts.ids(self.device)), width, height)
        latent = self.parts.latent(width, height).to(self.device, self.dtype)
        self.begin()
        for step in range(steps):
            at(STEP)
            self.before_step(step, steps)
            t = torch.tensor(999 * (steps - step) // steps, device=self.device)
            noise = self.unet(torch.cat([latent, latent]), t, given)
            without, with_prompt = noise.chunk(2)
            latent = latent - STRIDE * (without + GUIDANCE * (with_prompt - without))
        if isinstance(self.parts.unet, nn.Module):
            self.unet_mb = held_mb(self.parts.unet)
        at("the VAE")
        self.decode(latent / SCALE)
        at("the end")
        self.end()
        return latent.to("cpu", torch.float32)

    def encode(self, ids: torch.Tensor) -> list[Any]:
        """The results of the text encoders."""
        raise NotImplementedError

    def begin(self) -> None:
        """Before the steps."""

    def before_step(self, step: int, steps: int) -> None:
        """Before each step."""

    def unet(self, latent: torch.Tensor, t: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """One call."""
        raise NotImplementedError

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """The image of a latent."""
        return self.parts.vae.decode(latent, return_dict=False)[0]

    def end(self) -> None:
        """After an image: what is not needed goes back to the driver."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def session(self) -> Any:
        """The extension's; None without it."""
        return None

    def faults(self) -> list[str]:
        """What the host would have logged."""
        return []

    def close(self) -> None:
        """Leave everything as it was."""


def held_mb(unet: nn.Module) -> float:
    """What the weights of a UNet take on the GPU, in MB: each memory once, and those in 8 bits."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in unet.parameters() if t.is_cuda}
    accelerator = accelerator_of(unet)
    banks = 0 if accelerator is None else accelerator.arena.banks.held
    return round((sum(held.values()) + banks) / 2**20, 1)


class Wrapper(nn.Module):
    """What AUTOMATIC1111 calls and moves: it has the UNet."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = unet

    def forward(self, latent: torch.Tensor, t: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        return self.diffusion_model(latent, t, **given, return_dict=False)[0]


class A1111(Host):
    """AUTOMATIC1111 without a flag, or with one that moves the parts of a model.

    Args:
        ours: whether the extension is there.
        eight_bits: whether its setting *8 bits* is on.
    """

    def __init__(self, parts: Parts, device: torch.device, mode: str, ours: bool, eight_bits: bool = False) -> None:
        super().__init__(parts, device)
        standin, lowvram = _of_tests("hosts.standins.a1111"), _of_tests("hosts.standins.lowvram")
        self._open = contextlib.ExitStack()
        self._host = host = self._open.enter_context(standin.running())
        host.place = host.shared.device = device
        host.devices.dtype_unet = self.dtype
        if device.type == "cpu":
            host.opts.data["sfast_allow_cpu"] = True
        host.opts.data["sfast_eight_bits"] = eight_bits
        self._adapter: Any = None
        if ours:
            from sfast_ext.hosts.a1111 import adapter, memory

            # the UNet is diffusers', with other names
            self._open.enter_context(unittest.mock.patch.object(memory, "UNET_BLOCKS", LOWVRAM_BLOCKS))
            self._adapter = adapter.A1111Session
            self._adapter.start("benchmark")
        self._conditioner, self._wrapper = Conditioner(parts.encoders), Wrapper(parts.unet)
        self._lowvram: Any = None
        pieces = (self._conditioner, self._wrapper, parts.vae)
        for piece in pieces:
            nn.Module.to(piece, device if mode == "none" else "cpu")
        if mode != "none":
            blocks = LOWVRAM_BLOCKS if mode == "lowvram" else None
            host.shared.cmd_opts.lowvram = mode == "lowvram"
            self._lowvram = lowvram.LowVram(device)
            self._lowvram.set_up(self._wrapper, [self._conditioner], parts.vae, blocks)
        model = SimpleNamespace(
            model=self._wrapper,
            first_stage_model=parts.vae,
            cond_stage_model=self._conditioner,
            lowvram=mode != "none",
            sd_checkpoint_info=SimpleNamespace(title=parts.name),
        )
        host.reuse(model)
        host.fire("model_loaded", model)
        self._denoiser = standin.Denoiser
        self._sampler: Any = None

    def encode(self, ids: torch.Tensor) -> list[Any]:
        return self._conditioner(ids)

    def begin(self) -> None:
        self._host.shared.state.begin("txt2img")
        self._sampler = self._denoiser()
        self._sampler.p = SimpleNamespace(batch_size=1)

    def before_step(self, step: int, steps: int) -> None:
        event = SimpleNamespace(denoiser=self._sampler, sampling_step=step, sampling_steps=steps)
        self._host.fire("cfg_denoiser", event)

    def unet(self, latent: torch.Tensor, t: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        return self._wrapper(latent, t, given)

    def end(self) -> None:
        if self._lowvram is not None:
            self._lowvram.send_everything_to_cpu()
        # its `torch_gc`, which leaves Python's garbage to Python
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()
        self._host.shared.state.end()

    def session(self) -> Any:
        return self._adapter.running if self._adapter is not None else None

    def faults(self) -> list[str]:
        return [f"{type(exc).__name__}: {exc}" for exc in self._host.errors]

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.stop()
        self._open.close()


class SDNext(Host):
    """SD.Next with balanced offload, as it comes on a card of so many GiB.

    Args:
        ours: whether the extension is there.
        eight_bits: whether its setting *8 bits* is on.
    """

    def __init__(self, parts: Parts, device: torch.device, gib: float, ours: bool, eight_bits: bool = False) -> None:
        super().__init__(parts, device)
        sys.path.insert(0, str(TESTS / "hosts" / "standins" / "sdnext_root"))
        from modules import devices, sd_models, sd_offload, shared

        self._shared, self._offload, devices.device = shared, sd_offload, device
        shared.gpu_memory = gib
        opts = shared.opts
        opts.diffusers_offload_mode = "balanced"
        # SD.Next's defaults for cards of this size
        opts.diffusers_offload_min_gpu_memory = 0 if gib <= 12 else 0.2
        if device.type == "cpu":
            opts.sfast_allow_cpu = True
        opts.sfast_eight_bits = eight_bits
        self._adapter: Any = None
        if ours:
            from sfast_ext.hosts.sdnext import adapter

            self._adapter = adapter.SDNextSession
            self._adapter.start("benchmark")
        names = ("text_encoder", "text_encoder_2")
        self.pipe = SimpleNamespace(
            unet=parts.unet,
            vae=parts.vae,
            sd_checkpoint_info=SimpleNamespace(name=parts.name),
            **dict(zip(names, parts.encoders)),
        )
        for module in (parts.unet, parts.vae, *parts.encoders):
            nn.Module.to(module, "cpu")
        sd_models.load_model(self.pipe)

    def image(self, width: int, height: int, steps: int, at: At) -> torch.Tensor:
        from modules import script_callbacks

        script_callbacks.fire("before_process", SimpleNamespace(batch_size=1))
        self._offload.apply_balanced_offload(self.pipe)
        return super().image(width, height, steps, at)

    def encode(self, ids: torch.Tensor) -> list[Any]:
        return [encoder(ids, output_hidden_states=True) for encoder in self.parts.encoders]

    def begin(self) -> None:
        self._shared.state.begin("Inference")

    def unet(self, latent: torch.Tensor, t: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        return self.parts.unet(latent, t, **given, return_dict=False)[0]

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        self._offload.apply_balanced_offload(self.pipe)
        self._shared.state.begin("VAE Decode")
        return super().decode(latent)

    def session(self) -> Any:
        return self._adapter.running if self._adapter is not None else None

    def faults(self) -> list[str]:
        from modules import script_callbacks

        return [*map(str, self._shared.warnings), *map(str, script_callbacks.exceptions)]

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.stop()


def open_host(
    parts: Parts, device: torch.device, mode: str, gib: float, ours: bool, eight_bits: bool = False
) -> Host:
    """The host of a mode."""
    if mode == "balanced":
        return SDNext(parts, device, gib, ours, eight_bits)
    return A1111(parts, device, mode, ours, eight_bits)


def _of_tests(name: str) -> Any:
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module(name)
