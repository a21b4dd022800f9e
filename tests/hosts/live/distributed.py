"""stable-diffusion-webui-distributed in a master's data directory, and what it answers.

SFAST_DISTRIBUTED_DIR       a checkout of it
SFAST_DISTRIBUTED_PACKAGES  a folder with the package rich, which it imports, if the WebUI's interpreter has none
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .webui import WebUI

CHECKOUT = os.environ.get("SFAST_DISTRIBUTED_DIR")
PACKAGES = os.environ.get("SFAST_DISTRIBUTED_PACKAGES")


def add_engine(data: Path, worker: WebUI, name: str = "distributed") -> list[str]:
    """Add the engine with one worker to the master's data, which others may share. The flags that it needs.

    Args:
        name: of its configuration.
    """
    assert CHECKOUT is not None
    extension = data / "extensions" / "distributed"
    shutil.copytree(CHECKOUT, extension, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    # speeds that are equal, so that it measures nothing and gives each the same share
    port = int(worker.url.rsplit(":", 1)[1])
    workers = [
        {"master": {"avg_ipm": 60.0, "master": True, "address": "localhost", "port": 7860}},
        {"worker": {"avg_ipm": 60.0, "master": False, "address": "127.0.0.1", "port": port, "state": 1}},
    ]
    measured = {"prompt": "a dog", "steps": 20, "width": 512, "height": 512, "batch_size": 1}
    config = data / f"{name}.json"
    rules = {"job_timeout": 600, "complement_production": False}
    config.write_text(json.dumps({"workers": workers, "benchmark_payload": measured, **rules}))
    return ["--distributed-config", str(config), "--distributed-debug"]


def packages() -> Path | None:
    """The folder with what it imports, if one is named."""
    return Path(PACKAGES) if PACKAGES else None


def texts(answer: dict[str, Any]) -> list[str]:
    """The infotexts of an answer."""
    return list(json.loads(answer["info"])["infotexts"])


def labelled(answer: dict[str, Any]) -> int:
    """How many images of an answer a worker has made."""
    return sum("Worker Label" in text for text in texts(answer))


@dataclass
class Killed:
    """What came of two requests, in the first of which the worker was killed."""

    images: int
    images_after: int
    labelled_after: int


def kill(master: WebUI, worker: WebUI, long: dict[str, Any], after: dict[str, Any]) -> Killed:
    """Kill the worker a second after the first of two requests to the master."""
    process = worker._process
    assert process is not None
    killer = threading.Timer(1.0, process.kill)
    killer.start()
    answer = master.post("/sdapi/v1/txt2img", long)
    killer.join()
    process.wait()
    again = master.post("/sdapi/v1/txt2img", after)
    found = Killed(len(answer["images"]), len(again["images"]), labelled(again))
    print(f"the worker was killed after 1 s: {found}")
    return found
