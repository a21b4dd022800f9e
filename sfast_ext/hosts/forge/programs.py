"""What differs between the programs that are called Forge, for the adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.foreign_code import describe
from sfast_ext.hosts import reasons
from sfast_ext.reasons import Reason
from sfast_ext.weights.inner_tensors import is_followed

COMPUTED = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes of weights that are not quantised."""

PATCHES = ("patches", "patches_replace", "block_modifiers", "block_inner_modifiers", "group_norm_wrapper")
"""What a UNet's forward calls or lets its blocks call, of `transformer_options`."""

WRAPPERS = "wrappers"
"""Functions around a forward and around others, by what they are around, of `transformer_options` in reForge."""

NOTED = frozenset(
    {
        "original_shape", "transformer_index", "block", "block_index", "activations_shape", "total_blocks",
        "block_type",
    }
)  # fmt: skip
"""What a forward itself notes in `transformer_options`, before it reads it."""

PASSED_ON = frozenset(
    {
        "cond_or_uncond",
        "sigmas",
        "cond_mark",
        "cond_indices",
        "uncond_indices",
        "sampling_sigmas",
        "sample_sigmas",
        "uuids",
        "callbacks",
        "controlnet_conditioning_modifiers",
        "controlnet_model_function_wrapper",
    }
)
"""What is in `transformer_options` for those patches, for ControlNets and for samplers. A forward does not call it."""


@dataclass(frozen=True)
class Program:
    """One of them.

    Args:
        networks: the classes of the UNets and transformers that are accelerated.
        token_merging: the module whose patches merge tokens.
        read: keyword arguments that the forward reads, in addition to those of its signature.
        bookkeeping: attributes of layers in which the program notes what it did. The weights themselves, and what
            `weights_bypass_reason` reads, show what changed.
        state: changes when `weights_bypass_reason` has to be asked again; of the model that has the UNet, and the UNet.
        inside_bypass_reason: why no plan can be made of a network as its weights are, whatever it casts.
        weights_bypass_reason: the same if it may cast nothing, as a UNet.
        noted: see `Hooks.ignored_globals`.
    """

    networks: frozenset[str]
    token_merging: str
    read: frozenset[str]
    bookkeeping: frozenset[str]
    state: Callable[[Any, nn.Module], tuple[Any, ...]]
    inside_bypass_reason: Callable[[Any, nn.Module], Reason | None]
    weights_bypass_reason: Callable[[Any, nn.Module], Reason | None]
    noted: frozenset[tuple[str, str]] = frozenset()


_LOADED = (
    "model_lowvram", "lowvram_patch_counter", "current_weight_patches_uuid", "model_loaded_weight_memory",
    "model_offload_buffer_memory",
)  # fmt: skip
"""What a patcher notes on the model that it loads, which is a ControlNet itself; another patcher, of another image say,
notes another UUID."""


_EMPTY_CACHE = frozenset({("backend.memory_management", "signal_empty_cache")})
"""Whether a sampler is to empty the allocator's cache, which `soft_empty_cache` takes back. A VAE calls that if memory
runs out; without it the sampler empties the cache once more."""


def _neo_state(holder: Any, unet: nn.Module) -> tuple[Any, ...]:
    return tuple(getattr(holder, name, None) for name in _LOADED)


def _casting(network: nn.Module) -> list[nn.Module]:
    return [m for m in network.modules() if hasattr(m, "parameters_manual_cast")]


def _neo_inside(holder: Any, network: nn.Module) -> Reason | None:
    if getattr(holder, "model_lowvram", False):
        return reasons.IN_PARTS()
    layers = _casting(network)
    if any(m.weight_function or m.bias_function for m in layers):
        return reasons.LORA_IN_FP16()
    return None


def _neo_bypass_reason(holder: Any, unet: nn.Module) -> Reason | None:
    layers = _casting(unet)
    return _neo_inside(holder, unet) or _cast_bypass_reason(holder, unet, any(m.parameters_manual_cast for m in layers))


def quantised_or(stored: Reason, network: nn.Module) -> Reason:
    """The formats of layers that a checkpoint had in 8 or 4 bits, in Forge Neo's words; `stored` if it had none."""
    named = (m.__dict__.get("quant_format") for m in network.modules())
    formats = ", ".join(sorted({name for name in named if isinstance(name, str)}))
    return reasons.QUANTISED(formats) if formats else stored


def _cast_bypass_reason(holder: Any, unet: nn.Module, casts: bool) -> Reason | None:
    weights = list(unet.parameters())
    plain = [p for p in weights if not is_followed(p)]
    if len(plain) < len(weights) and all(type(p) is nn.Parameter and p.dtype in COMPUTED for p in plain):
        # the layers that a checkpoint has in 8 bits are known, and the others cast as a plan of them does
        return None
    computed = getattr(holder, "computation_dtype", weights[0].dtype if weights else None)
    # of some kinds of quantisation the layers cast nothing, and have weights of other kinds
    if casts or any(type(p) is not nn.Parameter or p.dtype is not computed for p in weights):
        return quantised_or(reasons.STORED_IN(getattr(holder, "storage_dtype", "another type")), unet)
    return None


