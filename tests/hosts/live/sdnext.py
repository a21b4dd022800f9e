"""What the tests of SD.Next share: its start, and rounds of requests played without the extension and with it.

SFAST_SDNEXT_DIR      an SD.Next that starts without a network; nothing is written into it
SFAST_SDNEXT_PYTHON   its interpreter; default: venv/bin/python in it
SFAST_SDNEXT_FLAGS    how it computes; default: on the CPU (in fp32)

Models are made by `sdnext_extras.py` and `sdnext_families.py`, tiny and random, and lie with settings and extensions in
a data directory of the test's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
from PIL import Image

from .webui import PATIENCE, VAE_PLANS, WebUI, add_extension, difference, encoded

HOST = os.environ.get("SFAST_SDNEXT_DIR")
MARKS = [
    pytest.mark.hosts,
    pytest.mark.skipif(not HOST, reason="SFAST_SDNEXT_DIR names no SD.Next"),
]
HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
FLAGS = os.environ.get("SFAST_SDNEXT_FLAGS", "--use-cpu all")
ON_CPU = "--use-cpu all" in FLAGS
WITHOUT_NETWORK = "--skip-all --skip-git --skip-requirements"
# Of 255, mean over the image. In fp32 both sides differ by the order of additions only. On a GPU SD.Next turns TF32
# on, whose products have the mantissa of half precision.
TOLERANCE = 1.0 if ON_CPU else 2.5

SETTINGS: dict[str, Any] = {
    "offline_mode": True,
    # on a GPU tests ask more often than 300 times a minute
    "server_rate_limit": 0,
    # it chooses convolutions by their times: the WebUI's own images would differ from start to start
    "cudnn_benchmark": False,
    "sdnq_dequantize_compile": False,
    "sd_model_checkpoint": "Diffusers/tiny-a",
    "sd_checkpoint_autoload": True,
    # its default mode leaves a residue of the last LoRA behind, with or without us
    "lora_fuse_native": False,
    "diffusers_offload_mode": "none",
    "cuda_dtype": "FP32",
    "show_progress_type": "None",
    "samples_save": False,
    "samples_format": "png",
    "sfast_allow_cpu": True,
}
PLAIN: dict[str, Any] = {
    "prompt": "a dog on a hill", "negative_prompt": "a cat", "seed": 1, "steps": 4, "cfg_scale": 6,
    "width": 128, "height": 128, "save_images": False, "send_images": True,
}  # fmt: skip
GRADIENT = Image.linear_gradient("L").resize((128, 128)).convert("RGB")
INIT = encoded(GRADIENT)
HIRES = {
    **PLAIN,
    "enable_hr": True,
    "hr_scale": 1.5,
    "hr_upscaler": "Latent Bilinear",
    "hr_force": True,
    "hr_resize_mode": 1,
}

Step = tuple[str, str, Any]
"""Name, what to do, and with what: see `do`."""


def told(name: str, prompt: str, **more: Any) -> Step:
    """A step: the plain image with this added to its prompt."""
    return name, "txt2img", {**PLAIN, "prompt": f"{PLAIN['prompt']} {prompt}", **more}


def drawn(name: str, **more: Any) -> Step:
    """A step: the plain image, but for this."""
    return name, "txt2img", {**PLAIN, **more}


def redrawn(name: str, **more: Any) -> Step:
    """A step: an image made of another."""
    return name, "img2img", {**PLAIN, "init_images": [INIT], "denoising_strength": 0.7, **more}


def controlled(name: str, kind: str, *units: dict[str, Any], **more: Any) -> Step:
    """A step: the plain image under these control units, of one kind."""
    payload = {key: value for key, value in {**PLAIN, **more}.items() if key not in ("width", "height")}
    every = {"process": "None", "strength": 1.0, "override": INIT, "unit_type": kind}
    sizes = {"width_before": PLAIN["width"], "height_before": PLAIN["height"]}
    # without an empty "xyz" the route fails; its default of cfg_rescale is not that of txt2img
    fixed = {"xyz": {}, "cfg_rescale": 0.0, "unit_type": kind}
    return name, "control", {**payload, **sizes, **fixed, "control": [{**every, **unit} for unit in units]}


def options(name: str, **values: Any) -> Step:
    """A step: settings changed."""
    return name, "options", values


def to_checkpoint(name: str, checkpoint: str) -> Step:
    """A step: another checkpoint, by the route for it."""
    return name, "call", f"/sdapi/v1/checkpoint?sd_model_checkpoint=Diffusers/{checkpoint}"


def python() -> str:
    """SD.Next's interpreter."""
    return os.environ.get("SFAST_SDNEXT_PYTHON") or str(Path(HOST or "") / "venv" / "bin" / "python")


