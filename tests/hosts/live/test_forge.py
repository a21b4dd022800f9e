"""What users do in Forge Neo, with this checkout beside it and without: the images are compared."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageDraw

from . import forge
from .a1111 import (
    GRADIENT,
    IMG2IMG,
    PLAIN,
    TOLERANCE,
    Round,
    apart,
    told,
)
from .webui import encoded

pytestmark = forge.NEO.marks

HIRES = {
    **PLAIN,
    "enable_hr": True,
    "hr_scale": 1.5,
    "hr_upscaler": "None",
    "denoising_strength": 0.6,
    "hr_additional_modules": ["Use same choices"],
}
MASK = Image.new("L", (128, 128))
ImageDraw.Draw(MASK).ellipse((30, 30, 100, 90), fill=255)
LONG = "a line of words that has no end, of many and many words, " * 5


INPAINT = {**IMG2IMG, "mask": encoded(MASK), "mask_blur": 4, "inpainting_fill": 1}
# enabled, and the scripts' own defaults; tiles as small as the image
SOFT = {"Soft Inpainting": {"args": [True, 1, 0.5, 4, 0, 0.5, 2]}}
TILES = {"MultiDiffusion Integrated": {"args": [True, "Mixture of Diffusers", 128, 128, 32, 1]}}
LORA = f"{PLAIN['prompt']} <lora:strong:1>"


def controlled(units: int = 1, **more: Any) -> dict[str, Any]:
    unit = {"enabled": True, "image": encoded(GRADIENT), "module": "None", "model": "control", "pixel_perfect": True}
    return {"ControlNet": {"args": [{**unit, **more} for _ in range(units)]}}


def low_bits(choice: str, name: str) -> tuple[str, str, dict[str, Any]]:
    """The WebUI reads this choice when it loads another checkpoint."""
    return f"{choice} and {name}", "options", {"forge_unet_storage_dtype": choice, **checkpoint(name)[2]}


def checkpoint(name: str) -> tuple[str, str, dict[str, Any]]:
    return f"to {name}", "options", {"sd_model_checkpoint": f"{name}.safetensors"}


def freeu(program: forge.Program) -> Round:
    """An image with FreeU and one after it."""
    with_it = {**PLAIN, "alwayson_scripts": forge.with_freeu(program)}
    return [("FreeU", "txt2img", with_it), ("after FreeU", "txt2img", PLAIN)]


BY_FREEU = {"FreeU": "output_block_patch"}
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("plain again", "txt2img", PLAIN),
    ("five steps", "txt2img", {**PLAIN, "steps": 5}),
    ("img2img", "img2img", IMG2IMG),
    ("inpainting", "img2img", INPAINT),
    ("hires", "txt2img", HIRES),
    told("lora", "<lora:strong:1>"),
    told("lora weaker", "<lora:strong:-0.4>"),
    ("lora gone", "txt2img", PLAIN),
    told("lora again", "<lora:strong:1>"),
    told("two loras", "<lora:strong:0.6><lora:second:0.7>"),
    ("plain after loras", "txt2img", PLAIN),
    checkpoint("other"),
    ("other", "txt2img", PLAIN),
    told("other with lora", "<lora:strong:1>"),
    checkpoint("three"),
    ("three", "txt2img", PLAIN),
    checkpoint("one"),
    ("one again", "txt2img", PLAIN),
    ("two at once", "txt2img", {**PLAIN, "batch_size": 2}),
    ("136 by 200", "txt2img", {**PLAIN, "width": 136, "height": 200}),
    ("long negative prompt", "txt2img", {**PLAIN, "negative_prompt": LONG}),
    ("two prompts", "txt2img", {**PLAIN, "prompt": "a dog AND a ship:0.6"}),
    ("edited prompt", "txt2img", {**PLAIN, "prompt": "[a dog:a ship:0.5] on a hill", "steps": 4}),
    ("no guidance", "txt2img", {**PLAIN, "cfg_scale": 1.0}),
    ("second order", "txt2img", {**PLAIN, "sampler_name": "Heun"}),
    ("tiled", "txt2img", {**PLAIN, "tiling": True}),
    ("not tiled", "txt2img", PLAIN),
    ("controlnet", "txt2img", {**PLAIN, "alwayson_scripts": controlled()}),
    ("controlnet for a while", "txt2img", {**PLAIN, "steps": 6, "alwayson_scripts": controlled(guidance_end=0.5)}),
    ("controlnet and lora", "txt2img", {**PLAIN, "prompt": LORA, "alwayson_scripts": controlled(weight=0.7)}),
    ("two controlnets", "txt2img", {**PLAIN, "alwayson_scripts": controlled(units=2)}),
    ("without controlnet", "txt2img", PLAIN),
    ("reference", "txt2img", {**PLAIN, "alwayson_scripts": controlled(module="reference_only", model="None")}),
    ("soft inpainting", "img2img", {**INPAINT, "alwayson_scripts": SOFT}),
    ("tiles", "img2img", {**IMG2IMG, "width": 256, "alwayson_scripts": TILES}),
    ("refiner", "txt2img", {**PLAIN, "steps": 4, "refiner_checkpoint": "other.safetensors", "refiner_switch_at": 0.5}),
    ("another for hires", "txt2img", {**HIRES, "hr_checkpoint_name": "other.safetensors"}),
    ("another lora for hires", "txt2img", {**HIRES, "prompt": LORA, "hr_prompt": "a dog <lora:second:0.8>"}),
    low_bits("Automatic (fp16 LoRA)", "other"),
    told("lora in the layers", "<lora:strong:1>"),
    low_bits("float8-e4m3fn", "one"),
    ("in eight bits", "txt2img", PLAIN),
    low_bits("Automatic", "other"),
    ("one at the end", "options", {"sd_model_checkpoint": "one.safetensors"}),
    ("token merging", "txt2img", {**PLAIN, "override_settings": {"token_merging_ratio": 0.5}}),
    ("plain at the end", "txt2img", PLAIN),
]
BYPASSED = {
    "token merging": "token merging is on",
    "reference": "of the extension forge_preprocessor_reference works inside the UNet",
    "lora in the layers": "LoRA is computed inside the layers",
    "in eight bits": "the model is quantised or stored in torch.float8_e4m3fn",
}
SAME_PLANS = [
    "plain again",
    "five steps",
    "img2img",
    "inpainting",
    "lora",
    "lora weaker",
    "lora gone",
    "lora again",
    "two loras",
    "plain after loras",
    "other",
    "other with lora",
    "second order",
    "not tiled",
    "controlnet and lora",
    "without controlnet",
    "soft inpainting",
    "refiner",
    "another lora for hires",
]
CONTROLLED = ["controlnet", "controlnet and lora", "two controlnets"]


CHANGED = (*forge.CHANGED, "tiled", "two prompts")
UNCHANGED = (*forge.UNCHANGED, "not tiled")

globals().update(forge.program_tests(forge.NEO, ROUND, BYPASSED, SAME_PLANS, CONTROLLED, CHANGED, UNCHANGED))


def test_the_answer_says_whether_it_was_accelerated(played):
    assert played.webui.get("/sfast/v1/status")["badge"]["state"] in ("on", "ready")


def test_lora_again_is_the_lora(stock):
    assert apart(stock["lora again"], stock["lora"]) < TOLERANCE
