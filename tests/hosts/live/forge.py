"""What the tests of Forge, reForge, Forge Neo and Forge Classic share: the start, and the tests of a round.

SFAST_FORGE_DIR              a Forge Neo that starts; nothing is written into it
SFAST_FORGE_PYTHON           its interpreter; default: venv/bin/python in it
SFAST_FORGE_FLAGS            how it computes; default: on the CPU in fp32
SFAST_FORGE_CLASSIC_DIR, ..  the same of Forge Classic
SFAST_FORGE_OLD_DIR, ..      the same of Forge by lllyasviel
SFAST_REFORGE_DIR, ..        the same of reForge

Checkpoints and LoRAs are made by `forge_models.py`, and lie with settings and outputs in the test's data directory.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from . import test_a1111_requests as requests
from .a1111 import (
    CHECKOUT,
    PLAIN,
    TOLERANCE,
    Played,
    Round,
    accelerated,
    apart,
    bypassed,
    count,
    equal_to_stock,
    images_of,
    make_data,
    play,
)
from .webui import PATIENCE, WebUI, pixels


@dataclass(frozen=True)
class Program:
    """One of them: its name, the beginning of its variables, and the flags by which it computes on the CPU in fp32.

    Args:
        freeu: the title of its script for FreeU, and what that takes in addition to the four factors.
    """

    name: str
    variable: str
    on_the_cpu: str
    freeu: tuple[str, tuple[float, ...]] | None = None

    @property
    def folder(self) -> str | None:
        return os.environ.get(f"{self.variable}_DIR")

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        why = f"{self.variable}_DIR names no {self.name}"
        return [pytest.mark.hosts, pytest.mark.skipif(not self.folder, reason=why)]

    @property
    def flags(self) -> str:
        return os.environ.get(f"{self.variable}_FLAGS", f"{self.on_the_cpu} --skip-torch-cuda-test")

    @property
    def python(self) -> str:
        """The WebUI's interpreter."""
        own = Path(self.folder or "") / "venv" / "bin" / "python"
        return os.environ.get(f"{self.variable}_PYTHON") or (str(own) if own.exists() else sys.executable)


NEO = Program("Forge Neo", "SFAST_FORGE", "--cpu --force-fp32")
CLASSIC = Program("Forge Classic", "SFAST_FORGE_CLASSIC", "--always-cpu --all-in-fp32")
FREEU, WHOLE = "FreeU Integrated", (0.0, 1.0)
OLD = Program("Forge", "SFAST_FORGE_OLD", "--always-cpu --all-in-fp32", (f"{FREEU} (SD 1.x, SD 2.x, SDXL)", WHOLE))
REFORGE = Program("reForge", "SFAST_REFORGE", "--always-cpu --all-in-fp32", (FREEU, ()))
WITHOUT_NETWORK = (
    "--skip-prepare-environment --skip-version-check --skip-python-version-check --no-hashing --api --nowebui"
    " --server-name 127.0.0.1"
)
SETTINGS: dict[str, Any] = {
    # without it the WebUI asks the user to install it anew
    "VERSION_UID": "PY313",
    "live_previews_enable": False,
    "sd_model_checkpoint": "one.safetensors",
    "samples_save": False,
    # the WebUI takes back an override only of what its settings file names
    "token_merging_ratio": 0.0,
}


def make(folder: Path, program: Program = NEO) -> Path:
    """A data directory with models and the checkout among the extensions."""
    models = folder / "made"
    make_models(models, program)
    data = folder / "data"
    data.mkdir()
    return make_data(data, models)


def make_models(folder: Path, program: Program, *which: str) -> None:
    """Shallow checkpoints and LoRAs, in a folder that is not there yet; those of `forge_small.py`, if `which` is
    "small", or a large checkpoint: see `forge_full.py`."""
    shallow = which in ((), ("small",))
    make_by("forge_models.py" if shallow else "forge_full.py", folder, program, *which)


def make_by(script: str, folder: Path, program: Program, *arguments: str) -> None:
    """Fill a folder by a script of this folder, which the program's interpreter runs."""
    command = [program.python, str(CHECKOUT / "tests" / "hosts" / "live" / script), str(folder), *arguments]
    patience = PATIENCE * 300
    made = subprocess.run(command, cwd=program.folder, capture_output=True, text=True, timeout=patience, check=False)
    assert made.returncode == 0, made.stderr


def start(
    data: Path,
    name: str,
    settings: dict[str, Any],
    program: Program = NEO,
    flags: str | None = None,
    packages: Path | None = None,
) -> WebUI:
    """The WebUI with these settings, and a log of its own.

    Args:
        packages: see `WebUI`.
    """
    config = data / f"{name}.json"
    config.write_text(json.dumps({**SETTINGS, **settings}), encoding="utf-8")
    command = [*shlex.split(program.flags if flags is None else flags), *shlex.split(WITHOUT_NETWORK)]
    command += ["--data-dir", str(data), "--ui-settings-file", str(config)]
    log = data / f"{name}.log"
    return WebUI([program.python, "launch.py", *command], Path(program.folder or ""), log, packages=packages)


def named(webui: WebUI, steps: Round) -> Round:
    """These steps with ControlNets by the names that the WebUI has for them: Forge and reForge add a hash."""
    try:
        models = webui.get("/controlnet/model_list")["model_list"]
    except urllib.error.HTTPError:
        # Forge Neo does not tell, and has the file's name
        return steps
    told = json.dumps(steps)
    for each in models:
        told = told.replace(f'"model": {json.dumps(each.partition(" ")[0])}', f'"model": {json.dumps(each)}')
    return [(step, route, payload) for step, route, payload in json.loads(told)]