def make_models(folder: Path, *full: str) -> None:
    """Fill a folder with all of the tiny models, or with large ones, see `sdnext_full.py`."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if not full:
        offline["OMP_NUM_THREADS"] = "1"
    tiny = [(script,) for script in ("sdnext_extras.py", "sdnext_families.py")]
    for script, *which in [("sdnext_full.py", name) for name in full] or tiny:
        command = [python(), str(HERE / script), str(folder), *which]
        told: dict[str, Any] = {"cwd": HOST, "env": offline, "timeout": PATIENCE * 300}
        made = subprocess.run(command, capture_output=True, text=True, check=False, **told)
        assert made.returncode == 0, made.stderr


_models: dict[Path, Path] = {}


def make_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the models, which are made once for all modules, and the extensions of the tests."""
    base = tmp_path_factory.getbasetemp()
    if base not in _models:
        _models[base] = tmp_path_factory.mktemp("sdnext-models")
        make_models(_models[base])
    folder = tmp_path_factory.mktemp("sdnext")
    (folder / "models").symlink_to(_models[base], target_is_directory=True)
    for name, script in (("test-fixes", "sdnext_fixes.py"), ("unknown-patches", "sdnext_patches.py")):
        add_extension(folder, name, (HERE / script).read_text(encoding="utf-8"))
    add_extension(folder, "vae-plans", VAE_PLANS)
    return folder


def start(
    data: Path,
    settings: dict[str, Any],
    *,
    extension: bool,
    flags: str = "",
    device: str = FLAGS,
    common: dict[str, Any] = SETTINGS,
    packages: Path | None = None,
    ready: str = "/sdapi/v1/status",
    said: str = "Startup time",
) -> WebUI:
    """SD.Next with these settings beside the common ones.

    Args:
        flags: of its command line, beside those of `device`, which say how it computes.
        common: the common settings.
        packages, ready, said: see `WebUI`. SD.Next answers before it has loaded the model, and ignores until then that
            settings name another model or offload.
    """
    (data / "config.json").write_text(json.dumps({**common, **settings}))
    link = data / "extensions" / "stable-fast"
    link.unlink(missing_ok=True)
    if extension:
        link.symlink_to(CHECKOUT, target_is_directory=True)
    models, log = data / "models", data / ("with.log" if extension else "without.log")
    places = ["--data-dir", str(data), "--models-dir", str(models), "--log", str(data / "host.log")]
    # diffusers reads it at its import, before SD.Next sets it
    cache = f"HF_HUB_CACHE={models / 'huggingface'}"
    # as in its webui.sh: when it is restarted it looks for "python" there
    path = f"PATH={Path(python()).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = ["env", cache, path, python(), "launch.py", *shlex.split(f"{WITHOUT_NETWORK} {device} {flags}"), *places]
    return WebUI(command, Path(HOST or ""), log, ready=ready, packages=packages, said=said)


def model_loaded(webui: WebUI, seconds: float = 120) -> None:
    """Wait for the model: the server answers before it is there, and before all of its routes are."""
    until = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < until:
        with contextlib.suppress(urllib.error.HTTPError):
            if webui.get("/sdapi/v1/checkpoint").get("type"):
                return
        time.sleep(0.2)
    raise RuntimeError(f"no model was loaded:\n{webui.tail()}")


def call(webui: WebUI, path: str) -> None:
    """POST to a route that takes no body, and may answer with none."""
    with urllib.request.urlopen(urllib.request.Request(webui.url + path, b"", method="POST"), timeout=PATIENCE * 120):
        pass


def do(webui: WebUI, kind: str, payload: Any) -> list[str]:
    """The images of a step.

    Args:
        kind: "txt2img", "img2img" or "control"; "options", if `payload` are settings; "call", if it is a path;
            "do", if it is a function of the WebUI that gives images.
    """
    if kind == "do":
        return list(payload(webui))
    if kind == "call":
        call(webui, payload)
        return []
    if kind == "options":
        webui.post("/sdapi/v1/options", payload)
        if "sd_model_checkpoint" in payload:
            model_loaded(webui)
        return []
    return list(webui.post(f"/sdapi/v1/{kind}", payload)["images"])


