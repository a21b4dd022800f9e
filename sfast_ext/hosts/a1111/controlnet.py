"""sd-webui-controlnet in AUTOMATIC1111, which replaces the UNet's forward by one that calls the UNet's blocks itself.

The names are those of its version 1.1.455 (scripts/hook.py). In another version they may not be found; then the UNet's
blocks are accelerated, and the ControlNets are not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from sfast_ext.behaviour.foreign_code import describe

MARKS = frozenset(
    {
        "current_h_shape",
        "current_sampling_percent",
        "cond_mark",
        "attn_weight",
        "gn_weight",
        "is_in_high_res_fix",
        "ipadapter_hacks",
    }
)
"""What it notes on the UNet's modules for its own functions. While these are patched in, calls are bypassed."""


def unet_blocks(unet: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of an ldm or sgm UNet that another extension's forward may call one by one; none contains another."""
    for group in ("input_blocks", "output_blocks"):
        for i, block in enumerate(getattr(unet, group, ())):
            # a single convolution is one kernel: copies of inputs and outputs would cost more than a plan gains
            if any(True for m in block.modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm))):
                yield f"{group}.{i}", block
    middle = getattr(unet, "middle_block", None)
    if isinstance(middle, nn.Module):
        yield "middle_block", middle


def active_networks(unet: nn.Module) -> list[nn.Module]:
    """The ControlNets that run in this pass and stay on the GPU during all of it."""
    hook = _hook_of(unet)
    return [] if hook is None or getattr(hook, "lowvram", False) else list(_controlnets_of(hook))


def cached_networks(unet: nn.Module) -> list[nn.Module]:
    """The ControlNets that the extension keeps loaded, without those that leave the GPU in this pass."""
    hook = _hook_of(unet)
    leaving = list(_controlnets_of(hook)) if getattr(hook, "lowvram", False) else []
    for data in getattr(sys.modules.get("modules.scripts"), "scripts_data", ()):
        cache = getattr(getattr(data, "script_class", None), "model_cache", None)
        if isinstance(cache, dict):
            networks = (getattr(entry.model, "control_model", None) for entry in cache.values())
            return [n for n in networks if isinstance(n, nn.Module) and not any(n is other for other in leaving)]
    return []


def _controlnets_of(hook: Any) -> Iterator[nn.Module]:
    for unit in getattr(hook, "control_params", None) or ():
        kind = getattr(unit, "control_model_type", None)
        network = getattr(getattr(unit, "control_model", None), "control_model", None)
        if getattr(kind, "is_controlnet", False) and isinstance(network, nn.Module):
            yield network


def _hook_of(unet: nn.Module) -> Any:
    """The extension's object for this pass, from the closure of its forward on the UNet."""
    function = getattr(vars(unet).get("forward"), "__func__", None)
    if function is None or ".hook" not in describe(function):
        return None
    try:
        return inspect.getclosurevars(function).nonlocals.get("outer")
    except (TypeError, ValueError):
        return None
