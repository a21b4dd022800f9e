"""What the accelerator of a UNet asks Forge at each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.behaviour.foreign_code import describe
from sfast_ext.hooks import Hooks, Read
from sfast_ext.hosts import reasons
from sfast_ext.hosts.attachment import is_host_code
from sfast_ext.hosts.forge.programs import COMPUTED, NOTED, PASSED_ON, PATCHES, WRAPPERS, Program, quantised_or
from sfast_ext.hosts.forge.reading import Reading
from sfast_ext.hosts.forge.resident import ResidentUnet
from sfast_ext.hosts.host_queue import interrupted
from sfast_ext.reasons import Reason
from sfast_ext.ui import words

IMAGE_CHANNELS = 3


class ForgeHooks:
    """What the accelerator of one UNet asks Forge at each call. Each answer takes microseconds.

    Args:
        holder: gives the model that Forge loads and patches, which has the UNet and calls it (`KModel`, in Forge
            Classic and reForge `BaseModel`).
        resident: loads it; None if its half-precision weights never stay in system memory.
    """

    def __init__(
        self, unet: nn.Module, holder: Callable[[], Any], program: Program, resident: ResidentUnet | None = None
    ) -> None:
        # weak: Forge may drop the model before its accelerator is released
        self._unet = weakref.ref(unet)
        self._holder, self._program, self._resident = holder, program, resident
        self._state: tuple[Any, ...] | None = None
        self._reason: Reason | None = None
        self._reading = Reading(unet)
        handed_on = frozenset(key for key in PASSED_ON if not self._reading.option(key))
        self._known = NOTED | handed_on | frozenset(PATCHES)
        self._read = program.read | self._reading.parameters
        self.images: int | None = None
        """How many are made at once; None if Forge does not say."""

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        return Hooks(
            self.bypass_reason,
            arguments=self.arguments,
            # the forward takes the residuals of ControlNets out of their lists
            consumed=frozenset({"control"}),
            scratch=frozenset({"transformer_options"}),
            recognised=self.recognised,
            words=self.words,
            interrupted=interrupted,
            ignored=self._program.bookkeeping,
            ignored_globals=self._program.noted,
            system_memory=self._weights_may_leave,
            short_of_memory=self._short_of_memory,
        )

    def _weights_may_leave(self, size: int) -> bool:
        return self._resident is not None and self._resident.allows(self._unet(), size)

    def _short_of_memory(self) -> bool:
        return self._resident is not None and self._resident.gave_way(self._unet())

    def alive(self) -> bool:
        """Whether the UNet is there still."""
        return self._unet() is not None

    def words(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """A call in a user's words."""
        return words.size_words(shapes, self.images)

    def new_pass(self) -> None:
        """Read the UNet's layers at the next call."""
        self._state = None

    def bypass_reason(self) -> Reason | None:
        """Why the call must be bypassed; None if it need not."""
        unet = self._unet()
        if unet is None:
            return None
        holder = self._holder()
        # what keeps a UNet in parts need not show in the first of its weights
        forms = 0 if self._resident is None else self._resident.changes
        state = (*self._program.state(holder, unet), forms)
        if state != self._state:
            self._reason = self._weights_reason(holder, unet)
            self._state = state
        return self._reason

    def _weights_reason(self, holder: Any, network: nn.Module) -> Reason | None:
        reason = self._program.weights_bypass_reason(holder, network)
        if self._resident is not None and reason is not None and reason.code == reasons.IN_PARTS.code:
            return self._resident.why_in_parts(network) or reason
        return reason

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read:
        """What the forward reads. Among the rest are the sigmas of all steps, of which plans would depend."""
        options = kwargs.get("transformer_options")
        reason = self._patch_bypass_reason(options) if options else None
        if reason is not None:
            return reason
        read = {k: v for k, v in kwargs.items() if k in self._read or self._reading.option(k)}
        read["transformer_options"] = {}
        return args, read

    def recognised(self, module: nn.Module, kind: str, function: object) -> bool:
        """Vouch for what the WebUI itself does to classes and to torch."""
        return kind in ("class", "function", "replaced") and is_host_code(function)

    def _patch_bypass_reason(self, options: dict[str, Any]) -> Reason | None:
        for kind in PATCHES:
            if kind in options and (patch := _first(options[kind])) is not None:
                return self._inside_bypass_reason(patch)
        if self._known.issuperset(options):
            return None
        for key in options.keys() - self._known:
            value = options[key]
            if key == WRAPPERS:
                value = value.get("diffusion_model") if isinstance(value, dict) else value
            elif self._reading.option(key):
                return reasons.OPTION_INSIDE(key)
            patch = _first(value, callable)
            if patch is not None:
                return self._inside_bypass_reason(patch)
        return None

    def _inside_bypass_reason(self, patch: Any) -> Reason:
        name = describe(patch)
        if name.startswith(self._program.token_merging):
            return reasons.TOKEN_MERGING()
        return reasons.INSIDE(name)


def _first(value: Any, wanted: Callable[[Any], bool] = lambda found: True) -> Any:
    """The first function in lists and dicts of them; None if there is none."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for each in value if (found := _first(each, wanted)) is not None), None)
    return value if value is not None and wanted(value) else None


class PartHooks(ForgeHooks):
    """The same of a ControlNet, or of a part of a VAE.

    Args:
        named: names a call in a user's words; None for those of a UNet.
        ignored: attributes that the part changes itself, without changing what it computes.
    """

    def __init__(
        self,
        part: nn.Module,
        holder: Callable[[], Any],
        program: Program,
        named: Callable[[Sequence[tuple[int, ...]]], str | None] | None = None,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(part, holder, program)
        self._named, self._ignored = named, ignored

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        # blocks that are called without options, as in a ControlNet, note in their defaults where they are
        ignored = self._program.bookkeeping | self._ignored | {"transformer_options"}
        return replace(super().hooks(), arguments=None, consumed=frozenset(), ignored=ignored)

    def words(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """A call in a user's words."""
        if self._named is not None:
            return self._named(shapes)
        # a ControlNet gets an image in addition to the latent
        return super().words([shape for shape in shapes if len(shape) != 4 or shape[1] != IMAGE_CHANNELS])


class TextHooks(PartHooks):
    """The same of a text encoder, whose layers may cast their weights in each call."""

    def _weights_reason(self, holder: Any, network: nn.Module) -> Reason | None:
        odd = {p.dtype for p in network.parameters()} - COMPUTED
        if odd or any(type(p) is not nn.Parameter for p in network.parameters()):
            kinds = ", ".join(sorted(str(each).removeprefix("torch.") for each in odd))
            return quantised_or(reasons.STORED_IN_KINDS(kinds), network)
        return self._program.inside_bypass_reason(holder, network)