@dataclass
class Played:
    """A WebUI after a round; its images, those of the stock WebUI, and the status after each step."""

    webui: WebUI
    data: Path
    """Its data directory."""
    stock: dict[str, list[str]]
    images: dict[str, list[str]] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def before(self, name: str) -> dict[str, Any]:
        """The status before a step."""
        names = list(self.reports)
        return self.reports[names[names.index(name) - 1]]

    def gained(self, name: str, *counters: str) -> int:
        """How much counters rose in a step."""
        now, was = self.reports[name]["counters"], self.before(name)["counters"]
        return sum(now.get(c, 0) - was.get(c, 0) for c in counters)

    def ran(self, name: str) -> int:
        """How many calls plans answered in a step."""
        return self.gained(name, "replays", "eager_runs")

    def reasons(self, name: str) -> dict[str, int]:
        """Why calls of a step went to the original forward, and how many."""
        was, now = (report["reasons_since_start"] for report in (self.before(name), self.reports[name]))
        return {why: n - was.get(why, 0) for why, n in now.items() if n > was.get(why, 0)}

    def equal(self, name: str, tolerance: float = TOLERANCE) -> None:
        """Check that a step's images are those of the stock WebUI."""
        images, stock = self.images[name], self.stock[name]
        assert len(images) == len(stock) >= 1
        for image, other in zip(images, stock):
            assert difference(image, other) < tolerance

    def accelerated(self, name: str) -> None:
        """Check that plans ran in a step, that no call was bypassed, and that nothing of ours failed."""
        report = self.reports[name]
        assert self.ran(name) > 0, (self.reasons(name), report["events"][-6:])
        assert not self.reasons(name)
        assert report["last_error"] is None, report["last_error"]

    def bypassed(self, name: str, *words: str) -> None:
        """Check that no plan ran in a step, that a reason with these words says why, and nothing of ours failed."""
        assert self.ran(name) == 0
        reasons = self.reasons(name)
        assert any(all(word in reason for word in words) for reason in reasons), reasons
        assert self.reports[name]["last_error"] is None, self.reports[name]["last_error"]

    def apart(self, name: str, other: str) -> float:
        """How far the first images of two steps of the stock WebUI are from each other, of 255."""
        return difference(self.stock[name][0], self.stock[other][0])


@contextlib.contextmanager
def play(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Step],
    settings: dict[str, Any] | None = None,
    prepare: Callable[[Path], None] | None = None,
    flags: str = "",
    packages: Path | None = None,
) -> Iterator[Played]:
    """Play steps on the stock SD.Next, then on one with the extension, which stays open.

    Args:
        prepare: puts what else is needed into the data directory.
        flags, packages: see `start`.
    """
    data = make_data(tmp_path_factory)
    if prepare is not None:
        prepare(data)
    assert len({name for name, _, _ in steps}) == len(steps)
    with start(data, settings or {}, extension=False, flags=flags, packages=packages) as webui:
        model_loaded(webui)
        stock = {name: do(webui, kind, payload) for name, kind, payload in steps}
    with start(data, settings or {}, extension=True, flags=flags, packages=packages) as webui:
        model_loaded(webui)
        played = Played(webui, data, stock)
        played.reports[""] = webui.get("/sfast/v1/status")
        for name, kind, payload in steps:
            played.images[name] = do(webui, kind, payload)
            played.reports[name] = webui.get("/sfast/v1/status")
        yield played


def images_of(steps: list[Step]) -> list[str]:
    """The names of the steps that make images."""
    return [name for name, kind, _ in steps if kind not in ("options", "call")]


def playing(
    steps: list[Step], settings: dict[str, Any] | None = None, tolerance: float = TOLERANCE, **more: Any
) -> tuple[Any, Any]:
    """A module's fixture `played`, for these steps, and its test that each image is that of the stock SD.Next.

    Args:
        tolerance: of 255, mean over the image.
        more: see `play`.
    """

    @pytest.fixture(scope="module")
    def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
        with play(tmp_path_factory, steps, settings, **more) as found:
            yield found

    @pytest.mark.parametrize("name", images_of(steps))
    def test_image_equals_the_one_without_the_extension(played: Played, name: str) -> None:
        played.equal(name, tolerance)

    return played, test_image_equals_the_one_without_the_extension
