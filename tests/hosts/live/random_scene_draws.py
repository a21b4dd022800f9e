"""What the scenes of all hosts of `random_scenes.py` are drawn from, and what a host is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import random_scene_memory
from .a1111 import Round
from .webui import WebUI, add_extension

LONG = "and many more words that make it longer than the length that a text model reads at once, " * 4
PROMPTS = ("a dog", "a ship on the sea", "a dog AND a ship:0.6", "[a dog:a ship:0.5]", LONG)
NEGATIVE = ("", "a cat", LONG)
SAMPLERS = ("Euler", "Euler a", "Heun", "DPM++ 2M")
OVERRIDES = ({"CLIP_stop_at_last_layers": 2}, {"CLIP_stop_at_last_layers": 2}, {"token_merging_ratio": 0.5})
"""Settings of AUTOMATIC1111 and of a Forge for one image."""
APART = 0.1
"""In fp32 on a CPU, mean of 255: a LoRA of the least weight changes four or more."""
EIGHT_APART = 5.0
"""In 8 bits, mean of 255. Both sides compute the same layers in 8 bits, by the same kernels (`PLANS_ALIKE`), but some
weights of the others have another layout, whose products round otherwise in half precision. What is next to the middle
of two 8-bit numbers then becomes the other one. So images are apart by less than what 8 bits change: a result of the
UNet by 2 % (docs/measurements.md, "8 bits"), which a guidance of 3 may make 7 % (the root of 3² + 2², times 2 %) of
values with a deviation of about 60 of 255, mean 3.4. A LoRA of the least weight must change more than this, which each
run checks: else an image with weights that are no longer valid would pass."""
PLANS_ALIKE = """
import importlib.util

if importlib.util.find_spec("sfast_ext"):
    from sfast_ext.kernels.eight_bits import conv2d8
    from sfast_ext.passes import eight_bits, eight_bits_conv_match
    from sfast_ext.runtime import eight_bits as choice
    from sfast_ext.runtime.plan_cache import Earnings

    matches = eight_bits.matches
    eight_bits.matches = lambda graph, few_too=False: matches(graph, few_too=True)
    eight_bits.paying = lambda found, *_: found
    eight_bits_conv_match.MIN_PIXELS = 0
    conv2d8.profitable = lambda *_, **__: True
    choice.slower = lambda *_: None
    Earnings.due = lambda *_: True
