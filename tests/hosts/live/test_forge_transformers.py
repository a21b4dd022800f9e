"""Transformers of few layers in the real Forge Neo, with this checkout and without: images are compared.

Those of full width take 8 GB of memory, 2 GB of disk, and on two cores ten minutes each, Flux and Chroma two.
SFAST_TRANSFORMERS names fewer of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import forge
from .a1111 import CHECKOUT, TOLERANCE, Played, Round, accelerated, apart, equal_to_stock, images_of, make_data
from .forge_transformers import NARROW
from .webui import add_extension

pytestmark = forge.NEO.marks
PLAIN: dict[str, Any] = {
    "prompt": "a dog", "negative_prompt": "a cat", "seed": 1, "steps": 2, "cfg_scale": 4, "width": 128, "height": 128,
    "sampler_name": "Euler",
}  # fmt: skip


def drawn(name: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    return name, "txt2img", {**PLAIN, **more}


ROUND: Round = [
    # of Anima a plan is made twice: einops notes the types of tensors in its first calls
    drawn("first", seed=3),
    drawn("plain"),
    drawn("another seed", seed=2),
    drawn("wide", width=192),
    drawn("without guidance", cfg_scale=1),
    drawn("LoRA", prompt="a dog <lora:lora-1:1>"),
    drawn("LoRA, weaker", prompt="a dog <lora:lora-1:0.4>"),
    drawn("two LoRAs", prompt="a dog <lora:lora-1:0.5> <lora:lora-2:0.5>"),
    drawn("LoRA gone"),
]
# the same prompts, size and guidance
SAME_PLANS = ["another seed", "LoRA", "LoRA, weaker", "two LoRAs", "LoRA gone"]
KINDS = os.environ.get("SFAST_TRANSFORMERS", "lumina2 z-image anima flux chroma").split()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def settings(kind: str) -> dict[str, Any]:
    return {"sd_model_checkpoint": f"{kind}.safetensors"}


@pytest.fixture(scope="module")
def data(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forge-transformers")
    script = CHECKOUT / "tests" / "hosts" / "live" / "forge_transformers.py"
    command = [forge.NEO.python, str(script), kind, str(folder / "models")]
    made = subprocess.run(command, cwd=forge.NEO.folder, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr
    (folder / "data").mkdir()
    found = make_data(folder / "data", folder / "models", vae_plans=False)
    add_extension(found, "narrow-text", NARROW)
    return found


@pytest.fixture(scope="module")
def stock(data: Path, settings: dict[str, Any]) -> dict[str, list[str]]:
    with forge.start(data, "stock", {**settings, "disabled_extensions": ["stable-fast"]}) as webui:
        return Played(webui).round(ROUND, status=False).images


@pytest.fixture(scope="module")
def played(data: Path, settings: dict[str, Any], stock: dict[str, list[str]]) -> Iterator[Played]:
    with forge.start(data, "extended", {**settings, "sfast_allow_cpu": True}) as webui:
        yield Played(webui).round(ROUND, status=True)


test_image_equals_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", images_of(ROUND[1:]))
def test_plans_were_run(played: Played, name: str) -> None:
    accelerated(played, name)
    assert played.reasons(name) == {}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_no_new_capture_for(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0


@pytest.mark.parametrize("name", ["another seed", "without guidance", "LoRA", "two LoRAs"])
def test_the_round_shows_what_it_should(stock: dict[str, list[str]], name: str) -> None:
    assert apart(stock[name], stock["plain"]) > TOLERANCE
    assert apart(stock["LoRA, weaker"], stock["LoRA"]) > TOLERANCE
    assert apart(stock["LoRA gone"], stock["plain"]) < TOLERANCE
