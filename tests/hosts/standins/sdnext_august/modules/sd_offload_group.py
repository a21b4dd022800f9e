"""Offload by groups: each part of a pipeline has a role."""

from __future__ import annotations

from typing import Any

from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from modules import devices, shared
from modules.sd_offload_balanced import modules_of

MAIN = ("unet", "controlnet")
HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


class OnDemandHook(ModelHook):
    """Brings a module when `decode` or `encode` is called."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        module.to(devices.device)
        return args, kwargs


def role(name: str, module: Any) -> str:
    """Where a part is."""
    never = shared.opts.diffusers_offload_never.split()
    if name in never or type(module).__name__ in never:
        return "resident"
    if hasattr(module, "encode") or hasattr(module, "decode"):
        return "ondemand"
    return "main" if name in MAIN else "aux"


def remove_group_offload(pipe: Any) -> None:
    """Takes the hooks off. The empty registries of diffusers stay."""
    for module in modules_of(pipe).values():
        remove_group_offload_of(module)
        if getattr(module, "sdnext_ondemand", False):
            module.sdnext_ondemand = False
            remove_hook_from_module(module, recurse=True)


def apply_group_offload(pipe: Any) -> None:
    """Gives each part what its role asks for; nothing if it has that."""
    from diffusers.hooks import apply_group_offloading

    for name, module in modules_of(pipe).items():
        wanted = role(name, module)
        kind = shared.opts.group_offload_type if wanted == "main" else "leaf_level"
        signature = f"{wanted}:{kind}"
        if getattr(module, "sdnext_group_offload_sig", None) == signature:
            continue
        remove_hook_from_module(module, recurse=True)
        remove_group_offload_of(module)
        module.sdnext_ondemand = False
        module.requires_grad_(False)
        if wanted == "resident":
            module.to(devices.device)
        elif wanted == "ondemand":
            add_hook_to_module(module, OnDemandHook())
            module.sdnext_ondemand = True
            module.to(devices.cpu)
        else:
            module.sdnext_group_offload_pin = True
            module.sdnext_group_offload_pin_limit = 1.0
            blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
            apply_group_offloading(module, onload_device=devices.device, offload_type=kind, **blocks)
            module.sdnext_group_offload_sig = signature


def remove_group_offload_of(module: Any) -> None:
    """The hooks of one part."""
    if getattr(module, "sdnext_group_offload_sig", None) is not None:
        from diffusers.hooks.hooks import HookRegistry

        registry = HookRegistry.check_if_exists_or_initialize(module)
        for name in HOOKS:
            registry.remove_hook(name, recurse=True)
        module.sdnext_group_offload_sig = None
