"""Extensions of other authors in AUTOMATIC1111, with this checkout beside them and without.

SFAST_A1111_EXTENSIONS   a folder with checkouts of them, by the names of their repositories

See `a1111.py` for the others.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from .a1111 import (
    HIRES,
    IMG2IMG,
    MARKS,
    PLAIN,
    TOLERANCE,
    Round,
    accelerated,
    apart,
    bypassed,
    equal_to_stock,
    images_of,
)
from .webui import add_extension

FOLDER = Path(os.environ.get("SFAST_A1111_EXTENSIONS", "/nowhere"))
FREEU = "sd-webui-freeu"
THRESHOLDING = "sd-dynamic-thresholding"
REGIONAL = "sd-webui-regional-prompter"
TILED = "multidiffusion-upscaler-for-automatic1111"
ANIMATEDIFF = "sd-webui-animatediff"
NEGPIP = "sd-webui-negpip"
INCANTATIONS = "sd-webui-incantations"
HERE = [n for n in (FREEU, THRESHOLDING, REGIONAL, TILED, ANIMATEDIFF, NEGPIP, INCANTATIONS) if (FOLDER / n).is_dir()]
pytestmark = [*MARKS, pytest.mark.skipif(not HERE, reason="SFAST_A1111_EXTENSIONS holds no extension that is known")]


def prepare(data: Path) -> None:
    """Copies of the checkouts, as they write into their own folders; and a small model of motion."""
    for name in HERE:
        shutil.copytree(FOLDER / name, data / "extensions" / name, ignore=shutil.ignore_patterns(".git"))
    if ANIMATEDIFF in HERE:
        script = Path(__file__).with_name("a1111_motion.py").read_text(encoding="utf-8")
        add_extension(data, "small-motion", script)
    # the WebUI writes it when its interface is built, and NegPiP reads it
    (data / "ui-config.json").write_text("{}", encoding="utf-8")


def using(script: str, *args: Any, of: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A payload with these arguments for an extension's script."""
    return {**(of or PLAIN), "alwayson_scripts": {script: {"args": list(args)}}, **more}


def freeu(*, version: str = "Version 2", stop: float = 1.0, **more: Any) -> dict[str, Any]:
    """FreeU if the deepest blocks have 320 channels: its third stage."""
    stages = [{}, {}, {"backbone_factor": 1.6, "skip_factor": 0.2}]
    return using("FreeU", {"stage_infos": stages, "version": version, "start_ratio": 0.0, "stop_ratio": stop}, **more)


def thresholding(mimic: float, mode: str = "Constant", **more: Any) -> dict[str, Any]:
    args = [True, mimic, 97.0, mode, 0.0, mode, 0.0, 4.0, True, "MEAN", "AD", 1.0]
    return using("Dynamic Thresholding (CFG Scale Fix)", *args, cfg_scale=20, **more)


def regional(mode: str, ratios: str = "1,1", **more: Any) -> dict[str, Any]:
    args = [True, False, "Matrix", "Columns", "Mask", "Prompt", ratios, "0.2", False, False, False, mode]
    args += [[], "0", "0", "0.4", "", "0", "0", False]
    return using("Regional Prompter", *args, prompt="a dog on a hill BREAK a red house by the sea", **more)


def tiled(method: str, tiles: int = 4, **more: Any) -> dict[str, Any]:
    args = [True, method, False, False, 192, 128, 16, 16, 4, tiles, "None", 1.0]
    return using("Tiled Diffusion", *args, width=192, **more)


def moving(frames: int, window: int, **more: Any) -> dict[str, Any]:
    unit = {"model": "motion.safetensors", "enable": True, "video_length": frames, "batch_size": window}
    return using("AnimateDiff", {**unit, "format": ["PNG"], "closed_loop": "N", "overlap": 1}, **more)


def perturbed(scale: float, **more: Any) -> dict[str, Any]:
    """Perturbed attention guidance, the third of Incantations' parts."""
    args = [False, 11, 0, 150, False, 1.0, 0.8, 3.0, 0.0, 0, 150, 4]
    return using("Incantations", *args, True, scale, 0, 150, False, "Constant", 0, 100, False, **more)


