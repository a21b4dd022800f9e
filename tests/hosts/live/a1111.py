"""What the tests of AUTOMATIC1111 share: its start, and rounds of images played with and without the extension.

SFAST_A1111_DIR      a WebUI that starts (its repositories checked out); nothing is written into it
SFAST_A1111_PYTHON   its interpreter; default: venv/bin/python in it
SFAST_A1111_FLAGS    how it computes; default: on the CPU in fp32

Checkpoints, networks and a text model are made by `a1111_models.py`, tiny and random, and lie with settings and outputs
in a data directory of the test's own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
from PIL import Image

from sfast_ext.ui.api import STATUS_KEPT_S

from .webui import PATIENCE, VAE_PLANS, WebUI, add_extension, difference, encoded

HOST = os.environ.get("SFAST_A1111_DIR")
MARKS = [
    pytest.mark.hosts,
    pytest.mark.skipif(not HOST, reason="SFAST_A1111_DIR names no AUTOMATIC1111 WebUI"),
]
CHECKOUT = Path(__file__).resolve().parents[3]
FLAGS = os.environ.get("SFAST_A1111_FLAGS", "--use-cpu all --no-half --skip-torch-cuda-test")
ON_CPU = "--use-cpu all" in FLAGS
WITHOUT_NETWORK = (
    "--skip-prepare-environment --skip-version-check --skip-python-version-check --no-download-sd-model"
    " --do-not-download-clip --no-hashing --api --server-name 127.0.0.1"
)
# Of 255, mean over the image. In fp32 both sides differ by the order of additions only. In half precision the WebUI's
# own image is up to 1.24 off that in fp32 (SD 2 with a LoRA, whose effect is 58); in Forge Classic up to 1.42.
IN_FP32, IN_HALF = 1.0, 2.5
TOLERANCE = IN_FP32 if ON_CPU else IN_HALF

STARTED = "Startup time"
"""What AUTOMATIC1111 writes once its server has all routes. An earlier request ends it, with the extension or without:
"Cannot add middleware after an application has started"."""

PLAIN: dict[str, Any] = {
    "prompt": "a dog on a hill",
    "negative_prompt": "a cat",
    "seed": 1,
    "steps": 3,
    "width": 128,
    "height": 128,
    "sampler_name": "Euler",
}
GRADIENT = Image.linear_gradient("L").resize((128, 128)).convert("RGB")
INIT = encoded(GRADIENT)
HIRES = {**PLAIN, "enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "Latent", "denoising_strength": 0.6}
IMG2IMG = {**PLAIN, "init_images": [INIT], "denoising_strength": 0.7}

Round = list[tuple[str, str, dict[str, Any]]]
"""Name and what to do: ("txt2img" | "img2img" | "options" | another path below /sdapi/v1/, payload)."""


def told(name: str, prompt: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    """A step of a round: the plain image with this added to its prompt."""
    return name, "txt2img", {**PLAIN, "prompt": f"{PLAIN['prompt']} {prompt}", **more}


def python() -> str:
    """The WebUI's interpreter."""
    own = Path(HOST or "") / "venv" / "bin" / "python"
    return os.environ.get("SFAST_A1111_PYTHON") or (str(own) if own.exists() else sys.executable)


def make_models(folder: Path, *which: str) -> None:
    """Fill `folder` with tiny models, or with those that `which` names, by the WebUI's interpreter."""
    command = [python(), str(CHECKOUT / "tests" / "hosts" / "live" / "a1111_models.py"), str(folder), *which]
    made = subprocess.run(command, cwd=HOST, capture_output=True, text=True, timeout=PATIENCE * 300, check=False)
    assert made.returncode == 0, made.stderr


def make_data(folder: Path, models: Path, *, vae_plans: bool = True) -> Path:
    """A data directory with the models and the checkout among the extensions; see also `VAE_PLANS`."""
    (folder / "models").symlink_to(models, target_is_directory=True)
    (models / "embeddings").mkdir(exist_ok=True)
    (folder / "embeddings").symlink_to(models / "embeddings", target_is_directory=True)
    (folder / "extensions").mkdir()
    (folder / "extensions" / "stable-fast").symlink_to(CHECKOUT, target_is_directory=True)
    if vae_plans:
        add_extension(folder, "vae-plans", VAE_PLANS)
    return folder


