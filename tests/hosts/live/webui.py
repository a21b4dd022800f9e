"""A real WebUI as a child process, driven through its HTTP API.

SFAST_LIVE_PATIENCE   a factor for the time that a start and an answer may take; 1 by default, more on a busy machine
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VAE_PLANS = """
import importlib.util
import math

if importlib.util.find_spec("sfast_ext"):
    from sfast_ext.hosts import text_encoders, vae

    text_encoders.GAIN = vae.GAIN = math.inf
"""
"""An extension's script: plans of VAEs and of text encoders are made at the second call of their kind, as those of tiny
ones never pay."""

PATIENCE = float(os.environ.get("SFAST_LIVE_PATIENCE", "1"))
XFORMERS = Path(__file__).resolve().parents[2] / "xformers_standin"


class WebUI:
    """Starts a WebUI in `cwd` and stops it at the end of the `with` block.

    Args:
        command: the interpreter, the script and its flags, without the port.
        log: where its output goes; quoted when it does not come up.
        ready: the path that answers 200 when it has.
        said: what is in its output before anything may be asked of it.
        packages: a folder with packages that it finds beside its own.
    """

    def __init__(
        self,
        command: list[str],
        cwd: Path,
        log: Path,
        ready: str = "/sdapi/v1/options",
        timeout: float = 900,
        packages: Path | None = None,
        said: str = "",
    ) -> None:
        self._command, self._cwd, self._log, self._ready, self._timeout = command, cwd, log, ready, timeout
        self._packages, self._said = packages, said
        self._process: subprocess.Popen[bytes] | None = None
        self._taken: Path | None = None
        self.url = ""
        self.env: dict[str, str] = {}
        """Variables of its environment, next to those of this process."""

    def __enter__(self) -> WebUI:
        port, self._taken = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        # a tiny model gains nothing from threads, and loses much if other work shares the cores
        env.setdefault("OMP_NUM_THREADS", "1")
        # the WebUI's interpreter has packages of its own
        env.pop("PYTHONPATH", None)
        if self._packages is not None:
            env["PYTHONPATH"] = str(self._packages)
        env |= self.env
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(port)], cwd=self._cwd, env=env, stdout=log, stderr=subprocess.STDOUT
            )
        until = time.monotonic() + PATIENCE * self._timeout
        while time.monotonic() < until and self._process.poll() is None:
            if self.up():
                return self
            time.sleep(0.5)
        self.__exit__()
        raise RuntimeError(f"the WebUI did not come up:\n{self.tail()}")

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._taken is not None:
            self._taken.unlink(missing_ok=True)

    def up(self) -> bool:
        """Whether it answers."""
        if self._said not in self.log():
            return False
        try:
            self.get(self._ready)
        except OSError:
            return False
        return True

    def get(self, path: str) -> Any:
        """The JSON that a GET answers."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE * 300) as answer:
            return json.load(answer)

    def image(self, path: str) -> Image.Image:
        """The image that a GET answers."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE * 300) as answer:
            return Image.open(io.BytesIO(answer.read()))

    def post(self, path: str, payload: dict[str, Any], timeout: float = 600) -> Any:
        """The JSON that a POST of `payload` answers; None if its answer is empty."""
        request = urllib.request.Request(
            self.url + path, json.dumps(payload).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE * timeout) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read()[:2000]!r}\n{self.tail()}") from error

    def log(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        """The end of its output."""
        return self.log()[-6000:]


def _free_port() -> tuple[int, Path]:
    """A free port, and the file that keeps other tests from it while the WebUI starts, which may take minutes.

    It is one that no connection is given by itself.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        taken = Path(tempfile.gettempdir(), f"sfast-port-{port}")
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            taken.touch(exist_ok=False)
            return port, taken
    raise RuntimeError("no port is free")


def add_extension(data: Path, name: str, script: str) -> None:
    """An extension of one script, in the data directory."""
    folder = data / "extensions" / name / "scripts"
    folder.mkdir(parents=True)
    (folder / f"{name.replace('-', '_')}.py").write_text(script, encoding="utf-8")


def encoded(image: Image.Image) -> str:
    """An image as the API takes it."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def pixels(image: str) -> np.ndarray:
    """The pixels of an image that the API gave."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB"), dtype=np.float32)


def difference(a: str, b: str) -> float:
    """Mean absolute difference of two images, of 255."""
    one, other = pixels(a), pixels(b)
    assert one.shape == other.shape
    return float(np.abs(one - other).mean())


def last_plan(report: dict[str, Any]) -> dict[str, Any]:
    """The status of the UNet's plan that ran last."""
    (unet,) = [accelerator for accelerator in report["accelerators"] if accelerator["name"] == "unet"]
    assert unet["plans"], f"no plan: {report['reasons']}"
    return unet["plans"][-1]


def same_plan(plan: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two plans run the same operations on the same inputs and weights."""
    assert plan["signature"] == other["signature"], (plan["signature"], other["signature"])
    ours, theirs = plan["operations"], other["operations"]
    differ = {name: (ours.get(name, 0), theirs.get(name, 0)) for name in {**ours, **theirs}}
    differ = {name: counts for name, counts in differ.items() if counts[0] != counts[1]}
    assert not differ, f"operations and how often each plan has them: {differ}"
    assert plan["digest"] == other["digest"], "the same operations with other arguments or in another order"


def of_steps(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The accelerators of the networks that make the steps, without those of the VAE."""
    return [each for each in report["accelerators"] if each.get("steps", True)]
