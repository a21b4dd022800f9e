"""AUTOMATIC1111's modules/lowvram.py: with --medvram and --lowvram one part of a model is on the GPU at a time.

As there, the part that is needed comes by a forward pre-hook, after the one before it has left.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

BLOCKS = ("input_blocks", "middle_block", "output_blocks", "time_embed")
"""Of ldm's UNet. Lists come block by block."""


class LowVram:
    """The host's module, for one model.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.module_in_gpu: nn.Module | None = None
        self._parents: dict[nn.Module, nn.Module] = {}

    def send_everything_to_cpu(self) -> None:
        """After each image."""
        if self.module_in_gpu is not None:
            self.module_in_gpu.to("cpu")
        self.module_in_gpu = None

    def send_me_to_gpu(self, module: nn.Module, _: Any = None) -> None:
        """The forward pre-hook."""
        module = self._parents.get(module, module)
        if self.module_in_gpu is module:
            return
        if self.module_in_gpu is not None:
            self.module_in_gpu.to("cpu")
        module.to(self.device)
        self.module_in_gpu = module

    def set_up(
        self, wrapper: nn.Module, encoders: Sequence[nn.Module], vae: nn.Module, blocks: Sequence[str] | None = None
    ) -> None:
        """Prepare a model whose parts are on the CPU.

        Args:
            wrapper: holds the UNet as `diffusion_model`.
            vae: its decode and encode are wrapped, if it has them.
            blocks: with --lowvram, the names of the UNet's parts that come one by one; the rest of it stays.
        """
        for module in (*encoders, vae):
            module.register_forward_pre_hook(self.send_me_to_gpu)
        for name in ("encode", "decode"):
            if hasattr(vae, name):
                setattr(vae, name, self._after_coming(vae, getattr(vae, name)))
        if blocks is None:
            wrapper.register_forward_pre_hook(self.send_me_to_gpu)
            return
        unet: Any = wrapper.diffusion_model
        stored = {name: getattr(unet, name) for name in blocks}
        for name in blocks:
            setattr(unet, name, None)
        wrapper.to(self.device)
        for name, part in stored.items():
            setattr(unet, name, part)
            for each in part if isinstance(part, nn.ModuleList) else [part]:
                each.register_forward_pre_hook(self.send_me_to_gpu)

    def _after_coming(self, module: nn.Module, function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.send_me_to_gpu(module)
            return function(*args, **kwargs)

        return wrapped
