"""What the accelerators ask SD.Next at each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.accelerator import accelerator_of
from sfast_ext.behaviour.forward_slot import is_own_forward
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import reasons, system_memory
from sfast_ext.hosts.attachment import is_host_code
from sfast_ext.hosts.host_queue import interrupted
from sfast_ext.hosts.sdnext.refusals import (
    attention_bypass_reason,
    keeps_weights,
    layers_bypass_reason,
    run_bypass_reason,
)
from sfast_ext.hosts.sdnext.whole_unet import WholeUnet
from sfast_ext.reasons import Reason
from sfast_ext.ui import words

BOOKKEEPING = frozenset(
    {
        "network_layer_name",
        "network_current_names",
        "network_weights_backup",
        "network_bias_backup",
        "module_name",
        "offload_dir",
        "offload_post",
        "has_accelerate",
        "balanced_offload_device_map",
        "balanced_offload_max_memory",
        # accelerate puts new ones on the UNet at each dispatch, which warn and call the original
        "to",
        "cuda",
        "hf_device_map",
        # ToDo leaves it behind, and a hook that writes to it. While ToDo's processors are there, calls are bypassed
        "_tome_info",
        # of group offload; its hooks themselves are seen
        "sdnext_group_offload_sig",
        "sdnext_group_offload_pin",
        "sdnext_group_offload_pin_limit",
        "sdnext_ondemand",
        "_diffusers_hook",
        # the handle of a hook that runs before the UNet's forward
        "sdnext_layout_hook",
    }
)
"""What LoRA and the offload note on modules. The weights themselves show what changed in them."""


class SDNextHooks:
    """What the accelerator of one network asks SD.Next at each call. Takes microseconds; the first call of a pass takes
    milliseconds.

    Args:
        pipeline: gives the pipeline that runs the network.
        new_pass: called with that pipeline at the first call of each of its runs.
        images: gives how many are made at once; None if SD.Next does not say.
        whole: decides if the network comes to the GPU as a whole; None if SD.Next alone does.
    """

    def __init__(
        self,
        unet: nn.Module,
        pipeline: Callable[[], Any],
        new_pass: Callable[[Any], None] | None = None,
        images: Callable[[], int | None] = lambda: None,
        whole: WholeUnet | None = None,
    ) -> None:
        from modules import shared

        self._pipeline, self._tell, self._images, self._whole = pipeline, new_pass, images, whole
        # Weak: SD.Next may drop the model before its accelerator is released.
        self._unet = weakref.ref(unet)
        self._state, self._opts = shared.state, shared.opts
        self._pass: int | None = None
        self._dispatches = 0
        self._reason: Reason | None = None
        self._scaled_processors: list[Any] = []
        self._blocks: list[nn.Module] = []

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        # every forward that is vouched for computes what the module's own does
        vouch = self.recognised
        return Hooks(
            self.bypass_reason,
            key=self.key,
            recognised=vouch,
            transparent=vouch,
            words=lambda shapes: words.size_words(shapes, self._images()),
            interrupted=interrupted,
            ignored=BOOKKEEPING,
            system_memory=system_memory.has_room_for,
            short_of_memory=self._short_of_memory,
        )

    def _short_of_memory(self) -> bool:
        return self._whole is not None and self._whole.gave_way(self._unet())

    def bypass_reason(self) -> Reason | None:
        """Why the call must be bypassed; None if it need not."""
        # Modifiers are applied and removed in each run of the pipeline (base, hires, detailer), after every script
        # callback. SD.Next raises this counter when such a run begins.
        now = self._state.total_jobs
        if now != self._pass:
            self._pass = now
            self._new_pass()
        elif self._whole is not None and self._whole.changes != self._dispatches:
            # the network has left the GPU between two steps, and came another way
            self._read(self._pipeline())
        return self._reason

    def key(self) -> Hashable:
        """The scales of IP-Adapters, which may change at each step, and the factors of FreeU."""
        scales = tuple(tuple(s) if isinstance(s, list) else s for s in (p.scale for p in self._scaled_processors))
        return scales, tuple(getattr(b, name, None) for b in self._blocks for name in ("s1", "s2", "b1", "b2"))

    def recognised(self, module: nn.Module, kind: str, function: object) -> bool:
        """Vouch for what SD.Next itself does to classes and to torch.

        Also for accelerate's hook on a submodule if it only moves arguments (offload sets hundreds), and for the
        module's own forward as a bound method, which accelerate and HyperTile leave behind.
        """
        if kind in ("class", "function", "replaced"):
            return is_host_code(function)
        if kind != "forward":
            return False
        if is_own_forward(function, module):
            return True
        maker = getattr(getattr(function, "func", None), "__module__", "")
        hook, inner = module.__dict__.get("_hf_hook"), module.__dict__.get("_old_forward")
        plain = inner is None or is_own_forward(inner, module)
        return maker == "accelerate.hooks" and hook is not None and plain and keeps_weights(hook)

    def _read(self, pipe: Any) -> None:
        """Find why calls must be bypassed until something changes."""
        if self._whole is not None:
            self._dispatches = self._whole.changes
        network = self._unet()
        self._reason = None if network is None else self._refusal(pipe, network)

    def _refusal(self, pipe: Any, network: nn.Module) -> Reason | None:
        reason = attention_bypass_reason(self._opts) or run_bypass_reason(pipe, network)
        if self._whole is not None and reason == reasons.OFFLOAD_OF_PARTS():
            return self._whole.why_in_parts(network) or reason
        return reason

    def _new_pass(self) -> None:
        unet = self._unet()
        if unet is None:
            return
        pipe = self._pipeline()
        self._read(pipe)
        processors = (m.__dict__.get("processor", m._modules.get("processor")) for m in unet.modules())
        self._scaled_processors = [p for p in processors if isinstance(getattr(p, "scale", None), (list, float, int))]
        self._blocks = list(getattr(unet, "up_blocks", None) or ())
        accelerator = accelerator_of(unet)
        if accelerator is not None:
            accelerator.new_generation()
        if self._tell is not None:
            self._tell(pipe)


class SDNextVaeHooks(SDNextHooks):
    """What the accelerator of a VAE's decoder or encoder asks SD.Next at each call."""

    def __init__(
        self, part: nn.Module, named: Callable[[Sequence[tuple[int, ...]]], str | None] | None = None
    ) -> None:
        super().__init__(part, lambda: None)
        self._named = named

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        return replace(super().hooks(), words=self._named)

    def _refusal(self, pipe: Any, network: nn.Module) -> Reason | None:
        # what a pipeline does in its steps does not matter here
        return attention_bypass_reason(self._opts) or layers_bypass_reason(network)


class SDNextTextHooks(SDNextVaeHooks):
    """What the accelerator of a text encoder asks SD.Next at each call."""

    def _refusal(self, pipe: Any, network: nn.Module) -> Reason | None:
        # the configuration that says so lies on a module around it
        if any("lora_A" in module._modules for module in network.modules()):
            return reasons.LORA_BY_DIFFUSERS()
        return super()._refusal(pipe, network)
