"""Balanced offload: accelerate's hook on the UNet, taken away and put back at every job."""

from __future__ import annotations

from typing import Any

from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from modules import shared


class OffloadHook(ModelHook):
    """Moves the module to the device in the host; there is only one device here."""


def move_module_to_cpu(module: Any, op: str = "unk", force: bool = False) -> None:
    module.to("cpu")


def apply_balanced_offload(pipe: Any) -> None:
    if shared.opts.diffusers_offload_mode != "balanced":
        return
    remove_hook_from_module(pipe.unet, recurse=True)
    move_module_to_cpu(pipe.unet, op="apply")
    add_hook_to_module(pipe.unet, OffloadHook(), append=True)
    pipe.unet.module_name = "unet"
    pipe.unet.balanced_offload_device_map = {"": 0}


def disable_offload(pipe: Any) -> None:
    remove_hook_from_module(pipe.unet, recurse=True)
