"""The attention of the real SD.Next in bfloat16, its default on every GPU, with xFormers among the methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import sdnext
from .sdnext import Played, Step, drawn, options
from .webui import XFORMERS, last_plan, same_plan

pytestmark = sdnext.MARKS

TOLERANCE = 5.0  # of 255; stock's own methods are 2.2 from each other, two checkpoints 110

# diffusers asks for a GPU before it takes to xFormers, and tries it there
ON_A_CPU = """
from diffusers import DiffusionPipeline
from diffusers.models.attention_processor import XFormersAttnProcessor

def enable(self, attention_op=None):
    self.unet.set_attn_processor(XFormersAttnProcessor(attention_op))

DiffusionPipeline.enable_xformers_memory_efficient_attention = enable
"""


def prepare(data: Path) -> None:
    scripts = data / "extensions" / "xformers-on-a-cpu" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "xformers_on_a_cpu.py").write_text(ON_A_CPU)


def method(name: str, to: str, **more: Any) -> list[Step]:
    """Two images with a method."""
    return [options(f"to {name}", cross_attention_optimization=to, **more), drawn(name), drawn(f"{name}, again")]


ROUND: list[Step] = [
    drawn("started"),
    *method("matrix products", "Batch matrix-matrix"),
    *method("dynamic", "Dynamic Attention BMM"),
    *method("xformers", "xFormers"),
    *method("attention slicing", "Disabled", attention_slicing="Enabled"),
    options("from attention slicing", attention_slicing="Default"),
    # a checkpoint that is loaded anew comes with the processors of scaled dot products
    options("to scaled dot products", cross_attention_optimization="Scaled-Dot-Product"),
    options("to tiny-b", sd_model_checkpoint="Diffusers/tiny-b"),
    drawn("reference"),
]
IMAGES = sdnext.images_of(ROUND)

played, test_image_equals_the_one_without_the_extension = sdnext.playing(
    ROUND, {"cuda_dtype": "BF16"}, TOLERANCE, prepare=prepare, flags="--use-xformers", packages=XFORMERS
)


def test_it_starts_with_xformers(played: Played) -> None:
    assert 'Setting model: attention="xFormers"' in played.webui.log()
    assert "bf16" in last_plan(played.reports["started"])["signature"]


@pytest.mark.parametrize("name", IMAGES)
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize("name", IMAGES)
def test_the_plan_is_that_of_scaled_dot_products(played: Played, name: str) -> None:
    same_plan(last_plan(played.reports[name]), last_plan(played.reports["reference"]))
