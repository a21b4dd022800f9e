"""The hosts of `random_scenes.py`: their start, and which scenes a seed stands for in each.

Scenes are small: most images are of 64², and of four seeds the images of three are made of latents by the WebUI's own
matrix, as its previews, instead of by the VAE. On a CPU the models are those of `forge_small.py`, and a scene takes one
to two seconds of a core; on a GPU they have the widths that its kernels are for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.webui.hosts import small_card

from . import forge, forge_small, sdnext
from .a1111 import IMG2IMG, IN_FP32, IN_HALF, INIT, PLAIN, Round, make_data, play
from .test_forge import controlled
from .webui import VAE_PLANS, WebUI, add_extension

SMALL = Path(forge_small.__file__).read_text(encoding="utf-8")
LONG = "and many more words that make it longer than the length that a text model reads at once, " * 4
PROMPTS = ("a dog", "a ship on the sea", "a dog AND a ship:0.6", "[a dog:a ship:0.5]", LONG)
NEGATIVE = ("", "a cat", LONG)
CHECKPOINTS = ("one", "other", "three")
SIZES = ((64, 64), (64, 64), (64, 64), (64, 64), (128, 128), (72, 136), (192, 64))
SAMPLERS = ("Euler", "Euler a", "Heun", "DPM++ 2M")
WEIGHTS = (-0.1, 0.05, 0.1, 0.2)
"""Of LoRAs: stronger ones make of rounding another image."""
OVERRIDES = ({"CLIP_stop_at_last_layers": 2}, {"CLIP_stop_at_last_layers": 2}, {"token_merging_ratio": 0.5})
"""Settings of a Forge for one image."""
APART = 0.1
"""In fp32 on a CPU, mean of 255: a LoRA of the least weight changes four or more."""


class Host(Protocol):
    """A WebUI whose scenes are played without the extension and with it."""

    name: str
    flags: str

    @property
    def tolerance(self) -> float:
        """How far images may be apart, mean of 255."""

    def make_models(self, folder: Path) -> None:
        """Models for all seeds, in a folder that is not there yet."""

    def make_data(self, data: Path, models: Path) -> None:
        """What the WebUI is started with."""

    def start(self, data: Path, seed: int, *, extension: bool) -> WebUI:
        """The WebUI for the scenes of a seed, with the extension or without."""

    def ready(self, webui: WebUI) -> None:
        """Wait until it can make images."""

    def scenes(self, seed: int, count: int) -> Round:
        """Steps that a seed stands for: each is an image, but for those that change a setting or the checkpoint."""

    def named(self, webui: WebUI, steps: Round) -> Round:
        """These steps as this WebUI takes them."""

    def play(self, webui: WebUI, route: str, payload: dict[str, Any]) -> list[str]:
        """The images of a step."""


@dataclass
class Forge:
    """A Forge of any kind.

    Args:
        latents: the choice of its setting by which images are made of latents without the VAE.
        card: memory in GiB of the card that is emulated on a GPU.
    """

    program: forge.Program
    latents: str
    card: float | None = None

    def __post_init__(self) -> None:
        self.name, self.flags = self.program.name, self.program.flags

    @property
    def small(self) -> bool:
        """Whether models are in miniature."""
        return "cpu" in self.flags and self.card is None

    @property
    def tolerance(self) -> float:
        if self.small:
            return APART
        return IN_FP32 if "fp32" in self.flags else IN_HALF

    def make_models(self, folder: Path) -> None:
        forge.make_models(folder, self.program, *["small"] * self.small)

    def make_data(self, data: Path, models: Path) -> None:
        make_data(data, models)
        if self.small:
            add_extension(data, "small-models", f"{SMALL}\nnarrow({str(models)!r})\n")

    def start(self, data: Path, seed: int, *, extension: bool) -> WebUI:
        settings: dict[str, Any] = {"sd_vae_decode_method": "Full" if seed % 4 == 0 else self.latents}
        # see SETTINGS of `forge.py`
        settings["CLIP_stop_at_last_layers"] = 1
        settings |= {"sfast_allow_cpu": True} if extension else {"disabled_extensions": ["stable-fast"]}
        name = "extended" if extension else "stock"
        return forge.start(data, name, settings, self.program, packages=small_card(self.card))

    def ready(self, webui: WebUI) -> None:
        pass

    def scenes(self, seed: int, count: int) -> Round:
        # Forge fails by itself with a LoRA for another architecture
        checkpoints = CHECKPOINTS[:2] if self.program is forge.OLD else CHECKPOINTS
        draw = random.Random(seed)
        # the first image from another differs from its repetitions by itself: Forge draws noise anew for it
        found: Round = [("", "options", {"sd_model_checkpoint": "one.safetensors"}), ("first", "img2img", IMG2IMG)]
        checkpoint, prompts = "one", (PROMPTS[0], NEGATIVE[0])
        for number in range(count):
            if draw.random() < 0.06:
                checkpoint = draw.choice(checkpoints)
                found.append((f"to {checkpoint}", "options", {"sd_model_checkpoint": f"{checkpoint}.safetensors"}))
            if draw.random() < 0.5:
                prompts = draw.choice(PROMPTS), draw.choice(NEGATIVE)
            found.append((f"{seed}/{number}", *self._picture(draw, *prompts, checkpoint)))
        return found

    def _picture(self, draw: random.Random, prompt: str, negative: str, checkpoint: str) -> tuple[str, dict[str, Any]]:
        payload = {**PLAIN, **_drawn(draw, prompt, negative, ("strong", "second"), SIZES, SAMPLERS)}
        scripts: dict[str, Any] = {}
        if draw.random() < 0.1 and checkpoint != "three":
            unit = {"weight": draw.choice((0.3, 0.7)), "guidance_end": draw.choice((0.5, 1.0, 1.0))}
            scripts |= controlled(draw.choice((1, 1, 2)), **unit)
        if draw.random() < 0.05:
            scripts |= forge.with_freeu(self.program)
        payload |= {"alwayson_scripts": scripts} if scripts else {}
        if draw.random() < 0.12:
            payload["override_settings"] = draw.choice(OVERRIDES)
        kind = draw.random()
        if kind < 0.2:
            return "img2img", {**payload, "init_images": [INIT], "denoising_strength": 0.6}
        if kind < 0.3:
            hires = {"enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "None", "denoising_strength": 0.5}
            return "txt2img", {**payload, **hires, "hr_cfg_scale": 7.0, "hr_additional_modules": ["Use same choices"]}
        return "txt2img", payload

    def named(self, webui: WebUI, steps: Round) -> Round:
        return forge.named(webui, steps)

    def play(self, webui: WebUI, route: str, payload: dict[str, Any]) -> list[str]:
        return play(webui, route, payload)


LORAS = {
    "tiny-a": ("strong", "linear-conv", "lokr", "full"),
    "tiny-b": ("strong", "loha", "dora"),
    "tiny-2": (),
    "tiny-xl": ("strong-xl",),
    "tiny-xl-b": ("strong-xl",),
}
"""By the checkpoint of SD.Next that they are for."""
OFFLOADS = ("none", "none", "balanced", "balanced", "sequential", "model", "group")


@dataclass
class SDNext:
    """SD.Next."""

    name = "SD.Next"

    def __post_init__(self) -> None:
        self.flags, self.tolerance = sdnext.FLAGS, APART if sdnext.ON_CPU else sdnext.TOLERANCE

    def make_models(self, folder: Path) -> None:
        sdnext.make_models(folder)

    def make_data(self, data: Path, models: Path) -> None:
        (data / "models").symlink_to(models, target_is_directory=True)
        (data / "extensions").mkdir()
        add_extension(data, "vae-plans", VAE_PLANS)

    def start(self, data: Path, seed: int, *, extension: bool) -> WebUI:
        return sdnext.start(data, {}, extension=extension)

    def ready(self, webui: WebUI) -> None:
        sdnext.model_loaded(webui, 600)

    def scenes(self, seed: int, count: int) -> Round:
        draw = random.Random(seed)
        found: Round = []
        checkpoint = "tiny-a"
        for number in range(count):
            name, kind = f"{seed}/{number}", draw.random()
            if kind < 0.06:
                checkpoint = draw.choice(list(LORAS))
                found.append((f"{name} to", "options", {"sd_model_checkpoint": f"Diffusers/{checkpoint}"}))
            elif kind < 0.1:
                found.append((f"{name} offload", "options", {"diffusers_offload_mode": draw.choice(OFFLOADS)}))
            found.append(self._picture(draw, name, checkpoint))
        return found

    def _picture(self, draw: random.Random, name: str, checkpoint: str) -> sdnext.Step:
        prompt, negative = draw.choice(PROMPTS), draw.choice(NEGATIVE)
        sizes, samplers = ((128, 128), (128, 128), (64, 64), (72, 136), (192, 64)), ("Default", "Euler a", "UniPC")
        payload = _drawn(draw, prompt, negative, LORAS[checkpoint], sizes, samplers)
        kind = draw.random()
        if kind < 0.2:
            return sdnext.redrawn(name, **payload, denoising_strength=0.6)
        if kind < 0.3:
            return name, "txt2img", {**sdnext.HIRES, **payload}
        if kind < 0.45 and checkpoint in ("tiny-a", "tiny-b"):
            networks = draw.sample(("tiny-control", "tiny-control-2"), draw.choice((1, 1, 2)))
            units = [{"model": each, "strength": draw.choice((0.4, 1.0))} for each in networks]
            return sdnext.controlled(name, "controlnet", *units, **{**payload, **_square(128)})
        return sdnext.drawn(name, **payload)

    def named(self, webui: WebUI, steps: Round) -> Round:
        return steps

    def play(self, webui: WebUI, route: str, payload: dict[str, Any]) -> list[str]:
        return sdnext.do(webui, route, payload)


def _square(side: int) -> dict[str, int]:
    return {"width": side, "height": side}


def _drawn(
    draw: random.Random,
    prompt: str,
    negative: str,
    loras: tuple[str, ...],
    sizes: tuple[tuple[int, int], ...],
    samplers: tuple[str, ...],
) -> dict[str, Any]:
    width, height = draw.choice(sizes)
    for name in draw.sample(loras, min(len(loras), draw.choice((0, 0, 1, 1, 2)))):
        prompt += f" <lora:{name}:{draw.choice(WEIGHTS)}>"
    return {
        "prompt": prompt, "negative_prompt": negative, "width": width, "height": height,
        "seed": draw.randrange(1000), "sampler_name": draw.choice(samplers), "steps": draw.randint(2, 4),
        "batch_size": draw.choice((1, 1, 1, 2)), "cfg_scale": draw.choice((7.0, 7.0, 1.0)),
    }  # fmt: skip


HOSTS: dict[str, Host] = {
    "neo": Forge(forge.NEO, "RGB"),
    "classic": Forge(forge.CLASSIC, "Approx cheap"),
    "forge": Forge(forge.OLD, "Approx cheap"),
    "reforge": Forge(forge.REFORGE, "Approx cheap"),
    "sdnext": SDNext(),
}