# for each extension: the checkpoint, requests that use it, and what the report says of them; None if plans run
USES: dict[str, tuple[str, dict[str, dict[str, Any]], str | None]] = {
    FREEU: (
        "deep.safetensors",
        {
            "FreeU": freeu(),
            "FreeU, version 1": freeu(version="Version 1"),
            "FreeU in half of the steps": freeu(stop=0.5, steps=4),
            "FreeU, hires": freeu(of=HIRES),
            "FreeU, img2img": freeu(of=IMG2IMG),
        },
        "free_u_cat_hijack of the extension sd-webui-freeu is on",
    ),
    THRESHOLDING: (
        "tiny.safetensors",
        {"thresholding": thresholding(7.0), "thresholding, other way": thresholding(3.0, "Half Cosine Up")},
        None,
    ),
    REGIONAL: (
        "tiny.safetensors",
        {
            "regions by attention": regional("Attention"),
            "other regions": regional("Attention", "1,3"),
            "regions, hires": regional("Attention", of=HIRES),
            "regions by latents": regional("Latent"),
        },
        "forward of the extension sd-webui-regional-prompter",
    ),
    TILED: (
        "tiny.safetensors",
        {
            "tiles": tiled("MultiDiffusion"),
            "tiles one by one": tiled("MultiDiffusion", 1),
            "tiles mixed": tiled("Mixture of Diffusers"),
            "tiles, img2img": tiled("MultiDiffusion", of=IMG2IMG),
        },
        None,
    ),
    ANIMATEDIFF: (
        "tiny.safetensors",
        {"moving": moving(4, 4), "moving, in windows": moving(6, 4)},
        "VanillaTemporalModule.forward of the extension sd-webui-animatediff",
    ),
    NEGPIP: (
        "tiny.safetensors",
        {
            "negative words": using("NegPiP", True, prompt="a dog, (red:-1.5), on a hill"),
            "negative words, hires": using("NegPiP", True, of=HIRES, prompt="a dog, (red:-1.5), on a hill"),
        },
        "forward of the extension sd-webui-negpip",
    ),
    INCANTATIONS: (
        "tiny.safetensors",
        {
            "perturbed attention": perturbed(20),
            "perturbed attention, hires": perturbed(20, of=HIRES),
        },
        "hook of the extension sd-webui-incantations",
    ),
}
WITHOUT: dict[str, str] = {}
"""For each request that uses an extension the name of the same without."""
WORDS: dict[str, str | None] = {}
ROUND: Round = []
for extension in HERE:
    checkpoint, uses, words = USES[extension]
    ROUND.append((f"to {checkpoint} for {extension}", "options", {"sd_model_checkpoint": checkpoint}))
    ROUND.append((f"before {extension}", "txt2img", PLAIN))
    for use, payload in uses.items():
        kind = "img2img" if "init_images" in payload else "txt2img"
        without = {name: value for name, value in payload.items() if name != "alwayson_scripts"}
        WORDS[use] = WORDS[f"{use}, again"] = words
        WITHOUT[use] = f"after {use}"
        ROUND += [(use, kind, payload), (f"{use}, again", kind, payload), (f"after {use}", kind, without)]
OFF = [name for name in images_of(ROUND) if name not in WORDS]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", WITHOUT)
def test_the_extension_changes_the_image(stock, name):
    assert apart(stock[name][:1], stock[WITHOUT[name]][:1]) > 2 * TOLERANCE


@pytest.mark.parametrize("name", WORDS)
def test_it_is_accelerated_or_bypassed_by_name(played, name):
    words = WORDS[name]
    if words is not None:
        bypassed(played, name, words)
    else:
        accelerated(played, name)
        assert played.reasons(name) == {}


@pytest.mark.parametrize("name", OFF)
def test_what_does_not_use_it_is_accelerated(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}
