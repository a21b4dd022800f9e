"""Offload modes and what changes the UNet for a run in the real SD.Next, without the extension and with it."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import TOLERANCE, Played, drawn, options, told

pytestmark = sdnext.MARKS

RELOAD = "/sdapi/v1/reload-checkpoint?force=true"
FREEU = {"freeu_enabled": True, "freeu_b1": 1.4, "freeu_b2": 1.6, "freeu_s1": 0.9, "freeu_s2": 0.2}
PAG = {"cfg_true": 3.0, "cfg_adaptive": 0.0}
TOME = {"token_merging_method": "ToMe", "tome_ratio": 0.5}
TODO = {"token_merging_method": "ToDo", "todo_ratio": 0.5}
LARGE = {"width": 256, "height": 256, "steps": 2}


def offloaded(mode: str) -> list[sdnext.Step]:
    """Images under an offload mode; its hooks are those of a model that was loaded under it."""
    return [
        options(f"to {mode}", diffusers_offload_mode=mode),
        (f"load under {mode}", "call", RELOAD),
        drawn(mode),
        told(f"{mode}, LoRA", "<lora:strong:0.5>"),
        drawn(f"{mode}, LoRA gone"),
    ]


ROUND: list[sdnext.Step] = [
    drawn("plain"),
    *offloaded("balanced"),
    *offloaded("model"),
    *offloaded("group"),
    *offloaded("none"),
    drawn("FreeU", **FREEU),
    drawn("FreeU, other factors", **{**FREEU, "freeu_b1": 1.1}),
    drawn("FreeU, factors back", **FREEU),
    drawn("plain after FreeU"),
    drawn("PAG", **PAG),
    drawn("plain after PAG"),
    # as SD.Next's page sends it by default: by the pipeline for PAG, at no scale
    drawn("PAG off in the page", cfg_true=-1.0, cfg_adaptive=0.5),
    drawn("ToMe", override_settings=TOME),
    drawn("plain after ToMe"),
    drawn("HiDiffusion", hidiffusion=True),
    drawn("plain after HiDiffusion"),
    drawn("ToDo", override_settings=TODO),
    drawn("plain after ToDo"),
    drawn("large", **LARGE),
    drawn("HyperTile", **LARGE, hypertile_unet_enabled=True, hypertile_unet_tile=128, hypertile_unet_min_tile=64),
    drawn("large after HyperTile", **LARGE),
    drawn("plain after HyperTile"),
]
IMAGES = sdnext.images_of(ROUND)
# what the reason is to say
BYPASSED = {
    "group": "offload mode 'group'",
    "group, LoRA": "offload mode 'group'",
    "group, LoRA gone": "offload mode 'group'",
    "PAG": "perturbed attention guidance",
    "ToMe": "token merging (ToMe)",
    "HiDiffusion": "HiDiffusion",
    "ToDo": "token merging (ToDo)",
    "HyperTile": "HyperTile",
}


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize("name", ["FreeU", "FreeU, other factors", "PAG", "ToMe", "HiDiffusion"])
def test_each_modifier_changes_the_image(played: Played, name: str) -> None:
    assert played.apart(name, "plain") > 2 * TOLERANCE


def test_hypertile_changes_a_large_image(played: Played) -> None:
    assert played.apart("HyperTile", "large") > TOLERANCE


@pytest.mark.parametrize("name", [name for name in IMAGES if name not in BYPASSED])
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize("name", BYPASSED)
def test_the_original_ran_and_the_reason_says_why(played: Played, name: str) -> None:
    played.bypassed(name, BYPASSED[name])


@pytest.mark.parametrize("mode", ["balanced", "model", "none"])
def test_plans_survive_networks_under_an_offload(played: Played, mode: str) -> None:
    assert played.gained(f"{mode}, LoRA", "captures") == played.gained(f"{mode}, LoRA gone", "captures") == 0


@pytest.mark.parametrize(
    "name",
    ["FreeU, factors back", "plain after FreeU", "PAG off in the page", "plain after ToMe", "large after HyperTile"],
)
def test_plans_go_on_after_a_modifier(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0
