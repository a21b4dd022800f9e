"""The hosts of `random_scenes.py`: their start, and which scenes a seed stands for in each.

Scenes are small: most images are of 64², and of four seeds the images of three are made of latents by the WebUI's own
matrix, as its previews, instead of by the VAE. On a CPU the models are those of `forge_small.py`, and a scene takes one
to two seconds of a core; on a GPU they have the widths that its kernels are for. In 8 bits all of a model is as large
as that of SD 1.5, images are larger, and the VAE makes them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.webui.hosts import small_card

from . import forge, forge_small, sdnext
from .a1111 import IMG2IMG, IN_FP32, IN_HALF, INIT, PLAIN, Round, make_data, play
from .random_scene_a1111 import A1111
from .random_scene_draws import (
    APART,
    EIGHT_APART,
    IN_8_BITS,
    OVERRIDES,
    SAMPLERS,
    Drawer,
    Host,
    Images,
    add_scripts,
    card_of,
    has_extension,
    least_of,
    settings_of,
    size_of_plain,
)
from .test_forge import controlled
from .webui import VAE_PLANS, WebUI, add_extension

SMALL = Path(forge_small.__file__).read_text(encoding="utf-8")
CHECKPOINTS = ("one", "other", "three")
TINY = Images(((64, 64), (64, 64), (64, 64), (64, 64), (128, 128), (72, 136), (192, 64)))


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
    eight_bits: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        self.name, self.flags = self.program.name, self.program.flags

    @property
    def small(self) -> bool:
        """Whether models are in miniature."""
        return "cpu" in self.flags and self.card is None

    @property
    def large(self) -> bool:
        """Whether models are as large as SD 1.5."""
        return self.eight_bits and not self.small

    @property
    def images(self) -> Images:
        """What images are drawn from."""
        return IN_8_BITS if self.large else TINY

    @property
    def tolerance(self) -> float:
        if self.eight_bits:
            return EIGHT_APART
        if self.small:
            return APART
        return IN_FP32 if "fp32" in self.flags else IN_HALF

    def make_models(self, folder: Path) -> None:
        which = "small" if self.small else "full-pair" if self.large else None
        forge.make_models(folder, self.program, *([which] if which else []))

    def make_data(self, data: Path, models: Path) -> None:
        make_data(data, models)
        add_scripts(self, data)
        if self.small:
            add_extension(data, "small-models", f"{SMALL}\nnarrow({str(models)!r})\n")

    def start(self, data: Path, seed: int, *, reference: bool) -> WebUI:
        settings = settings_of(self, reference=reference)
        settings["sd_vae_decode_method"] = "Full" if seed % 4 == 0 or self.large else self.latents
        # see SETTINGS of `forge.py`
        settings["CLIP_stop_at_last_layers"] = 1
        if not has_extension(self, reference=reference):
            settings["disabled_extensions"] = ["stable-fast"]
        packages, name = small_card(card_of(self, reference=reference)), "reference" if reference else "compared"
        return forge.start(data, name, settings, self.program, packages=packages)

    def ready(self, webui: WebUI) -> None:
        pass

    def scenes(self, seed: int, count: int) -> Round:
        # Forge fails by itself with a LoRA for another architecture
        checkpoints = CHECKPOINTS[:2] if self.program is forge.OLD or self.large else CHECKPOINTS
        draw, images = random.Random(seed), self.images
        drawer = Drawer(draw, images, self.eight_bits)
        # the first image from another differs from its repetitions by itself: Forge draws noise anew for it
        found: Round = [("", "options", {"sd_model_checkpoint": "one.safetensors"}), ("first", "img2img", IMG2IMG)]
        checkpoint, prompts = "one", (images.prompts[0], images.negative[0])
        for number in range(count):
            if draw.random() < 0.06:
                checkpoint = draw.choice(checkpoints)
                found.append(self._to(checkpoint))
            if draw.random() < 0.5:
                prompts = draw.choice(images.prompts), draw.choice(images.negative)
            found += drawer.switches()
            found.append((f"{seed}/{number}", *self._image(drawer, *prompts, checkpoint)))
        return found

    def _to(self, checkpoint: str) -> tuple[str, str, dict[str, Any]]:
        return f"to {checkpoint}", "options", {"sd_model_checkpoint": f"{checkpoint}.safetensors"}

    def _image(self, drawer: Drawer, prompt: str, negative: str, checkpoint: str) -> tuple[str, dict[str, Any]]:
        draw = drawer.draw
        payload = {**PLAIN, **drawer.payload(prompt, negative, ("strong", "second"), SAMPLERS)}
        scripts: dict[str, Any] = {}
        # next to a large ControlNet, Forge Neo loads the UNet in parts, and makes wrong images with a LoRA by itself
        if draw.random() < 0.1 and checkpoint != "three" and not self.large:
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
            hires = {"enable_hr": True, "hr_scale": self.images.hires, "hr_upscaler": "None", "denoising_strength": 0.5}
            return "txt2img", {**payload, **hires, "hr_cfg_scale": 7.0, "hr_additional_modules": ["Use same choices"]}
        return "txt2img", payload

    def rest(self) -> Round:
        return [self._to("one"), ("plain", "txt2img", self._plain())]

    def least(self) -> tuple[str, str, dict[str, Any]]:
        plain = self._plain()
        return "least", "txt2img", {**plain, "prompt": f"{plain['prompt']} <lora:strong:{least_of(self.images)}>"}

    def _plain(self) -> dict[str, Any]:
        return {**PLAIN, **size_of_plain(self.images)}

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
LARGE_LORAS = {"full": ("strong", "second", "loha", "dora"), "full-other": ("strong", "second", "dora")}
OFFLOADS = ("none", "none", "balanced", "balanced", "sequential", "model", "group")
LARGE_OFFLOADS = ("balanced", "balanced", "balanced", "model", "sequential")
"""Without "none": before the first plan a small card has no room for everything at once."""
TINY_PIPELINES = Images(((128, 128), (128, 128), (64, 64), (72, 136), (192, 64)))
SDNEXT_SAMPLERS = ("Default", "Euler a", "UniPC")


@dataclass
class SDNext:
    """SD.Next."""

    name = "SD.Next"
    card: float | None = None
    eight_bits: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        self.flags = sdnext.FLAGS

    @property
    def large(self) -> bool:
        """Whether models are as large as SD 1.5."""
        return self.card is not None or (self.eight_bits and not sdnext.ON_CPU)

    @property
    def images(self) -> Images:
        """What images are drawn from."""
        return IN_8_BITS if self.large else TINY_PIPELINES

    @property
    def loras(self) -> dict[str, tuple[str, ...]]:
        """LoRAs of each checkpoint; the first is loaded at the start."""
        return LARGE_LORAS if self.large else LORAS

    @property
    def offloads(self) -> tuple[str, ...]:
        """Its modes of offload; the first is that of the start."""
        return LARGE_OFFLOADS if self.large else OFFLOADS

    @property
    def tolerance(self) -> float:
        if self.eight_bits:
            return EIGHT_APART
        return APART if sdnext.ON_CPU and not self.large else sdnext.TOLERANCE

    def make_models(self, folder: Path) -> None:
        sdnext.make_models(folder, *("sd15", "sd15-other") * self.large)

    def make_data(self, data: Path, models: Path) -> None:
        (data / "models").symlink_to(models, target_is_directory=True)
        (data / "extensions").mkdir()
        add_extension(data, "vae-plans", VAE_PLANS)
        add_scripts(self, data)

    def start(self, data: Path, seed: int, *, reference: bool) -> WebUI:
        settings = settings_of(self, reference=reference)
        if self.large:
            settings |= {"sd_model_checkpoint": f"Diffusers/{next(iter(self.loras))}", "cuda_dtype": "FP16"}
            settings["diffusers_offload_mode"] = self.offloads[0]
        packages = small_card(card_of(self, reference=reference))
        return sdnext.start(data, settings, extension=has_extension(self, reference=reference), packages=packages)

    def ready(self, webui: WebUI) -> None:
        sdnext.model_loaded(webui, 600)

    def scenes(self, seed: int, count: int) -> Round:
        draw = random.Random(seed)
        drawer = Drawer(draw, self.images, self.eight_bits)
        found: Round = []
        checkpoint = next(iter(self.loras))
        for number in range(count):
            name, kind = f"{seed}/{number}", draw.random()
            if kind < 0.06:
                checkpoint = draw.choice(list(self.loras))
                found.append(sdnext.options(f"{name} to", sd_model_checkpoint=f"Diffusers/{checkpoint}"))
            elif kind < 0.1:
                found.append(sdnext.options(f"{name} offload", diffusers_offload_mode=draw.choice(self.offloads)))
            found += drawer.switches()
            found.append(self._image(drawer, name, checkpoint))
        return found

    def _image(self, drawer: Drawer, name: str, checkpoint: str) -> sdnext.Step:
        draw, images = drawer.draw, self.images
        prompt, negative = draw.choice(images.prompts), draw.choice(images.negative)
        payload = drawer.payload(prompt, negative, self.loras[checkpoint], SDNEXT_SAMPLERS)
        kind = draw.random()
        if kind < 0.2:
            return sdnext.redrawn(name, **payload, denoising_strength=0.6)
        if kind < 0.3:
            return name, "txt2img", {**sdnext.HIRES, **payload, "hr_scale": images.hires}
        if kind < 0.45 and checkpoint in ("tiny-a", "tiny-b"):
            networks = draw.sample(("tiny-control", "tiny-control-2"), draw.choice((1, 1, 2)))
            units = [{"model": each, "strength": draw.choice((0.4, 1.0))} for each in networks]
            return sdnext.controlled(name, "controlnet", *units, **{**payload, **_square(128)})
        return sdnext.drawn(name, **payload)

    def rest(self) -> Round:
        first = next(iter(self.loras))
        back = {"sd_model_checkpoint": f"Diffusers/{first}", "diffusers_offload_mode": self.offloads[0]}
        return [sdnext.options(f"to {first}", **back), sdnext.drawn("plain", **self._plain())]

    def least(self) -> sdnext.Step:
        lora = f"<lora:{next(iter(self.loras.values()))[0]}:{least_of(self.images)}>"
        return sdnext.told("least", lora, **self._plain())

    def _plain(self) -> dict[str, Any]:
        return size_of_plain(self.images)

    def named(self, webui: WebUI, steps: Round) -> Round:
        return steps

    def play(self, webui: WebUI, route: str, payload: dict[str, Any]) -> list[str]:
        return sdnext.do(webui, route, payload)


def _square(side: int) -> dict[str, int]:
    return {"width": side, "height": side}


HOSTS: dict[str, Host] = {
    "a1111": A1111(),
    "neo": Forge(forge.NEO, "RGB"),
    "classic": Forge(forge.CLASSIC, "Approx cheap"),
    "forge": Forge(forge.OLD, "Approx cheap"),
    "reforge": Forge(forge.REFORGE, "Approx cheap"),
    "sdnext": SDNext(),
}
