"""The decoders and encoders of VAEs, accelerated in addition to the UNet; the same for all adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.vae_memory import widths_of
from sfast_ext.reasons import text
from sfast_ext.report import Report
from sfast_ext.secondary_report import SecondaryReport
from sfast_ext.ui import words
from sfast_ext.ui.settings_table import HostConfig

PARTS = ("decoder", "encoder")
MAX_PLANS = 8
"""Kept for each part. A VAE that decodes in tiles has up to four sizes of them for each size of image."""
GAIN = Config.rare_gain
"""On an NVIDIA H200 plans save 0.52 to 0.74 of PyTorch's time."""
COUNTED = "vae"
"""The first word of the counters of their calls."""
MARKS = frozenset({"last_z_shape"})
"""What ldm's decoder notes on itself at each call, for whoever asks."""

PartHooks = Callable[[nn.Module, Callable[[Sequence[tuple[int, ...]]], str | None]], Hooks]
"""Makes the hooks of a part's accelerator, of the part and of the function that names its calls."""


class VaePart(Attachment):
    """The accelerators of one part of all VAEs. Its calls are no steps."""

    def __init__(self, part: str, hooks_for: PartHooks, report: Report) -> None:
        self._secondary = SecondaryReport(report, COUNTED, f"VAE {part}")

        def named(shapes: Sequence[tuple[int, ...]]) -> str | None:
            return words.vae_words(part, shapes)

        super().__init__(lambda module: hooks_for(module, named), self._secondary, name=f"VAE {part}")

    def status(self) -> list[dict[str, Any]]:
        """As of other networks. "idle" is why the last call was bypassed."""
        return [{**each, "idle": text(self._secondary.reason), "steps": False} for each in super().status()]


class Vaes:
    """Keeps accelerators on the VAEs that a host is about to use.

    A VAE runs about once for each image and its activations take gigabytes, so its plans have no CUDA graph, whose
    memory nobody else could use meanwhile; see also `Config.rare_calls`.
    """

    def __init__(self, hooks_for: PartHooks, report: Report) -> None:
        self.attachments = tuple(VaePart(part, hooks_for, report) for part in PARTS)

    def follow(self, vaes: Iterable[Any], config: HostConfig) -> list[Accelerator]:
        """Accelerate these VAEs as `config` says, and release all others. Call it before each image as well, before
        its VAE is called: settings are read here.

        Returns:
            The accelerators of their parts. A new generation of theirs has begun.
        """
        config = replace(
            config,
            enabled=config.enabled and config.vae,
            cuda_graphs=False,
            rare_calls=True,
            # on a small card 8-bit weights give way to the VAE, and a plan needs less memory than the original
            rare_gain=math.inf if config.eight_bits and gpu_room.is_tight() else GAIN,
            # a VAE's activations come near the largest number of float16, and partial sums nearer; 8 bits show in an
            # image at once, which no later step corrects
            faster_sums=False,
            eight_bits=False,
            max_plans=min(config.max_plans, MAX_PLANS),
        )
        known = [vae for vae in vaes if is_known(vae)]
        followed: list[Accelerator] = []
        for part, attachment in zip(PARTS, self.attachments):
            modules = [getattr(vae, part) for vae in known]
            followed += [each for each in attachment.follow_all(modules, config) if each is not None]
        for each in followed:
            each.new_generation()
        return followed

    def among(self, modules: Container[int]) -> list[Accelerator]:
        """See `Attachment.among`."""
        return [each for attachment in self.attachments for each in attachment.among(modules)]

    def suspend(self, module: nn.Module | None = None) -> None:
        """See `Attachment.suspend`."""
        for attachment in self.attachments:
            attachment.suspend(module)

    def give_memory_back(self) -> None:
        """See `Attachment.give_memory_back`."""
        for attachment in self.attachments:
            attachment.give_memory_back()

    def release(self) -> None:
        """Release every part."""
        for attachment in self.attachments:
            attachment.release()


def is_known(vae: Any) -> bool:
    """Whether it is a VAE of images as ldm and diffusers have it, whose blocks are convolutions between group norms."""
    if not isinstance(vae, nn.Module) or not widths_of(vae):
        return False
    return all(_is_known_part(getattr(vae, part, None)) for part in PARTS)


def _is_known_part(part: Any) -> bool:
    # a host's layers may be derived from torch's
    modules = part.modules() if isinstance(part, nn.Module) else ()
    kinds = {kind for module in modules for kind in type(module).__mro__}
    return {nn.Conv2d, nn.GroupNorm} <= kinds and kinds.isdisjoint({nn.Conv1d, nn.Conv3d})
