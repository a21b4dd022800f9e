"""Which UNets are loaded as a whole with 8 bits on a small card, and what these take of the GPU; see `resident`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.eight_bits import RESIDENT
from sfast_ext.hosts import gpu_room


@dataclass(frozen=True)
class Residence:
    """What differs between the programs.

    Args:
        networks: the classes of the UNets.
        computed: the dtype that the model around a UNet computes in; None if its layers cast their weights.
        changed_otherwise: whether a patcher changes weights or layers by more than LoRA that it merges when it loads.
        shrinks: whether a UNet that is on the GPU as a whole is loaded in parts with the next image, if a forward would
            have too little room next to it. Else it is not even said how little there is.
        least: memory of a card, as a multiple of the UNet's weights, with less of which the original forward has too
            little room next to all of them; 0: what is free then tells.
        patched: the names of weights that get LoRA with the next load, next to which those without it stay.
    """

    networks: frozenset[str]
    computed: Callable[[Any], torch.dtype | None]
    changed_otherwise: Callable[[Any], bool]
    shrinks: bool
    least: float
    patched: Callable[[Any], Collection[str]]

    def suits(self, card: int, unet: nn.Module) -> bool:
        """Whether a card of so many bytes has room for a UNet as a whole."""
        return card >= self.least * bytes_of(unet)


def _patched_otherwise(patcher: Any) -> bool:
    return bool(patcher.force_cast_weights or patcher.weight_wrapper_patches or patcher.weight_inplace_update)


def _to_patch(patcher: Any) -> Collection[str]:
    return () if patcher.model.current_weight_patches_uuid == patcher.patches_uuid else patcher.patches


NEO = Residence(
    frozenset({"IntegratedUNet2DConditionModel"}),
    lambda model: getattr(model, "computation_dtype", None),
    lambda patcher: patcher.has_online_lora() or _patched_otherwise(patcher),
    shrinks=True,
    least=0.0,
    patched=_to_patch,
)


def _reforge_computed(model: Any) -> torch.dtype | None:
    if getattr(model, "manual_cast_dtype", None) is not None:
        return None
    return getattr(getattr(model, "diffusion_model", None), "dtype", None)


def _reforge_changed_otherwise(patcher: Any) -> bool:
    # hooks write to weights between two steps; callbacks and injections are code of extensions around a load
    hooks = patcher.hook_patches or patcher.forced_hooks or patcher.current_hooks
    callbacks = any(found for each in patcher.callbacks.values() for found in each.values())
    return bool(hooks or callbacks or patcher.injections or _patched_otherwise(patcher))


REFORGE = Residence(
    frozenset({"UNetModel"}),
    _reforge_computed,
    _reforge_changed_otherwise,
    shrinks=False,
    # of SDXL 8 GB are 1.67, and 6 GB, on which memory ran out in the first image, 1.25
    least=1.4,
    patched=_to_patch,
)


def _forge_changed_otherwise(patcher: Any) -> bool:
    # layers that cast their weights, if not because they are in parts; parts of the UNet that others have put in place
    layers = (m for m in patcher.model.modules() if hasattr(m, "parameters_manual_cast"))
    casts = any(getattr(m, "prev_parameters_manual_cast", m.parameters_manual_cast) for m in layers)
    objects = (*patcher.object_patches, *patcher.object_patches_backup)
    return bool(casts or patcher.has_online_lora() or any(name.startswith("diffusion_model") for name in objects))


def _forge_to_patch(patcher: Any) -> Collection[str]:
    loader = patcher.lora_loader
    if str(list(patcher.lora_patches)) == loader.loaded_hash:
        return ()
    # those that have LoRA already are replaced
    return {key for found in patcher.lora_patches.values() for key in found} - loader.backup.keys()


FORGE = Residence(
    frozenset({"IntegratedUNet2DConditionModel"}),
    lambda model: getattr(model, "computation_dtype", None),
    _forge_changed_otherwise,
    # a patcher that is loaded already is not loaded again
    shrinks=False,
    # as reForge: on 6 GB memory ran out in the second step
    least=1.4,
    patched=_forge_to_patch,
)


def bytes_of(module: nn.Module) -> int:
    """What the parameters of a module take."""
    return sum(p.nbytes for p in module.parameters())


def on_gpu(module: nn.Module) -> int:
    """The same of those that are on a GPU."""
    return sum(p.nbytes for p in module.parameters() if p.is_cuda)


def needs(found: Accelerator, model: nn.Module) -> int:
    """What a UNet takes on the GPU with 8-bit weights, about that before its first plan.

    Args:
        model: the one around it.
    """
    resident = found.arena.resident
    if resident.banks or resident.device is None:
        return bytes_of(model) - gpu_room.spared(found, model)
    return about(model, found.expected_aside(resident.device))


def about(model: nn.Module, aside: int) -> int:
    """The same, if weights of so many bytes wait in system memory for the first plan: they take half as much in 8 bits,
    and those of some layers stay in half precision."""
    size = bytes_of(model)
    return max(size - aside // 2, int(RESIDENT * size)) if aside else size


def awaits(found: Accelerator) -> bool:
    """Whether a UNet is on the GPU, and weights of it are in system memory for its first plan."""
    resident = found.arena.resident
    return not resident.banks and on_gpu(found.module) > 0 and bool(resident.elsewhere())


def held(found: Accelerator, model: nn.Module) -> int:
    """What is on the GPU of a UNet, and of its weights in 8 bits."""
    return on_gpu(model) + found.arena.banks.held


def leave(found: Accelerator) -> None:
    """Half-precision weights that came back for the original forward leave the GPU."""
    arena = found.arena
    assert arena.resident.device is not None
    with arena.exclusively(arena.resident.device):
        arena.resident.leave()


def load_anew(model: Any) -> None:
    """Have Forge load a model in parts anew with the next image, as after a change of LoRA. More of it may fit then, as
    plans are gone: Forge's `load()` would add LoRA twice to a weight that had room before and has none now, and would
    drop LoRA that is applied in each call from layers that are loaded already."""
    if model.model_lowvram:
        # those of none of its patchers
        model.current_weight_patches_uuid = uuid.uuid4()