def start(
    data: Path,
    name: str,
    settings: dict[str, Any],
    interface: str = "--nowebui",
    flags: str | None = None,
    packages: Path | None = None,
) -> WebUI:
    """The WebUI with these settings, and a log of its own; the API alone unless told otherwise.

    Args:
        packages: see `WebUI`.
    """
    config = data / f"{name}.json"
    common = {"live_previews_enable": False, "sd_model_checkpoint": "tiny.safetensors", "samples_save": False}
    config.write_text(json.dumps({**common, **settings}), encoding="utf-8")
    command = [*shlex.split(FLAGS if flags is None else flags), *shlex.split(WITHOUT_NETWORK), interface]
    command += ["--data-dir", str(data), "--ui-settings-file", str(config)]
    log = data / f"{name}.log"
    return WebUI([python(), "launch.py", *command], Path(HOST or ""), log, packages=packages, said=STARTED)


def play(webui: WebUI, kind: str, payload: dict[str, Any]) -> list[str]:
    """One step of a round; its images."""
    answer = webui.post(f"/sdapi/v1/{kind}", payload)
    return answer.get("images", []) if kind in ("txt2img", "img2img") else []


def apart(some: list[str], others: list[str]) -> float:
    """Mean absolute difference of the least alike pair of images, of 255."""
    assert len(some) == len(others) > 0
    return max(difference(a, b) for a, b in zip(some, others))


def count(report: dict[str, Any], counter: str) -> int:
    """A counter; plans run are those replayed as CUDA graphs and those run without, as on a CPU."""
    names = ("replays", "eager_runs") if counter == "plans run" else (counter,)
    return sum(report["counters"].get(name, 0) for name in names)


@dataclass
class Played:
    """A WebUI, the images of its round, and the status after each step."""

    webui: WebUI
    images: dict[str, list[str]] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=lambda: {"counters": {}, "reasons_since_start": {}})
    """The status before the round."""

    def round(self, steps: Round, *, status: bool) -> Played:
        """Play these steps; with `status`, ask for the report after each."""
        for name, kind, payload in steps:
            assert name not in self.images, name
            self.images[name] = play(self.webui, kind, payload)
            if status:
                # a GPU makes a tiny image in less than the time for which an answer lasts
                time.sleep(STATUS_KEPT_S)
                self.reports[name] = self.webui.get("/sfast/v1/status")
        return self

    def before(self, name: str) -> dict[str, Any]:
        """The status before a step."""
        names = list(self.reports)
        return self.reports[names[names.index(name) - 1]] if names.index(name) else self.first

    def gained(self, name: str, counter: str) -> int:
        """How much a counter rose in a step."""
        return count(self.reports[name], counter) - count(self.before(name), counter)

    def reasons(self, name: str) -> dict[str, int]:
        """Why calls of a step went to the original forward, and how many."""
        was, now = (report["reasons_since_start"] for report in (self.before(name), self.reports[name]))
        return {why: n - was.get(why, 0) for why, n in now.items() if n > was.get(why, 0)}


def images_of(steps: Round) -> list[str]:
    """The names of the steps that make images."""
    return [name for name, kind, _ in steps if kind in ("txt2img", "img2img")]


def equal_to_stock(steps: Round) -> Any:
    """A module's test that each image of its round is that of the WebUI without the extension."""

    @pytest.mark.parametrize("name", images_of(steps))
    def test_image_is_the_one_without_the_extension(played: Played, stock: dict[str, list[str]], name: str) -> None:
        assert apart(played.images[name], stock[name]) < TOLERANCE

    return test_image_is_the_one_without_the_extension


def accelerated(played: Played, name: str) -> None:
    """Check that plans ran in a step, and nothing of ours failed."""
    report = played.reports[name]
    assert played.gained(name, "plans run") > 0, (played.reasons(name), report["events"][-6:])
    assert report["last_error"] is None, report["last_error"]


def bypassed(played: Played, name: str, words: str) -> None:
    """Check that no plan ran in a step, that `words` say why, and that nothing of ours failed."""
    assert played.gained(name, "plans run") == 0
    assert any(words in reason for reason in played.reasons(name)), played.reasons(name)
    assert played.reports[name]["last_error"] is None, played.reports[name]["last_error"]
