"""The WebUI's built-in extension Lora: it changes weights in the forward of each layer, which a plan does not call."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sfast_ext.hosts import reasons
from sfast_ext.hosts.a1111.probes import LORA
from sfast_ext.hosts.probes import Missing, examine
from sfast_ext.reasons import Reason

LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.MultiheadAttention)
"""The classes whose forward it replaces."""

MARKS = frozenset({"network_layer_name", "network_current_names", "network_weights_backup", "network_bias_backup"})
"""What it notes on each layer. The weights themselves show what changed in them."""


def networks() -> ModuleType | None:
    """Its module; None if it is not loaded."""
    found = sys.modules.get("networks")
    return found if hasattr(found, "network_apply_weights") and hasattr(found, "loaded_networks") else None


OnGpu = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


class LoraLayers:
    """The layers of one network that it may change.

    Args:
        modules: all modules of the network.
        on_gpu: within it the weights of a layer are on the GPU.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), on_gpu: OnGpu = contextlib.nullcontext) -> None:
        modules = list(modules)
        # a layer of torch's attention has a name as well, but what a LoRA adds to it is added with the attention's own
        inside = {id(child) for m in modules if isinstance(m, nn.MultiheadAttention) for child in m.children()}
        self._on_gpu = on_gpu
        # it names the layers of the model, and not those of a ControlNet
        named = (m for m in modules if isinstance(m, LAYERS) and hasattr(m, "network_layer_name"))
        # Weak: what the session has of a network goes once the network is gone. Layers that were held here would stay
        # until Python collects garbage once more, with the copies of their weights that the WebUI keeps on them.
        self._layers = [weakref.ref(m) for m in named if id(m) not in inside]
        self._applied: tuple[Any, ...] | None = None
        self.has_bias = b""
        """Of each layer. A LoRA may give a bias to a layer that has none, and take it away."""
        self.reason = self._unknown_bypass_reason()
        """Why calls must be bypassed; None if they need not."""

    def _unknown_bypass_reason(self) -> Reason | None:
        acts = self._layers or any(getattr(kind.forward, "__module__", None) == "networks" for kind in LAYERS)
        missing: list[Missing] = examine(LORA).missing if acts else []
        return reasons.LORA_UNKNOWN(missing[0]) if missing else None

    def apply(self) -> None:
        """Bring the weights up to date."""
        module = networks()
        if module is None or not self._layers:
            return
        wanted = tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in module.loaded_networks)
        # The first and the last layer show what happened outside plans: a checkpoint loaded into the same modules,
        # which resets every layer, or a call of the original forward that was interrupted.
        ends = self._layers[0](), self._layers[-1]()
        if wanted == self._applied and all(getattr(layer, "network_current_names", ()) == wanted for layer in ends):
            return
        layers = [layer for each in self._layers if (layer := each()) is not None]
        with torch.no_grad():
            for layer in layers:
                names = {getattr(layer, "network_layer_name", "")}
                changes = any(not names.isdisjoint(getattr(n, "modules", names)) for n in module.loaded_networks)
                with self._on_gpu(layer) if changes else contextlib.nullcontext():
                    module.network_apply_weights(layer)
        self._applied = wanted
        self.has_bias = bytes(_has_bias(layer) for layer in layers)


def _has_bias(layer: nn.Module) -> bool:
    layer = layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer
    return getattr(layer, "bias", None) is not None