def with_freeu(program: Program) -> dict[str, Any]:
    """The scripts of an image with FreeU; none if the program has no FreeU."""
    if program.freeu is None:
        return {}
    title, more = program.freeu
    return {title: {"args": [True, 1.3, 1.4, 0.9, 0.2, *more]}}


CHANGED = ("lora", "lora weaker", "two loras", "other", "three", "token merging")
UNCHANGED = ("lora gone", "plain after loras", "one again", "without controlnet", "plain at the end")


def fixtures(program: Program, steps: Round) -> tuple[Any, Any, Any]:
    """Of a module of tests, `data`, `stock` and `played`: what the WebUI is started with, the images of the round as
    it makes them by itself, and the WebUI with the extension after the round."""

    @pytest.fixture(scope="module")
    def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make(tmp_path_factory.mktemp("forge"), program)

    @pytest.fixture(scope="module")
    def stock(data: Path) -> dict[str, list[str]]:
        with start(data, "stock", {"disabled_extensions": ["stable-fast"]}, program) as webui:
            return Played(webui).round(named(webui, steps), status=False).images

    @pytest.fixture(scope="module")
    def played(data: Path, stock: dict[str, list[str]]) -> Iterator[Played]:
        with start(data, "extended", {"sfast_allow_cpu": True}, program) as webui:
            yield Played(webui).round(named(webui, steps), status=True)

    return data, stock, played


def round_tests(program: Program, steps: Round, why: Mapping[str, str], same_plans: Sequence[str]) -> dict[str, Any]:
    """The fixtures of a module, and the tests of its round, by their names.

    Args:
        why: the words of the report, of the steps that are bypassed; in all others plans run.
        same_plans: the steps that need no new plan.
    """
    data, stock, played = fixtures(program, steps)

    @pytest.mark.parametrize("name", [name for name in images_of(steps) if name not in why])
    def test_plans_were_run(played: Played, name: str) -> None:
        accelerated(played, name)
        assert played.reasons(name) == {}

    @pytest.mark.parametrize("name", same_plans)
    def test_no_new_capture_for(played: Played, name: str) -> None:
        assert played.gained(name, "captures") == 0

    @pytest.mark.parametrize("name", why)
    def test_the_original_forward_runs_and_the_report_says_why(played: Played, name: str) -> None:
        bypassed(played, name, why[name])

    tests = (
        equal_to_stock(steps),
        test_plans_were_run,
        test_no_new_capture_for,
        test_the_original_forward_runs_and_the_report_says_why,
    )
    return {"data": data, "stock": stock, "played": played, **_by_name(*tests)}


def program_tests(
    program: Program,
    steps: Round,
    why: Mapping[str, str],
    same_plans: Sequence[str],
    controlled: Sequence[str],
    changed: Sequence[str] = CHANGED,
    unchanged: Sequence[str] = UNCHANGED,
) -> dict[str, Any]:
    """The fixtures and the tests of a program's module, by their names; see `round_tests`.

    Args:
        controlled: the steps with ControlNets.
        changed: the steps whose first image differs from the plain one, in addition to those with ControlNets: the
            extension adds its map to the images.
        unchanged: the steps with the plain image.
    """

    def test_the_vae_and_controlnets_are_accelerated(played: Played) -> None:
        # before another checkpoint, with which reForge gives up plans
        vae = {each["name"]: each for each in played.reports["inpainting"]["accelerators"] if "VAE" in each["name"]}
        assert sorted(vae) == ["VAE decoder", "VAE encoder"]
        assert all(each["plans"] and each["idle"] is None for each in vae.values()), vae
        # the decoder's with the second image of a size
        assert [count(played.reports[name], "vae_captures") for name in ("plain", "plain again")] == [0, 1]
        for name in controlled:
            found = [each for each in played.reports[name]["accelerators"] if each["name"] == "controlnet"]
            assert found and any(each["plans"] for each in found), name

    def test_the_round_shows_what_it_should(stock: dict[str, list[str]]) -> None:
        for name in (*changed, *controlled):
            assert apart(stock[name][:1], stock["plain"]) > TOLERANCE, name
        for name in unchanged:
            assert apart(stock[name], stock["plain"]) < TOLERANCE, name

    def test_switched_off_the_bytes_are_the_webui_s_own(played: Played, stock: dict[str, list[str]]) -> None:
        play(played.webui, "options", {"sfast_enabled": False})
        for name, prompt in (("plain", ""), ("lora", " <lora:strong:1>")):
            (found,) = play(played.webui, "txt2img", {**PLAIN, "prompt": PLAIN["prompt"] + prompt})
            assert (pixels(found) == pixels(stock[name][0])).all(), name
        play(played.webui, "options", {"sfast_enabled": True})
        assert apart(play(played.webui, "txt2img", PLAIN), stock["plain"]) < TOLERANCE
        status = played.webui.get("/sfast/v1/status")
        assert status["host"]["name"] == program.name and status["last_error"] is None

    return {
        **round_tests(program, steps, why, same_plans),
        **_by_name(
            requests.test_after_an_interruption_the_next_image_is_right,
            requests.test_two_requests_at_once_give_both_images,
            test_the_vae_and_controlnets_are_accelerated,
            test_the_round_shows_what_it_should,
            test_switched_off_the_bytes_are_the_webui_s_own,
        ),
    }


def _by_name(*tests: Any) -> dict[str, Any]:
    return {test.__name__: test for test in tests}
