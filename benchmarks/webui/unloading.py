"""What a WebUI takes of system memory with its model unloaded, after each of some rounds.

    SFAST_A1111_DIR=... python -m benchmarks.webui.unloading --card 8 --json FILE

Two WebUIs on emulated cards, one with SDXL's UNet in 8 bits, one without the extension, both at the same time. The
start is an image by the WebUI's own code, after which the model is unloaded. A round switches the extension on, makes
images, switches it off and unloads the model again. What libraries and compilers load comes with the first round; what
a later round adds is a leak. Told are bytes that belong to no file, after freed memory was given back (`malloc_trim`).
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.webui.eight_bits import FLAGS
from benchmarks.webui.hosts import HOSTS, LARGE, Host, run
from benchmarks.webui.images import numbered, payload_of, taken
from sfast_ext import cli
from sfast_ext.tools.lib import machine

WAYS = ("eight", "stock")
ENABLED = "sfast_enabled"
RELOADS = ("a1111", "sdnext")
"""WebUIs that load a model that was unloaded only if they are asked to; a Forge does it for an image."""


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row for each way. The file that the options name is written at the end."""
    from tests.hosts.live import random_scene_memory

    host = HOSTS[options.host](folder, options)
    today, eight = FLAGS[options.host][options.card] if options.flags is None else [options.flags] * 2
    found = {**machine.describe(), "host": options.host, "model": options.model, "weights": "random"}
    found |= {"size": "x".join(map(str, options.size)), "steps": options.steps, "card": options.card}
    flags = {"eight": eight, "stock": today}
    webuis = {way: host.start(way, 0, flags[way]) for way in options.ways}
    for data in {host.data_of(way, 0) for way in options.ways}:
        random_scene_memory.add_route(data)
    with ThreadPoolExecutor() as pool:
        rows = [pool.submit(row_of, host, webuis[way], way, flags[way], options) for way in options.ways]
        found["rows"] = [row.result() for row in rows]
    if options.json:
        records.write(options.json, found)
    return found


def row_of(host: Host, webui: Any, way: str, flags: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one WebUI takes at the start and after each round, as far as it came."""
    from tests.hosts.live import random_scene_memory

    row: dict[str, Any] = {"way": way, "flags": flags, "memory": [], "images_s": []}
    webui.env["SFAST_CARD_GIB"] = str(0 if options.tiny else options.card)
    width, height = options.size
    payload = payload_of(host, "txt2img", width, height, options)

    def switch(on: bool) -> None:
        if way != "stock":
            webui.post("/sdapi/v1/options", {ENABLED: on})

    def make(number: int) -> None:
        request = numbered(payload, "txt2img", number, options)
        row["images_s"].append(round(taken(webui, "txt2img", request)[0], 2))

    def rest() -> None:
        switch(False)
        webui.post("/sdapi/v1/unload-checkpoint", {})
        row["memory"].append(random_scene_memory.asked(webui))
        if options.host in RELOADS:
            webui.post("/sdapi/v1/reload-checkpoint", {})

    try:
        with webui:
            host.ready(webui)
            switch(False)
            make(0)
            rest()
            for number in range(options.rounds):
                switch(True)
                for each in range(options.images):
                    make(1 + number * options.images + each)
                rest()
            if way != "stock":
                status = webui.get("/sfast/v1/status")
                row |= {name: status[name] for name in ("counters", "reasons_since_start", "last_error")}
    except (OSError, RuntimeError) as error:
        row["failed"] = str(error)[-2500:]
    print(words(row), flush=True)
    return row


def words(row: dict[str, Any]) -> str:
    """What came of a row, in a line."""
    taken_mb = [held["system"] >> 20 for held in row["memory"] if held["system"] is not None]
    above = [each - taken_mb[0] for each in taken_mb[1:]]
    told = f"{row['way']}: {taken_mb[:1]} MB at the start, after each round {above} MB more; images {row['images_s']} s"
    rest = {name: row[name] for name in ("counters", "reasons_since_start", "last_error", "failed") if row.get(name)}
    return f"{told}; {rest}"


def main() -> int:
    """Print the numbers, and write them if asked for; 1 if a WebUI failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=sorted(FLAGS), default="a1111", help="the WebUI (%(default)s)")
    parser.add_argument("--model", choices=sorted(LARGE), default="sdxl", help="its size (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and no card instead, to try this out")
    parser.add_argument("--card", type=int, choices=(6, 8), default=8, help="GB (%(default)s)")
    parser.add_argument("--flags", help="of the WebUI; by default those of the card")
    parser.add_argument("--way", choices=WAYS, action="append", dest="ways", help="all")
    parser.add_argument("--size", type=cli.size, default=(1024, 1024), metavar="WxH", help="of images (1024x1024)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--images", type=int, default=3, help="of each round (%(default)s)")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where models of random weights stay (nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    options.ways = options.ways or list(WAYS)
    options.checkpoint, options.vae_plans_at_once, options.batch, options.another_prompt = None, False, 1, True
    found = run(options, measure)
    return int(any(row.get("failed") or row.get("last_error") for row in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
