"""What the accelerator of a UNet asks Forge Neo at each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sfast_ext.behaviour.foreign_code import describe
from sfast_ext.hooks import Hooks
from sfast_ext.hosts.attachment import is_host_code
from sfast_ext.hosts.rehearsals import interrupted
from sfast_ext.ui import words

PATCHES = ("patches", "patches_replace", "block_modifiers", "block_inner_modifiers", "group_norm_wrapper")
"""What the UNet's forward reads of `transformer_options`. All else it only passes on to such patches."""

READ = frozenset({"timesteps", "context", "y", "control"})
"""The keyword arguments that it reads beside these."""

STATE = ("model_lowvram", "lowvram_patch_counter", "current_weight_patches_uuid", "model_loaded_weight_memory")
"""What Forge notes on the model that has the UNet when it loads, patches or moves weights."""

BOOKKEEPING = frozenset(
    {
        "forge_patched_weights",
        "forge_force_cast_weights",
        "prev_parameters_manual_cast",
        # a layer has lists of its own once it was loaded; while anything is in them, calls are bypassed
        "weight_function",
        "bias_function",
    }
)
"""What it notes on layers. The weights themselves, and what `_weights_bypass_reason` reads, show what changed."""


class ForgeHooks:
    """What the accelerator of one UNet asks Forge at each call. Each answer takes microseconds.

    Args:
        holder: gives the model (`KModel`) that has the UNet and calls it.
    """

    def __init__(self, unet: nn.Module, holder: Callable[[], Any]) -> None:
        # weak: Forge may drop the model before its accelerator is released
        self._unet = weakref.ref(unet)
        self._holder = holder
        self._state: tuple[Any, ...] | None = None
        self._reason: str | None = None
        self.pictures: int | None = None
        """How many are made at once; None where Forge does not say."""

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        return Hooks(
            self.bypass_reason,
            arguments=self.arguments,
            # the forward takes the residuals of ControlNets out of their lists
            consumed=frozenset({"control"}),
            recognised=self.recognised,
            words=self.words,
            interrupted=interrupted,
            ignored=BOOKKEEPING,
        )

    def words(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """A call in a user's words."""
        return words.size_words(shapes, self.pictures)

    def new_pass(self) -> None:
        """Read the UNet's layers at the next call."""
        self._state = None

    def bypass_reason(self) -> str | None:
        """Why the call must be bypassed, in words for the user; None where it need not."""
        holder = self._holder()
        state = tuple(getattr(holder, name, None) for name in STATE)
        if state != self._state:
            self._reason = self._weights_bypass_reason(holder)
            self._state = state
        return self._reason

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
        """What the forward reads. Among the rest are the sigmas of all steps, of which plans would depend."""
        options = kwargs.get("transformer_options")
        reason = _patch_bypass_reason(options) if options else None
        if reason is not None:
            return reason
        return args, {**{k: v for k, v in kwargs.items() if k in READ}, "transformer_options": {}}

    def recognised(self, module: nn.Module, kind: str, function: object) -> bool:
        """Vouch for what the WebUI itself does to classes and to torch."""
        return kind in ("class", "function", "replaced") and is_host_code(function)

    def _weights_bypass_reason(self, holder: Any) -> str | None:
        unet = self._unet()
        if unet is None:
            return None
        if getattr(holder, "model_lowvram", False):
            return (
                "Forge keeps a part of the UNet in system memory, for want of GPU memory; "
                "a smaller picture or model is accelerated"
            )
        layers = [m for m in unet.modules() if hasattr(m, "parameters_manual_cast")]
        if any(m.weight_function or m.bias_function for m in layers):
            return (
                "LoRA is computed inside the layers; "
                "set Diffusion in Low Bits to a choice without 'fp16 LoRA' to accelerate"
            )
        computed = getattr(holder, "computation_dtype", None)
        # of some kinds of quantisation the layers cast nothing, and have weights of other kinds
        odd = any(type(p) is not nn.Parameter or p.dtype is not computed for p in unet.parameters())
        if odd or any(m.parameters_manual_cast for m in layers):
            return (
                f"the model is quantised or stored in {getattr(holder, 'storage_dtype', 'another type')}; "
                "set Diffusion in Low Bits to Automatic, and load a model in half precision, to accelerate"
            )
        return None


def _patch_bypass_reason(options: dict[str, Any]) -> str | None:
    for kind in PATCHES:
        patch = _first(options.get(kind))
        if patch is not None:
            name = describe(patch)
            if name.startswith("backend.misc.tomesd"):
                return "token merging is on; set its ratio to 0 in Settings > Optimizations to accelerate"
            return f"{name} works inside the UNet; turn it off to accelerate"
    return None


def _first(value: Any) -> Any:
    """The first function in lists and dicts of them; None where there is none."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for each in value if (found := _first(each)) is not None), None)
    return value
