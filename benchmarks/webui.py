"""Seconds for a picture in a real AUTOMATIC1111 WebUI, with this checkout as an extension and without.

    SFAST_A1111_DIR=... python -m benchmarks.webui --json benchmarks/results/webui-h200.json

Two WebUIs on one GPU, each with its model loaded, make the same pictures in turns, through the API: a request's whole
time, with text model, sampling, VAE and PNG. Weights are random, as many as SD 1.5 has, unless a checkpoint is named.
Where the WebUI is and by what it runs is told as for `tests/hosts`, see `tests/hosts/a1111.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sfast_ext import cli
from sfast_ext.tools import machine

PROMPT = "a dog on a hill, morning light"
NAMES = ("stock", "extended")


def taken(webui: Any, payload: dict[str, Any]) -> tuple[float, str]:
    """Seconds that a picture took, and the picture."""
    began = time.perf_counter()
    answer = webui.post("/sdapi/v1/txt2img", payload)
    return time.perf_counter() - began, answer["images"][0]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both WebUIs, started one after the other, and their pictures in turns."""
    from tests.hosts import a1111
    from tests.hosts.webui import difference

    models = folder / "models"
    models.mkdir()
    if options.checkpoint is None:
        a1111.make_models(models, *([] if options.tiny else ["full"]))
        checkpoint = "tiny.safetensors" if options.tiny else "full.safetensors"
    else:
        (models / "Stable-diffusion").mkdir()
        (models / "Stable-diffusion" / options.checkpoint.name).symlink_to(options.checkpoint.resolve())
        checkpoint = options.checkpoint.name
    data = folder / "data"
    data.mkdir()
    a1111.make_data(data, models)
    width, height = options.size
    payload = {"prompt": PROMPT, "steps": options.steps, "width": width, "height": height, "sampler_name": "Euler a"}
    common = {"sd_model_checkpoint": checkpoint}
    without: dict[str, Any] = {**common, "disabled_extensions": ["stable-fast"]}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    apart = []
    with (
        a1111.start(data, "stock", without, flags=options.flags) as stock,
        a1111.start(data, "extended", {**common, "sfast_allow_cpu": options.tiny}, flags=options.flags) as extended,
    ):
        for seed in range(options.pictures + 1):
            pictures = []
            for name, webui in zip(NAMES, (stock, extended)):
                second, picture = taken(webui, {**payload, "seed": seed})
                seconds[name].append(round(second, 4))
                pictures.append(picture)
            apart.append(round(difference(*pictures), 4))
            print(f"seed {seed}: {seconds['stock'][-1]:.2f} s, {seconds['extended'][-1]:.2f} s, apart {apart[-1]}")
        status = extended.get("/sfast/v1/status")
    replays = a1111.count(status, "plans run")
    if not replays or status["last_error"]:
        print(f"no plan ran: {status['reasons']}, {status['last_error']}", file=sys.stderr)
    median = {name: statistics.median(seconds[name][1:]) for name in NAMES}
    return {
        **machine.describe(),
        "width": width,
        "height": height,
        "steps": options.steps,
        "sampler": "Euler a",
        "flags": options.flags,
        "weights": "random" if options.checkpoint is None else checkpoint,
        "first_picture_s": {name: seconds[name][0] for name in NAMES},
        "picture_s": {name: seconds[name][1:] for name in NAMES},
        "median_s": median,
        "ratio": round(median["stock"] / median["extended"], 3),
        "apart_of_255": apart,
        "plans_ran": replays,
        "reasons": status["reasons"],
        "last_error": status["last_error"],
    }


def main() -> int:
    """Print the numbers, and write them where that is asked for; 1 where no plan ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="default: random weights")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, also on a CPU: to try this out")
    parser.add_argument("--size", type=cli.size, default=(512, 512), metavar="WxH", help="default: 512x512")
    parser.add_argument("--steps", type=int, default=30, help="of the sampler, Euler a (%(default)s)")
    parser.add_argument("--pictures", type=int, default=8, help="timed, after the first (%(default)s)")
    parser.add_argument("--flags", default="--opt-sdp-attention", help="of the WebUI (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    if not os.environ.get("SFAST_A1111_DIR"):
        print("benchmarks.webui needs an AUTOMATIC1111 WebUI: SFAST_A1111_DIR names none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="sfast-") as folder:
        found = measure(options, Path(folder))
    print(f"{found['median_s']['stock']:.3f} s, {found['median_s']['extended']:.3f} s: {found['ratio']} times as fast")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["plans_ran"] and not found["last_error"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