"""
"""An extension's script: a plan is made at the first call of its kind, with all layers in 8 bits that a plan has whose
half-precision weights are in system memory. Otherwise times decide both, which are others in each run."""
OURS = ("sfast_enabled", "sfast_eight_bits")
"""Settings that scenes switch off and on."""
BACK = 0.5
"""How often what is off is on again in the next scene."""


@dataclass(frozen=True)
class Images:
    """What images are drawn from.

    Args:
        weights: of LoRAs: stronger ones make of rounding another image.
        stays: how often a size and a number of images are those of the scene before, as a plan is made for each.
    """

    sizes: tuple[tuple[int, int], ...]
    weights: tuple[float, ...] = (-0.1, 0.05, 0.1, 0.2)
    steps: tuple[int, int] = (2, 4)
    guidance: tuple[float, ...] = (7.0, 7.0, 1.0)
    prompts: tuple[str, ...] = PROMPTS
    negative: tuple[str, ...] = NEGATIVE
    hires: float = 1.5
    stays: float = 0.0


LARGE = ((256, 256), (256, 256), (384, 256), (384, 384))
IN_8_BITS = Images(
    LARGE, (-0.6, 0.3, 0.6), (3, 5), (3.0, 3.0, 1.0), ("a dog", *PROMPTS), ("", *NEGATIVE), 1.25, stays=0.7
)
"""Larger ones would leave no room for the VAE on a card that is small for SD 1.5."""


def size_of_plain(images: Images) -> dict[str, Any]:
    """What a plain image is made with at rest."""
    width, height = images.sizes[0]
    return {"width": width, "height": height, "cfg_scale": images.guidance[0]}


def add_scripts(host: Host, data: Path) -> None:
    """Add the scripts that the WebUIs of all hosts have."""
    random_scene_memory.add_route(data)
    if host.eight_bits:
        add_extension(data, "with-plans-alike", PLANS_ALIKE)


class Host(Protocol):
    """A WebUI whose scenes are played twice, see `random_scenes.compare`."""

    name: str
    flags: str
    card: float | None
    """Memory in GiB of the card that is emulated on a GPU."""
    eight_bits: bool
    alone: bool
    """Whether the WebUI that is started has no extension: see `random_scenes.alone`."""

    @property
    def tolerance(self) -> float:
        """How far images may be apart, mean of 255."""

    def make_models(self, folder: Path) -> None:
        """Models for all seeds, in a folder that is not there yet."""

    def make_data(self, data: Path, models: Path) -> None:
        """What the WebUI is started with."""

    def start(self, data: Path, seed: int, *, reference: bool) -> WebUI:
        """The WebUI for the scenes of a seed: the reference, or what is compared with it."""

    def ready(self, webui: WebUI) -> None:
        """Wait until it can make images."""

    def scenes(self, seed: int, count: int) -> Round:
        """Steps that a seed stands for: each is an image, but for those that change a setting or the checkpoint."""

    def rest(self) -> Round:
        """Steps after which the WebUI holds the same models, whatever came before: the last is an image without a LoRA,
        called "plain"."""

    def least(self) -> tuple[str, str, dict[str, Any]]:
        """The same image with a LoRA of the least weight."""

    def named(self, webui: WebUI, steps: Round) -> Round:
        """These steps as this WebUI takes them."""

    def play(self, webui: WebUI, route: str, payload: dict[str, Any]) -> list[str]:
        """The images of a step."""


def has_extension(host: Host, *, reference: bool) -> bool:
    """Whether a WebUI has the extension. In 8 bits the reference has it as well: 8 bits change the image by design."""
    return not host.alone and (host.eight_bits or not reference)


def settings_of(host: Host, *, reference: bool) -> dict[str, Any]:
    """The extension's settings."""
    if not has_extension(host, reference=reference):
        return {}
    return {"sfast_allow_cpu": True, **({"sfast_eight_bits": True} if host.eight_bits else {})}


def card_of(host: Host, *, reference: bool) -> float | None:
    """The card of a WebUI; None: the GPU as it is. In 8 bits the reference has all weights on the GPU."""
    return None if host.eight_bits and reference else host.card


def least_of(images: Images) -> float:
    """The least weight of a LoRA."""
    return min(images.weights, key=abs)


@dataclass
class Drawer:
    """Draws what the images of a seed have in common in all hosts."""

    draw: random.Random
    images: Images
    eight_bits: bool = False
    _off: str | None = None
    _kept: dict[str, int] = field(default_factory=dict)

    def switches(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """In 8 bits, a step that switches a setting of ours, at times."""
        if not self.eight_bits:
            return
        if self._off is not None:
            if self.draw.random() < BACK:
                yield "", "options", {self._off: True}
                self._off = None
        elif self.draw.random() < 0.05:
            self._off = self.draw.choice(OURS)
            yield "", "options", {self._off: False}

    def payload(self, prompt: str, negative: str, loras: tuple[str, ...], samplers: tuple[str, ...]) -> dict[str, Any]:
        """What is asked for."""
        draw, images = self.draw, self.images
        width, height = draw.choice(images.sizes)
        for name in draw.sample(loras, min(len(loras), draw.choice((0, 0, 1, 1, 2)))):
            prompt += f" <lora:{name}:{draw.choice(images.weights)}>"
        found: dict[str, Any] = {
            "prompt": prompt, "negative_prompt": negative, "width": width, "height": height,
            "seed": draw.randrange(1000), "sampler_name": draw.choice(samplers), "steps": draw.randint(*images.steps),
            "batch_size": draw.choice((1, 1, 1, 2)), "cfg_scale": draw.choice(images.guidance),
        }  # fmt: skip
        if images.stays:
            if not self._kept or draw.random() > images.stays:
                self._kept = {name: found[name] for name in ("width", "height", "batch_size")}
            found |= self._kept
        return found
