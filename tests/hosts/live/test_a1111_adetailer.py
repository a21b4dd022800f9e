"""The real ADetailer in AUTOMATIC1111, with this checkout next to it and without: three faces in each image.

SFAST_ADETAILER_DIR        a checkout of adetailer, see `a1111.py` for the others
SFAST_ADETAILER_PACKAGES   a folder with those of rich and opencv that the WebUI's interpreter lacks

Its model of faces is a stand-in for ultralytics' YOLO, which finds three of different shapes in every image.
"""

from __future__ import annotations

import os
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
    equal_to_stock,
    images_of,
)

ADETAILER = os.environ.get("SFAST_ADETAILER_DIR")
pytestmark = [*MARKS, pytest.mark.skipif(not ADETAILER, reason="SFAST_ADETAILER_DIR names no adetailer")]

MODEL = "face_yolov8n.pt"
FINDS = """
import os
import sys
import types

import numpy as np
import torch

sys.path.append(os.environ.get("SFAST_ADETAILER_PACKAGES", ""))


class YOLO:
    def __init__(self, path):
        assert os.path.exists(path)

    def __call__(self, image, conf, device):
        width, height = image.size
        faces = torch.tensor([[4, 8, 36, 56], [44, 72, 92, 104], [80, 8, 120, 48]]) * torch.tensor([width, height] * 2)
        boxes = types.SimpleNamespace(xyxy=faces / 128, conf=torch.tensor([0.9, 0.8, 0.7]))
        plot = lambda: np.zeros((height, width, 3), np.uint8)
        return [types.SimpleNamespace(boxes=boxes, masks=None, plot=plot)]


module = types.ModuleType("ultralytics")
module.YOLO = YOLO
sys.modules["ultralytics"] = module


def preload(parser):
    pass
"""


def prepare(data: Path) -> None:
    """ADetailer, and an extension with what finds its faces, which is there before any script is loaded."""
    extensions = data / "extensions"
    (extensions / "adetailer").symlink_to(ADETAILER or "", target_is_directory=True)
    (extensions / "finder").mkdir()
    (extensions / "finder" / "preload.py").write_text(FINDS, encoding="utf-8")
    folder = data / "models" / "adetailer"
    folder.mkdir(exist_ok=True)
    (folder / MODEL).touch()


def repainted(*, of: dict[str, Any] | None = None, skip: bool = False, **unit: Any) -> dict[str, Any]:
    """A payload whose faces are repainted so."""
    return with_units({"ad_model": MODEL, **unit}, of=of, skip=skip)


def with_units(*units: dict[str, Any], of: dict[str, Any] | None = None, skip: bool = False) -> dict[str, Any]:
    return {**(of or PLAIN), "alwayson_scripts": {"ADetailer": {"args": [True, skip, *units]}}}


FIRST = repainted()
SIZED = {"ad_use_inpaint_width_height": True, "ad_inpaint_width": 192, "ad_inpaint_height": 128}
ROUND: Round = [
    ("plain", "txt2img", PLAIN),
    ("faces", "txt2img", FIRST),
    ("faces again", "txt2img", FIRST),
    ("a prompt for each", "txt2img", repainted(ad_prompt="a cat [SEP] [PROMPT], a hat [SEP] a fish")),
    ("LoRA in the faces", "txt2img", repainted(ad_prompt="[PROMPT] <lora:strong:1>")),
    ("plain after the LoRA", "txt2img", PLAIN),
    ("the second face skipped", "txt2img", repainted(ad_prompt="a cat [SEP] [SKIP] [SEP] a fish")),
    ("strong, more steps", "txt2img", repainted(ad_denoising_strength=0.9, ad_use_steps=True, ad_steps=6)),
    ("other sampler", "txt2img", repainted(ad_use_sampler=True, ad_sampler="DPM++ 2M", ad_scheduler="Karras")),
    ("other guidance", "txt2img", repainted(ad_use_cfg_scale=True, ad_cfg_scale=3.0)),
    ("noise", "txt2img", repainted(ad_use_noise_multiplier=True, ad_noise_multiplier=1.1)),
    ("clip skip", "txt2img", repainted(ad_use_clip_skip=True, ad_clip_skip=2)),
    ("whole images", "txt2img", repainted(ad_inpaint_only_masked=False)),
    ("one mask of all", "txt2img", repainted(ad_mask_merge_invert="Merge")),
    ("the largest", "txt2img", repainted(ad_mask_filter_method="Area", ad_mask_k=1)),
    ("wide", "txt2img", repainted(**SIZED)),
    ("wide again", "txt2img", repainted(**SIZED)),
    ("plain after the wide", "txt2img", PLAIN),
    ("other checkpoint", "txt2img", repainted(ad_use_checkpoint=True, ad_checkpoint="tiny.ckpt")),
    ("plain after the checkpoint", "txt2img", PLAIN),
    ("two units", "txt2img", with_units({"ad_model": MODEL}, {"ad_model": MODEL, "ad_prompt": "a fish"})),
    ("two images", "txt2img", repainted(of={**PLAIN, "batch_size": 2})),
    ("hires", "txt2img", repainted(of=HIRES)),
    ("img2img", "img2img", repainted(of=IMG2IMG)),
    ("img2img, faces alone", "img2img", repainted(of=IMG2IMG, skip=True)),
    ("sizes of the faces", "options", {"ad_match_inpaint_bbox_size": "Free", "ad_dynamic_denoise_power": 2.0}),
    ("sizes that differ", "txt2img", FIRST),
    ("sizes that differ, again", "txt2img", FIRST),
    ("sizes that differ, hires", "txt2img", repainted(of=HIRES)),
    ("plain at the end", "txt2img", PLAIN),
]
SAME_PLANS = [
    "faces again",
    "a prompt for each",
    "LoRA in the faces",
    "plain after the LoRA",
    "the second face skipped",
    "strong, more steps",
    "other sampler",
    "other guidance",
    "noise",
    "wide again",
    "plain after the wide",
    "plain after the checkpoint",
    "two units",
    "sizes that differ, again",
    "plain at the end",
]

test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


def test_the_round_shows_what_it_should(stock):
    changes = [
        ("faces", "plain"),
        ("a prompt for each", "faces"),
        ("LoRA in the faces", "faces"),
        ("the second face skipped", "a prompt for each"),
        ("whole images", "faces"),
        ("wide", "faces"),
        ("other checkpoint", "faces"),
        ("two units", "faces"),
        ("img2img, faces alone", "img2img"),
        ("sizes that differ", "faces"),
    ]
    for one, other in changes:
        assert apart(stock[one][:1], stock[other][:1]) > 0, (one, other)
    assert apart(stock["plain at the end"], stock["plain"]) < TOLERANCE


@pytest.mark.parametrize("name", images_of(ROUND))
def test_all_of_it_is_accelerated(played, name):
    accelerated(played, name)
    assert played.reasons(name) == {}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played, name):
    assert played.gained(name, "captures") == 0
