"""Seconds for a picture in a real AUTOMATIC1111 WebUI, with this checkout as an extension and without.

    SFAST_A1111_DIR=... python -m benchmarks.webui --json benchmarks/results/webui-h200.json
    python -m benchmarks.webui --flags= --flags=--opt-sdp-attention --size 512x512 --size 1024x1024

For each set of flags two WebUIs on one GPU, each with its model loaded. All make the same pictures in turns, through
the API: a request's whole time, with text model, sampling, VAE and PNG. Weights are random, as many as SD 1.5 has,
unless a checkpoint is named. Where the WebUI is and by what it runs is told as for `tests/hosts/live`, see
`tests/hosts/live/a1111.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sfast_ext import cli
from sfast_ext.tools.lib import machine

PROMPT = "a dog on a hill, morning light"
NAMES = ("stock", "extended")


def taken(webui: Any, payload: dict[str, Any]) -> tuple[float, str]:
    """Seconds that a picture took, and the picture."""
    began = time.perf_counter()
    answer = webui.post("/sdapi/v1/txt2img", payload)
    return time.perf_counter() - began, answer["images"][0]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All WebUIs, started one after another, and their pictures in turns; a row for each size and set of flags."""
    from tests.hosts.live import a1111

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
    common = {"sd_model_checkpoint": checkpoint}
    settings: dict[str, dict[str, Any]] = {
        "stock": {**common, "disabled_extensions": ["stable-fast"]},
        "extended": {**common, "sfast_allow_cpu": options.tiny},
    }
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        webuis = {
            (flags, name): stack.enter_context(a1111.start(data, f"{name}-{n}", settings[name], flags=flags))
            for n, flags in enumerate(options.flags)
            for name in NAMES
        }
        for size in options.sizes:
            rows += pictures(webuis, options, *size)
    weights = "random" if options.checkpoint is None else checkpoint
    return {**machine.describe(), "steps": options.steps, "sampler": "Euler a", "weights": weights, "rows": rows}


def pictures(
    webuis: dict[tuple[str, str], Any], options: argparse.Namespace, width: int, height: int
) -> list[dict[str, Any]]:
    """The pictures of one size, all WebUIs in turns; a row for each set of flags."""
    from tests.hosts.live import a1111
    from tests.hosts.live.webui import difference

    payload = {"prompt": PROMPT, "steps": options.steps, "width": width, "height": height, "sampler_name": "Euler a"}
    before = {flags: webuis[flags, "extended"].get("/sfast/v1/status") for flags in options.flags}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in webuis}
    apart: dict[str, list[float]] = {flags: [] for flags in options.flags}
    for seed in range(options.pictures + 1):
        made = {}
        for key, webui in webuis.items():
            second, made[key] = taken(webui, {**payload, "seed": seed})
            seconds[key].append(round(second, 4))
        for flags, found in apart.items():
            found.append(round(difference(*(made[flags, name] for name in NAMES)), 4))
    rows = []
    for flags in options.flags:
        status = webuis[flags, "extended"].get("/sfast/v1/status")
        taken_by = {name: seconds[flags, name] for name in NAMES}
        median = {name: statistics.median(times[1:]) for name, times in taken_by.items()}
        rows.append(
            {
                "width": width,
                "height": height,
                "flags": flags,
                "median_s": median,
                "ratio": round(median["stock"] / median["extended"], 3),
                "first_picture_s": {name: times[0] for name, times in taken_by.items()},
                "picture_s": {name: times[1:] for name, times in taken_by.items()},
                "apart_of_255": apart[flags],
                "plans_ran": a1111.count(status, "plans run") - a1111.count(before[flags], "plans run"),
                "reasons": status["reasons_since_start"],
                "last_error": status["last_error"],
            }
        )
        print(words(rows[-1], rows[0]), flush=True)
    return rows


def words(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row in one line; where it is not the first of its size, also its seconds in those of the first."""
    median = row["median_s"]
    told = (
        f"{row['width']}x{row['height']} {row['flags'] or 'no flag'}: {median['stock']:.3f} s, with the extension"
        f" {median['extended']:.3f} s, {row['ratio']:.2f} times as fast, at most {max(row['apart_of_255'])} of 255 off"
    )
    if row is not first:
        told += f"; {median['extended'] / first['median_s']['extended']:.3f} of {first['flags'] or 'no flag'}"
    if not row["plans_ran"] or row["last_error"]:
        told += f"; NO PLAN RAN: {row['reasons']}, {row['last_error']}"
    return told


def main() -> int:
    """Print the numbers, and write them where that is asked for; 1 where no plan ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="default: random weights")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, also on a CPU: to try this out")
    parser.add_argument("--size", type=cli.size, action="append", dest="sizes", metavar="WxH", help="default: 512x512")
    parser.add_argument("--steps", type=int, default=30, help="of the sampler, Euler a (%(default)s)")
    parser.add_argument("--pictures", type=int, default=8, help="timed of each size, after the first (%(default)s)")
    parser.add_argument(
        "--flags", action="append", help="of the WebUI; each set is two WebUIs more (--opt-sdp-attention)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    options.sizes = options.sizes or [(512, 512)]
    options.flags = list(dict.fromkeys(options.flags or ["--opt-sdp-attention"]))
    if not os.environ.get("SFAST_A1111_DIR"):
        print("benchmarks.webui needs an AUTOMATIC1111 WebUI: SFAST_A1111_DIR names none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="sfast-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["plans_ran"] and not row["last_error"] for row in found["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
