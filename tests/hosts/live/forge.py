"""What the tests of Forge Neo share: its start, and the round of pictures.

SFAST_FORGE_DIR      a WebUI that starts; nothing is written into it
SFAST_FORGE_PYTHON   its interpreter; default: venv/bin/python in it
SFAST_FORGE_FLAGS    how it computes; default: on the CPU in fp32

Checkpoints and LoRAs are made by `forge_models.py`, and lie with settings and outputs in a data directory of the test's
own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .a1111 import CHECKOUT, make_data
from .webui import WebUI

HOST = os.environ.get("SFAST_FORGE_DIR")
MARKS = [
    pytest.mark.hosts,
    pytest.mark.skipif(not HOST, reason="SFAST_FORGE_DIR names no Forge Neo"),
]
FLAGS = os.environ.get("SFAST_FORGE_FLAGS", "--cpu --force-fp32 --skip-torch-cuda-test")
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


def python() -> str:
    """The WebUI's interpreter."""
    own = Path(HOST or "") / "venv" / "bin" / "python"
    return os.environ.get("SFAST_FORGE_PYTHON") or (str(own) if own.exists() else sys.executable)


def make(folder: Path) -> Path:
    """A data directory with models and the checkout among the extensions."""
    models = folder / "made"
    command = [python(), str(CHECKOUT / "tests" / "hosts" / "live" / "forge_models.py"), str(models)]
    made = subprocess.run(command, cwd=HOST, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    data = folder / "data"
    data.mkdir()
    return make_data(data, models)


def start(data: Path, name: str, settings: dict[str, Any]) -> WebUI:
    """The WebUI with these settings, and a log of its own."""
    config = data / f"{name}.json"
    config.write_text(json.dumps({**SETTINGS, **settings}), encoding="utf-8")
    command = [*shlex.split(FLAGS), *shlex.split(WITHOUT_NETWORK)]
    command += ["--data-dir", str(data), "--ui-settings-file", str(config)]
    return WebUI([python(), "launch.py", *command], Path(HOST or ""), data / f"{name}.log")
