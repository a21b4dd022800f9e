"""Seconds of the first image after a WebUI's start and an idle time, without the extension and with *Prepare the last
size after the start*.

    SFAST_A1111_DIR=... python -m benchmarks.webui.first_image --model sd15 --size 512x512 --json FILE

One WebUI makes images first, so that the size used last is known and caches are full. Then one for each case starts,
all at once. All are left alone for --idle seconds, and make their images one after another:

- stock: without the extension
- full: prepared, with full caches
- empty: prepared; the size used last is known, and no kernel is compiled
- off: with full caches, not prepared
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.webui.hosts import HOSTS, LARGE, Host, run
from benchmarks.webui.images import numbered, payload_of, taken
from sfast_ext import cli
from sfast_ext.tools.lib import machine

CASES = {"stock": "stock", "full": "ahead", "empty": "ahead", "off": "extended"}
"""The way of each."""
KEPT = "last_calls.json"
CACHES = {"SFAST_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}


def cached(webui: Any, folder: Path) -> Any:
    """The WebUI with caches in this folder."""
    for variable, name in CACHES.items():
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        webui.env[variable] = str(folder / name)
    return webui


def copied(case: str, full: Path, to: Path) -> Path:
    """The caches of a case, of those that are full."""
    if case in ("full", "off"):
        shutil.copytree(full, to)
    elif case == "empty":
        for file in full.rglob(KEPT):
            target = to / file.relative_to(full)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy(file, target)
    return to


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row for each round; the file that the options name is written after each."""
    host = HOSTS[options.host](folder, options)
    width, height = options.size
    rows: list[dict[str, dict[str, Any]]] = []
    found = {**machine.describe(), "host": options.host, "model": options.model, "weights": "random"}
    found |= {"size": f"{width}x{height}", "steps": options.steps, "idle_s": options.idle, "rows": rows}
    payload = payload_of(host, "txt2img", width, height, options)
    full = folder / "full"
    with cached(host.start("ahead", 0, options.flags), full) as webui:
        host.ready(webui)
        first = images(webui, payload, options)
        print(f"empty caches, at once: {first}", flush=True)
        found["empty_at_once_s"] = first
    for number in range(1, options.rounds + 1):
        rows.append(round_of(host, payload, options, folder, number))
        if options.json:
            records.write(options.json, found)
    medians = {case: statistics.median(row[case]["images_s"][0] for row in rows) for case in options.cases}
    found["first_s"] = medians
    print(f"first image, medians: {medians}", flush=True)
    if options.json:
        records.write(options.json, found)
    return found


def round_of(
    host: Host, payload: dict[str, Any], options: argparse.Namespace, folder: Path, number: int
) -> dict[str, dict[str, Any]]:
    """One start of each case."""
    cases = options.cases[number - 1 :] + options.cases[: number - 1]
    webuis = {}
    for place, case in enumerate(cases):
        caches = copied(case, folder / "full", folder / f"caches-{case}-{number}")
        webuis[case] = cached(host.start(CASES[case], 10 * number + place, options.flags), caches)
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        for webui in webuis.values():
            stack.push(webui)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda webui: host.ready(webui.__enter__()), webuis.values()))
        time.sleep(options.idle)
        jobs = {case: job(webui) for case, webui in webuis.items() if CASES[case] == "ahead"}
        for case, webui in webuis.items():
            found[case] = {"images_s": images(webui, payload, options)}
        for case, webui in webuis.items():
            if CASES[case] != "stock":
                status = webui.get("/sfast/v1/status")
                found[case] |= {"last_error": status["last_error"], "reasons": status["reasons_since_start"]}
                found[case] |= {"prepared": jobs.get(case), "captures": status["counters"].get("captures", 0)}
    for case, row in found.items():
        print(f"{case:6} {row}", flush=True)
    return found


def job(webui: Any) -> str:
    """What became of what it prepares."""
    found = webui.get("/sfast/v1/job")["job"]
    return "nothing" if found is None else str(found["state"])


def images(webui: Any, payload: dict[str, Any], options: argparse.Namespace) -> list[float]:
    """Seconds of some images, each of another prompt."""
    return [
        round(taken(webui, "txt2img", numbered(payload, "txt2img", seed, options))[0], 3)
        for seed in range(options.images)
    ]


def main() -> int:
    """Print the numbers, and write them if asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=sorted(HOSTS), default="a1111", help="the WebUI (%(default)s)")
    parser.add_argument("--model", choices=sorted(LARGE), default="sd15", help="its size (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try this out")
    parser.add_argument("--size", type=cli.size, default=(512, 512), metavar="WxH", help="of images (512x512)")
    parser.add_argument("--steps", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="seconds after the start (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each case (%(default)s)")
    parser.add_argument("--images", type=int, default=3, help="of each start (%(default)s)")
    parser.add_argument("--case", choices=sorted(CASES), action="append", dest="cases", help="all")
    parser.add_argument("--flags", default="", help="of the WebUI")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where models of random weights stay (nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    options.cases = options.cases or list(CASES)
    for name in ("checkpoint", "card"):
        setattr(options, name, None)
    options.vae_plans_at_once, options.batch, options.another_prompt = False, 1, True
    found = run(options, measure)
    return int(any(case.get("last_error") for row in found["rows"] for case in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
