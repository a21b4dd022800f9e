"""Reference units in the real SD.Next: every image without the extension and with it.

SFAST_SDNEXT_REFERENCE   diffusers' community pipeline `stable_diffusion_reference`, the file that SD.Next has diffusers
                         fetch from the hub; see `sdnext.py` for the others
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import sdnext
from .sdnext import PLAIN, TOLERANCE, Played, controlled, drawn, to_checkpoint, told
from .webui import WebUI, of_steps

PIPELINE = os.environ.get("SFAST_SDNEXT_REFERENCE")
pytestmark = [
    *sdnext.MARKS,
    pytest.mark.skipif(not PIPELINE, reason="SFAST_SDNEXT_REFERENCE names no file of the pipeline"),
]

# an extension of SD.Next: diffusers would ask PyPI which of its versions there are; told of none, it takes the pipeline
# from the hub's branch "main", which the cache holds
OFFLINE = """
import functools

import diffusers.utils
from diffusers.utils import dynamic_modules_utils

dynamic_modules_utils.get_diffusers_versions = list
dynamic_modules_utils.HF_MODULES_CACHE = {modules!r}
diffusers.utils.get_class_from_dynamic_module = functools.partial(
    diffusers.utils.get_class_from_dynamic_module, cache_dir={cache!r}
)
"""


def prepare(data: Path, hub: Path) -> None:
    """Make a cache of the hub that holds the pipeline, and the extension that has diffusers look there."""
    base, revision = hub / "datasets--diffusers--community-pipelines-mirror", "0" * 40
    files = base / "snapshots" / revision / "main"
    files.mkdir(parents=True)
    (files / "stable_diffusion_reference.py").symlink_to(Path(PIPELINE or "").resolve())
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(revision)
    scripts = data / "extensions" / "test-offline" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "offline.py").write_text(OFFLINE.format(modules=str(hub / "modules"), cache=str(hub)))


def referred(name: str, attention: str, fidelity: float = 0.5, *, weight: float = 1.0, **more: Any) -> sdnext.Step:
    """A step: the plain image under a unit; its weights say in how many layers the reference takes part."""
    unit = {"model": "Reference", "attention": attention, "fidelity": fidelity}
    return controlled(name, "reference", {**unit, "query_weight": weight, "adain_weight": weight}, **more)


def refused(name: str, **more: Any) -> sdnext.Step:
    """A step: the plain image, but for this, which is to fail; the answer stands for the images."""

    def post(webui: WebUI) -> list[str]:
        with pytest.raises(RuntimeError) as error:
            webui.post("/sdapi/v1/txt2img", {**PLAIN, **more})
        return [str(error.value).splitlines()[0]]

    return name, "do", post


# SD.Next never takes away the forwards that the pipeline puts on layers: images "after" have them still
ROUND: list[sdnext.Step] = [
    drawn("plain"),
    drawn("plain, another seed", seed=2),
    controlled("no unit", "reference"),
    referred("attention", "Attention"),
    referred("attention, another seed", "Attention", seed=2),
    drawn("plain after attention"),
    referred("adain", "Adain"),
    drawn("plain after adain"),
    referred("both, two images", "Attention Adain", batch_size=2),
    referred("both, no guidance", "Attention Adain", cfg_scale=1),
    referred("both", "Attention Adain"),
    referred("both, faithful", "Attention Adain", 1.0),
    referred("both, free", "Attention Adain", 0.0),
    referred("both, in some layers", "Attention Adain", weight=0.3),
    referred("both, LoRA", "Attention Adain", prompt="a dog <lora:strong:0.5>"),
    drawn("plain after both"),
    drawn("plain after both, another seed", seed=2),
    told("LoRA after both", "<lora:strong:0.5>"),
    drawn("wide after both", width=192),
    controlled("ControlNet after both", "controlnet", {"model": "tiny-control"}),
    refused("two images after both", batch_size=2),
    refused("no guidance after both", cfg_scale=1),
    drawn("plain after failures"),
    to_checkpoint("to tiny-b", "tiny-b"),
    drawn("plain on tiny-b"),
    referred("attention on tiny-b", "Attention"),
    drawn("plain on tiny-b after attention"),
    ("load tiny-b anew", "call", "/sdapi/v1/reload-checkpoint?force=true"),
    drawn("plain on tiny-b, loaded anew"),
    to_checkpoint("to tiny-a", "tiny-a"),
    drawn("plain at the end"),
    drawn("two images at the end", batch_size=2),
]
REFUSED = ["two images after both", "no guidance after both"]
IMAGES = [name for name in sdnext.images_of(ROUND) if name not in REFUSED]
UNIT = [name for name in IMAGES if name.startswith(("attention", "adain", "both"))]
NETWORK = "ControlNet after both"
AFTER = [name for name in IMAGES if " after " in name]
# the first of the forwards, which the reason is to name
LEFT = {
    name: "hacked_basic_transformer_inner_forward" if "attention" in name else "hack_CrossAttnDownBlock2D_forward"
    for name in AFTER
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with (
        tempfile.TemporaryDirectory() as hub,
        sdnext.play(tmp_path_factory, ROUND, prepare=lambda data: prepare(data, Path(hub))) as found,
    ):
        yield found


@pytest.mark.parametrize("name", IMAGES)
def test_image_equals_the_one_without_the_extension(played: Played, name: str) -> None:
    played.equal(name)


@pytest.mark.parametrize("name", UNIT)
def test_under_a_unit_the_original_runs_and_the_reason_says_why(played: Played, name: str) -> None:
    played.bypassed(name, "the Reference unit keeps state in the layers")


@pytest.mark.parametrize("name", [name for name in AFTER if name != NETWORK])
def test_the_forwards_that_it_leaves_behind_run_and_are_named(played: Played, name: str) -> None:
    played.bypassed(name, "stable_diffusion_reference", LEFT[name])


def test_a_controlnet_is_accelerated_beside_them(played: Played) -> None:
    assert any(LEFT[NETWORK] in reason for reason in played.reasons(NETWORK))
    unet, network = of_steps(played.reports[NETWORK])
    assert (unet["name"], network["name"]) == ("unet", "controlnet")
    assert 0 < played.ran(NETWORK) == sum(plan["replays"] for plan in network["plans"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_with_them_fails_in_the_same_words(played: Played, name: str) -> None:
    assert played.images[name] == played.stock[name]
    assert "The shape of the mask" in played.stock[name][0]
    assert played.reports[name]["last_error"] is None


@pytest.mark.parametrize("name", [name for name in IMAGES if name not in [*UNIT, *AFTER]])
def test_before_a_unit_and_on_a_model_loaded_anew_plans_run(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("attention", "plain"),
        ("attention, another seed", "plain, another seed"),
        ("adain", "plain"),
        ("both", "attention"),
        ("both", "adain"),
        ("both, faithful", "both"),
        ("both, free", "both"),
        ("both, in some layers", "both"),
        ("both, LoRA", "LoRA after both"),
        ("attention on tiny-b", "plain on tiny-b"),
    ],
)
def test_units_and_their_settings_change_the_image(played: Played, name: str, other: str) -> None:
    assert played.apart(name, other) > 2 * TOLERANCE
