"""AUTOMATIC1111 for `random_scenes.py`.

On a CPU its models are tiny, and two checkpoints have one architecture. In 8 bits, and on an emulated card, they are as
large as SD 1.5. Of three seeds one has no flag, one --medvram and one --lowvram.
"""

from __future__ import annotations

import random
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.webui.hosts import small_card

from . import a1111
from .random_scene_draws import (
    APART,
    EIGHT_APART,
    IN_8_BITS,
    OVERRIDES,
    SAMPLERS,
    Drawer,
    Images,
    add_scripts,
    card_of,
    has_extension,
    least_of,
    settings_of,
    size_of_plain,
)
from .webui import WebUI

TINY = Images(((64, 64), (64, 64), (128, 128), (128, 64), (192, 64)))
CHECKPOINTS = {False: ("tiny.safetensors", "tiny.ckpt"), True: ("full.safetensors", "full-other.safetensors")}
"""By whether they are large. All have the same LoRAs."""
LORAS = {False: ("strong", "loha", "lokr", "dora"), True: ("strong", "second", "loha", "dora")}
MEMORY = ("", "--medvram", "--lowvram")
SDP = "--opt-sdp-attention"
"""Without it an image takes more of a small card's memory."""


@dataclass
class A1111:
    """AUTOMATIC1111."""

    name = "AUTOMATIC1111"
    card: float | None = None
    eight_bits: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        self.flags = a1111.FLAGS

    @property
    def large(self) -> bool:
        """Whether models are as large as SD 1.5."""
        return self.card is not None or (self.eight_bits and not a1111.ON_CPU)

    @property
    def images(self) -> Images:
        """What images are drawn from."""
        return IN_8_BITS if self.large else TINY

    @property
    def tolerance(self) -> float:
        if self.eight_bits:
            return EIGHT_APART
        return APART if a1111.ON_CPU and not self.large else a1111.TOLERANCE

    def make_models(self, folder: Path) -> None:
        a1111.make_models(folder, *["full-pair"] * self.large)

    def make_data(self, data: Path, models: Path) -> None:
        a1111.make_data(data, models)
        add_scripts(self, data)

    def start(self, data: Path, seed: int, *, reference: bool) -> WebUI:
        settings = {"sd_model_checkpoint": CHECKPOINTS[self.large][0], **settings_of(self, reference=reference)}
        if not has_extension(self, reference=reference):
            settings["disabled_extensions"] = ["stable-fast"]
        packages, name = small_card(card_of(self, reference=reference)), "reference" if reference else "compared"
        return a1111.start(data, name, settings, flags=self.flags_of(seed), packages=packages)

    def flags_of(self, seed: int) -> str:
        """The WebUI's flags for the scenes of a seed."""
        return shlex.join([*shlex.split(self.flags), *[SDP] * self.large, *MEMORY[seed % 3].split()])

    def ready(self, webui: WebUI) -> None:
        pass

    def scenes(self, seed: int, count: int) -> a1111.Round:
        draw = random.Random(seed)
        drawer = Drawer(draw, self.images, self.eight_bits)
        found: a1111.Round = [("first", "txt2img", a1111.PLAIN)]
        for number in range(count):
            if draw.random() < 0.06:
                found.append(self._to(draw.choice(CHECKPOINTS[self.large])))
            found += drawer.switches()
            found.append((f"{seed}/{number}", *self._image(draw, drawer)))
        return found

    def _image(self, draw: random.Random, drawer: Drawer) -> tuple[str, dict[str, Any]]:
        images = self.images
        prompt, negative = draw.choice(images.prompts), draw.choice(images.negative)
        payload = {**a1111.PLAIN, **drawer.payload(prompt, negative, LORAS[self.large], SAMPLERS)}
        if draw.random() < 0.12:
            payload["override_settings"] = draw.choice(OVERRIDES)
        kind = draw.random()
        if kind < 0.2:
            return "img2img", {**payload, "init_images": [a1111.INIT], "denoising_strength": 0.6}
        if kind < 0.3:
            hires = {name: a1111.HIRES[name] for name in ("enable_hr", "hr_upscaler", "denoising_strength")}
            return "txt2img", {**payload, **hires, "hr_scale": images.hires}
        return "txt2img", payload

    def _to(self, checkpoint: str) -> tuple[str, str, dict[str, Any]]:
        return f"to {checkpoint}", "options", {"sd_model_checkpoint": checkpoint}

    def rest(self) -> a1111.Round:
        return [self._to(CHECKPOINTS[self.large][0]), ("plain", "txt2img", self._plain())]

    def least(self) -> tuple[str, str, dict[str, Any]]:
        plain, lora = self._plain(), f"<lora:{LORAS[self.large][0]}:{least_of(self.images)}>"
        return "least", "txt2img", {**plain, "prompt": f"{plain['prompt']} {lora}"}

    def _plain(self) -> dict[str, Any]:
        return {**a1111.PLAIN, **size_of_plain(self.images)}

    def named(self, webui: WebUI, steps: a1111.Round) -> a1111.Round:
        return steps

    def play(self, webui: WebUI, route: str, payload: dict[str, Any]) -> list[str]:
        return a1111.play(webui, route, payload)