NEO = Program(
    frozenset(
        {
            "IntegratedUNet2DConditionModel",
            "Anima",
            # of Lumina 2 and of Z-Image
            "NextDiT",
            "IntegratedChromaTransformer2DModel",
            "IntegratedFluxTransformer2DModel",
        }
    ),
    "backend.misc.tomesd",
    frozenset({"timesteps", "context", "y", "control"}),
    frozenset(
        {
            "forge_patched_weights",
            "forge_force_cast_weights",
            "prev_parameters_manual_cast",
            # a layer has its own lists once it was loaded; while anything is in them, calls are bypassed
            "weight_function",
            "bias_function",
            *_LOADED,
        }
    ),
    _neo_state,
    _neo_inside,
    _neo_bypass_reason,
    _EMPTY_CACHE,
)

_ONLINE = "forge_online_loras"


def _forge_state(holder: Any, unet: nn.Module) -> tuple[Any, ...]:
    loader = getattr(holder, "lora_loader", None)
    weight = next(unet.parameters(), None)
    # layers that are kept in system memory are marked while the model is on the GPU
    return getattr(loader, "loaded_hash", None), None if weight is None else weight.device


def _forge_inside(holder: Any, network: nn.Module) -> Reason | None:
    layers = _casting(network)
    if any("prev_parameters_manual_cast" in vars(m) for m in layers):
        return reasons.IN_PARTS()
    if any(getattr(m, _ONLINE, None) for m in layers):
        return reasons.LORA_IN_FP16()
    return None


def _forge_bypass_reason(holder: Any, unet: nn.Module) -> Reason | None:
    layers = _casting(unet)
    casts = any(m.parameters_manual_cast for m in layers)
    return _forge_inside(holder, unet) or _cast_bypass_reason(holder, unet, casts)


FORGE = Program(
    frozenset({"IntegratedUNet2DConditionModel"}),
    "backend.misc.tomesd",
    frozenset({"timesteps", "context", "y", "control"}),
    # the sizes are noted when a model is loaded in parts; with LoRA in a layer calls are bypassed
    frozenset({"prev_parameters_manual_cast", "total_mem", "weight_mem", "extra_mem", _ONLINE}),
    _forge_state,
    _forge_inside,
    _forge_bypass_reason,
    _EMPTY_CACHE,
)

_CAST, _CAST_BEFORE = "ldm_patched_cast_weights", "prev_ldm_patched_cast_weights"


def _classic_state(holder: Any, unet: nn.Module) -> tuple[Any, ...]:
    # a model that is loaded in parts has the mark on all of its layers
    layer = next((m for m in unet.modules() if hasattr(m, _CAST)), None)
    return () if layer is None else (getattr(layer, _CAST), _CAST_BEFORE in vars(layer), layer.weight.device)


def _classic_inside(holder: Any, network: nn.Module) -> Reason | None:
    layers = [m for m in network.modules() if hasattr(m, _CAST)]
    if any(_CAST_BEFORE in vars(m) for m in layers):
        return reasons.IN_PARTS()
    return None


def _classic_bypass_reason(holder: Any, unet: nn.Module) -> Reason | None:
    layers = [m for m in unet.modules() if hasattr(m, _CAST)]
    return _classic_inside(holder, unet) or _cast_kinds(unet, layers)


def _cast_kinds(unet: nn.Module, layers: list[nn.Module]) -> Reason | None:
    dtypes = {p.dtype for p in unet.parameters()}
    odd = len(dtypes) > 1 or any(type(p) is not nn.Parameter for p in unet.parameters())
    if odd or any(getattr(m, _CAST) for m in layers):
        kinds = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        return reasons.STORED_IN_KINDS(kinds)
    return None


CLASSIC = Program(
    frozenset({"UNetModel"}),
    "ldm_patched.modules.tomesd",
    # the last three are of models for video, which have the same class
    frozenset({"timesteps", "context", "y", "control", "num_video_frames", "image_only_indicator", "time_context"}),
    # a layer that was loaded in parts keeps the first as its own attribute; while it is true, calls are bypassed
    frozenset({_CAST, _CAST_BEFORE}),
    _classic_state,
    _classic_inside,
    _classic_bypass_reason,
)


def _reforge_inside(holder: Any, network: nn.Module) -> Reason | None:
    if getattr(holder, "model_lowvram", False):
        return reasons.IN_PARTS()
    layers = [m for m in network.modules() if hasattr(m, _CAST)]
    if any(m.weight_function or m.bias_function for m in layers):
        hook = next(f for m in layers for f in (*m.weight_function, *m.bias_function))  # type: ignore[misc]
        return reasons.INSIDE(describe(hook))
    return None


def _reforge_bypass_reason(holder: Any, unet: nn.Module) -> Reason | None:
    layers = [m for m in unet.modules() if hasattr(m, _CAST)]
    return _reforge_inside(holder, unet) or _cast_kinds(unet, layers)


REFORGE = Program(
    frozenset({"UNetModel"}),
    "ldm_patched.contrib.nodes_tomesd",
    CLASSIC.read,
    # a layer has its own lists once it was loaded in parts; while anything is in them, calls are bypassed
    frozenset({_CAST, _CAST_BEFORE, "ldm_patched_patched_weights", "weight_function", "bias_function", *_LOADED}),
    _neo_state,
    _reforge_inside,
    _reforge_bypass_reason,
)
