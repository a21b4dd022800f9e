"""Seconds of the first image's steps after a start, with and without *Prepare the last size after the start*.

    python -m benchmarks.ahead --json FILE

Each case is a process that has loaded its model and is idle for at most IDLE seconds. Processes load next to each other
and measure one after the other. Without a GPU it shows that it works. The cases:

- original: without the extension
- cold: with it, no kernel compiled yet, nothing prepared; keeps its call for the next ones
- warm: with it, kernels compiled, nothing prepared
- ahead: with it, kernels compiled, the size prepared while idle
- ahead, cold: the same with no kernel compiled yet
- interrupted: an image begins while the size is prepared
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import records
from sfast_ext import Config, accelerate, environment
from sfast_ext.hooks import Hooks
from sfast_ext.jobs import ahead
from sfast_ext.jobs.ahead import Ahead
from sfast_ext.jobs.job import Jobs
from sfast_ext.jobs.rehearsals import Rehearsals
from sfast_ext.tools.lib import models

CASES = ("cold", "original", "warm", "ahead", "ahead, cold", "interrupted")
IDLE_S = 20.0
STEPS = 4
SINCE_S = 0.4
"""Seconds after which the image of *interrupted* begins, from the begin of the preparation."""


class _Idle:
    """A host that makes nothing until an image is asked for.

    Args:
        model: a name of `models`.
    """

    HOST: ClassVar[str] = "benchmark"
    version = "0"

    def __init__(self, model: str, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        dtype = torch.float16 if self.on_gpu else torch.float32
        self.unet = models.random_unet(model, dtype=dtype, device=device)
        ahead.GPU_ALONE = self.on_gpu
        self._lock, self.waiters, self._interrupted = threading.Lock(), 0, False
        hooks = Hooks(interrupted=lambda: self._interrupted)
        self.accelerator = accelerate(self.unet, Config(allow_cpu=True), hooks=hooks)
        self.report = self.accelerator.report
        self.jobs = Jobs(self.report, self.queue, lambda: self._interrupted, self._interrupt)
        self.ahead = Ahead(self, Rehearsals(self, self.jobs), lambda: self.waiters > 0)

    def _interrupt(self) -> None:
        self._interrupted = True

    @contextlib.contextmanager
    def queue(self, _name: str = "") -> Iterator[None]:
        """As a WebUI's."""
        self.waiters += self._lock.locked()
        with self._lock:
            self.waiters = 0
            try:
                yield
            finally:
                self._interrupted = False

    def config(self) -> Any:
        """The defaults."""
        return types.SimpleNamespace(enabled=True, check="first")

    def follow_loaded(self) -> None:
        """Nothing else is loaded."""
        self.accelerator.new_generation()

    def loaded(self) -> Any:
        """The model."""
        return self.accelerator

    def name_images(self, images: int | None) -> None:
        """Not told."""

    def prompts_one_by_one(self) -> bool:
        """They are one call."""
        return False

    def prepares_ahead(self) -> bool:
        """Always."""
        return True

    def busy(self) -> bool:
        """Never."""
        return False

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def image(self, width: int, height: int) -> tuple[list[float], float]:
        """Seconds of each step, and the relative error of the last one."""
        args, kwargs = models.unet_inputs(self.unet, width, height)
        self.ahead.image_begins()
        self.accelerator.new_generation()
        took = []
        with torch.no_grad():
            for _ in range(STEPS):
                began = time.perf_counter()
                made = self.unet(*args, **kwargs)[0]
                self.synchronize()
                took.append(round(time.perf_counter() - began, 3))
            wanted = self.accelerator.run_original(*args, **kwargs)[0].float()
        self.ahead.remember()
        return took, float((made.float() - wanted).norm() / wanted.norm())


def case(name: str, model: str, width: int, height: int) -> dict[str, Any]:
    """Loads the model, says so, waits for a line, and measures."""
    idle = _Idle(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if name == "original":
        idle.accelerator.release()
    idle.synchronize()
    print("loaded", flush=True)
    if not sys.stdin.readline():
        os._exit(1)  # who has started it is gone
    began = time.perf_counter()
    found: dict[str, Any] = {}
    if name in ("ahead", "ahead, cold", "interrupted"):
        before = torch.cuda.memory_reserved()
        idle.ahead.start()
        idle.ahead.wait(ahead.QUIET_S + SINCE_S if name == "interrupted" else IDLE_S)
        status = idle.jobs.status() or {}
        found["idle_s"] = round(time.perf_counter() - began, 2)
        found["prepared"] = status.get("state", "nothing")
        found["reserved_mb"] = (torch.cuda.memory_reserved() - before) >> 20
    asked = time.perf_counter()
    with idle.queue():
        found["waited_s"] = round(time.perf_counter() - asked, 3)
        found["steps_s"], found["error"] = idle.image(width, height)
    found["captures"] = idle.report.counter("captures")
    return found


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="sd15" if torch.cuda.is_available() else "tiny-sd15")
    parser.add_argument("--size", default="512x512" if torch.cuda.is_available() else "64x64")
    parser.add_argument("--cases", default=";".join(CASES), help="with semicolons between them; the first is cold")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    if given.case:
        print(json.dumps(case(given.case, given.model, width, height)), flush=True)
        # threads that are under way are not waited for
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="sfast-ahead-") as folder:
        found = _measured(given, Path(folder))
    if given.json:
        records.write(given.json, {"gpu": environment.describe()["gpu"], "torch": torch.__version__, **found})


def _measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"model": given.model, "size": given.size, "cases": {}}
    names = given.cases.split(";")
    processes = {name: _begun(name, given, folder / ("empty" if name == "ahead, cold" else "full")) for name in names}
    for process in processes.values():
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "loaded\n":
            pass
    for name, process in processes.items():
        if name == "ahead, cold":
            # what the user's last image was is known, and nothing is compiled
            for file in (folder / "full").rglob("last_calls.json"):
                target = folder / "empty" / file.relative_to(folder / "full")
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.copy(file, target)
        out, _ = process.communicate("go\n", timeout=60)
        measured = json.loads(out.strip().splitlines()[-1]) if out.strip() else {"failed": process.returncode}
        found["cases"][name] = measured
        print(f"{name:12} {measured}", flush=True)
    return found


def _begun(name: str, given: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    for each in (folder, folder / "triton", folder / "cuda"):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
    caches = {"SFAST_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton", "CUDA_CACHE_PATH": folder / "cuda"}
    command = [sys.executable, "-m", "benchmarks.ahead", "--case", name, "--model", given.model, "--size", given.size]
    return subprocess.Popen(
        command,
        env={**os.environ, **{key: str(value) for key, value in caches.items()}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    main()
