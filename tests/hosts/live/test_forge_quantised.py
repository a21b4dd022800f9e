"""Checkpoints of 8 bits in the real Forge Neo: they are accelerated, and images are those without the extension, with
LoRAs too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import forge
from .a1111 import (
    CHECKOUT,
    PLAIN,
    TOLERANCE,
    Played,
    Round,
    accelerated,
    apart,
    images_of,
    make_data,
    told,
)

pytestmark = forge.NEO.marks
FORMATS = {"int8": "int8_tensorwise", "rows": "int8_tensorwise", "fp8": "float8_e4m3fn", "scaled": "float8_e4m3fn"}
"""By the name of a checkpoint: the format of its file. Those of "scaled" are named as in older files."""
ROUNDED = 4.0
"""Products of int8 round their inputs to 8 bits, which makes much of a last bit: without the extension, images with two
threads and with one are 2.6 apart. Those with a LoRA and without are 29 apart."""


def checkpoint(name: str) -> tuple[str, str, dict[str, Any]]:
    return f"to {name}", "options", {"sd_model_checkpoint": f"{name}.safetensors"}


def steps_of(name: str) -> Round:
    images = [told(f"{name}, LoRA", "<lora:strong:1>"), told(f"{name}, weaker", "<lora:strong:-0.4>")]
    gone = [(f"{name}, {when}", "txt2img", PLAIN) for when in ("LoRA gone", "again")]
    return [checkpoint(name), (name, "txt2img", PLAIN), *images, *gone]


ROUND: Round = [step for name in FORMATS for step in steps_of(name)] + [checkpoint("one"), ("one", "txt2img", PLAIN)]


def quantised(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """A checkpoint whose linear layers of attention have 8 bits."""
    found: dict[str, torch.Tensor] = {}
    for key, weight in weights.items():
        if "transformer_blocks" not in key or weight.dim() != 2:
            found[key] = weight
            continue
        integers, layer, wide = "int8" in FORMATS[name], key.removesuffix("weight"), weight.float()
        largest = wide.abs().amax(1, keepdim=True) if name == "rows" else wide.abs().max()
        scale = largest / (127 if integers else 448)
        found[key] = (wide / scale).round().to(torch.int8) if integers else (wide / scale).to(torch.float8_e4m3fn)
        if name == "scaled":
            found[f"{layer}scale_weight"] = scale
            continue
        found[f"{layer}weight_scale"] = scale
        said = json.dumps({"format": FORMATS[name]}).encode()
        found[f"{layer}comfy_quant"] = torch.tensor(list(said), dtype=torch.uint8)
    if name == "scaled":
        found["model.diffusion_model.scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("forge-quantised")
    command = [forge.NEO.python, str(CHECKOUT / "tests/hosts/live/forge_models.py"), str(folder / "models")]
    made = subprocess.run(command, cwd=forge.NEO.folder, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr
    checkpoints = folder / "models" / "Stable-diffusion"
    one = load_file(checkpoints / "one.safetensors")
    for name in ("other", "three"):
        (checkpoints / f"{name}.safetensors").unlink()
    for name in FORMATS:
        save_file({k: v.contiguous() for k, v in quantised(one, name).items()}, checkpoints / f"{name}.safetensors")
    (folder / "data").mkdir()
    return make_data(folder / "data", folder / "models")


def started(data: Path, name: str, **settings: Any) -> Any:
    return forge.start(data, name, {"sd_model_checkpoint": "one.safetensors", **settings})


@pytest.fixture(scope="module")
def stock(data: Path) -> dict[str, list[str]]:
    with started(data, "stock", disabled_extensions=["stable-fast"]) as webui:
        return Played(webui).round(ROUND, status=False).images


@pytest.fixture(scope="module")
def played(data: Path, stock: dict[str, list[str]]) -> Iterator[Played]:
    with started(data, "extended", sfast_allow_cpu=True) as webui:
        yield Played(webui).round(ROUND, status=True)


@pytest.mark.parametrize("name", images_of(ROUND))
def test_image_equals_the_one_without_the_extension(played: Played, stock: dict[str, list[str]], name: str) -> None:
    tolerance = ROUNDED if "int8" in FORMATS.get(name.partition(",")[0], "") else TOLERANCE
    assert apart(played.images[name], stock[name]) < tolerance


@pytest.mark.parametrize("name", FORMATS)
def test_image_is_the_same_after_a_lora(played: Played, name: str) -> None:
    assert apart(played.images[f"{name}, again"], played.images[f"{name}, LoRA gone"]) == 0


@pytest.mark.parametrize("name", [name for name in images_of(ROUND) if name != "one"])
def test_is_accelerated(played: Played, name: str) -> None:
    accelerated(played, name)


def test_a_model_in_half_precision_is_accelerated_after_them(played: Played) -> None:
    accelerated(played, "one")


@pytest.mark.parametrize("name", FORMATS)
def test_the_round_shows_what_it_should(stock: dict[str, list[str]], name: str) -> None:
    assert apart(stock[f"{name}, LoRA"], stock[name]) > 3 * ROUNDED
    assert apart(stock[f"{name}, weaker"], stock[f"{name}, LoRA"]) > 3 * ROUNDED
    assert apart(stock[f"{name}, LoRA gone"], stock[name]) < TOLERANCE
