"""Reasons to bypass calls in SD.Next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.hosts import gpu_room, reasons
from sfast_ext.hosts.sdnext import sdnq_layers
from sfast_ext.reasons import Reason

OFFLOADS = {"sequential": reasons.OFFLOAD_BY_LAYERS, "group": reasons.OFFLOAD_BY_GROUPS}
"""Offload modes with which a plan would hold the memory that the user wants free."""

GROUP_HOOKS = frozenset({"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"})
"""The names that diffusers gives the hooks of group offload in its registries."""

WHOLE_HOOKS = frozenset({"CpuOffload"})
"""Accelerate's hooks of offload by models. They stay on the loaded model if another mode is chosen: SD.Next 058a7f0c
does not apply balanced offload again to a checkpoint that had it before."""

PIPELINES = {"PAG": reasons.PAG, "Reference": reasons.REFERENCE}
"""Parts of the class names of pipelines, and why such a pipeline cannot be accelerated."""

COMPILERS = ("onediff", "oneflow", "sfast.")


def model_bypass_reason(unet: nn.Module, opts: Any) -> Reason | None:
    """Why a UNet cannot be accelerated as it is loaded; None if it can.

    Such a reason lasts from one job to the next, so nothing is kept for the UNet meanwhile.
    """
    mode = getattr(opts, "diffusers_offload_mode", "none")
    parted = _mode_in_parts(unet, mode)
    if parted is not None:
        return OFFLOADS[parted](parted)
    moved_whole = mode == "model" or any(type(h).__name__ in WHOLE_HOOKS for h in _hooks_of(unet))
    if moved_whole and not gpu_room.has_room_to_stay(unet):
        return reasons.OFFLOAD_WHOLE(mode) if mode == "model" else reasons.OFFLOAD_WHOLE_STILL()
    if _compiled(unet):
        return reasons.COMPILED()
    quantised = _quantised(unet)
    return None if quantised is None else reasons.QUANTISED(quantised)


def _mode_in_parts(network: nn.Module, mode: str) -> str | None:
    """The mode of `OFFLOADS` that a network is under. With "group", SD.Next keeps some networks on the GPU, and the
    hooks of others stay in another mode until the next image."""
    if getattr(network, "sdnext_ondemand", False) or any(GROUP_HOOKS & hook_names(m) for m in network.modules()):
        return "group"
    return "sequential" if mode == "sequential" else None


def run_bypass_reason(pipe: Any, unet: nn.Module) -> Reason | None:
    """Why calls must be bypassed in this run of a pipeline; None if they need not. Takes milliseconds."""
    kind = type(pipe).__name__
    for part, what in PIPELINES.items():
        if part in kind and not (part == "PAG" and _without_pag(pipe)):
            return what()
    if hasattr(pipe, "tgate"):
        return reasons.T_GATE()
    return layers_bypass_reason(unet)


def attention_bypass_reason(opts: Any) -> Reason | None:
    """Why no call can be accelerated with the settings of attention; None if calls can."""
    return reasons.SPARSE_ATTENTION() if getattr(opts, "sparse_attention_enabled", False) else None


def hook_names(module: nn.Module) -> frozenset[str]:
    """The names of the hooks that diffusers has on a layer. SD.Next takes them off and leaves their empty registry."""
    registry = module.__dict__.get("_diffusers_hook")
    return frozenset() if registry is None else frozenset(getattr(registry, "hooks", ("unknown",)))


def layers_bypass_reason(unet: nn.Module) -> Reason | None:
    """Why calls must be bypassed because of a network's layers; None if they need not. Takes milliseconds."""
    for module in unet.modules():
        attributes = module.__dict__
        if "_original_forward" in attributes:
            return reasons.HYPERTILE_MODIFIER()
        if hasattr(type(module), "_parent"):
            return reasons.MERGING_CLASSES()
        if type(attributes.get("processor")).__name__ == "TokenMergeAttentionProcessor":
            return reasons.MERGING_BY_STEP()
        if type(module).__name__ == "GeneralizedLinearAttention":
            return reasons.LINFUSION()
        if hook_names(module):
            return reasons.DIFFUSERS_HOOKS()
        if module is not unet and not keeps_weights(attributes.get("_hf_hook")):
            # on the UNet itself it is the offload by models, see model_bypass_reason
            # balanced offload alone leaves accelerate's map; hooks of sequential offload stay, as `WHOLE_HOOKS` do
            in_parts = hasattr(unet, "hf_device_map")
            return reasons.OFFLOAD_OF_PARTS() if in_parts else reasons.OFFLOAD_BY_LAYERS_STILL()
    return None


def _without_pag(pipe: Any) -> bool:
    """Whether a pipeline for PAG runs without it: SD.Next's page uses one for every image, at a scale of -1."""
    scale = getattr(pipe, "_cfg_true", None)
    return isinstance(scale, (int, float)) and scale <= 0


def _compiled(unet: nn.Module) -> bool:
    if type(unet).__name__ == "OptimizedModule" or type(unet).__module__.startswith(COMPILERS):
        return True
    return any(m.__dict__.get("_compiled_call_impl") is not None for m in unet.modules())


def _quantised(unet: nn.Module) -> str | None:
    of_sdnq = [m for m in unet.modules() if sdnq_layers.is_of_sdnq(m)]
    if of_sdnq:
        unknown = next((what for m in of_sdnq if (what := sdnq_layers.unknown_format(m))), None)
        if unknown is not None:
            return f"SDNQ, {unknown}"
    else:
        method = getattr(unet, "quantization_method", None)
        if method is not None:
            return str(getattr(method, "value", method))
    known = set(map(id, of_sdnq))
    for weight in _weights(module for module in unet.modules() if id(module) not in known):
        if type(weight) not in (torch.Tensor, nn.Parameter):
            return "SDNQ" if sdnq_layers.is_class_of_sdnq(type(weight)) else type(weight).__name__
        if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return str(weight.dtype).removeprefix("torch.")
    return None


def _weights(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(module.weight, torch.Tensor):
            yield module.weight


def keeps_weights(hook: Any) -> bool:
    """Whether an accelerate hook, or None for no hook, leaves the weights on their device."""
    if hook is None:
        return True
    inner = getattr(hook, "hooks", None)
    if inner is not None:
        return all(keeps_weights(h) for h in inner)
    if type(hook).__name__ in WHOLE_HOOKS | {"LayerwiseCastingHook"}:
        return False
    return not getattr(hook, "offload", False)


def _hooks_of(module: nn.Module) -> Sequence[Any]:
    """The accelerate hooks on a module."""
    hook = module.__dict__.get("_hf_hook")
    return () if hook is None else getattr(hook, "hooks", (hook,))
