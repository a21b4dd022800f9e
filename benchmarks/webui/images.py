"""Seconds for an image in a real WebUI, with this checkout as an extension and without.

    SFAST_A1111_DIR=... python -m benchmarks.webui --json benchmarks/results/webui-h200.json
    SFAST_SDNEXT_DIR=... python -m benchmarks.webui --host sdnext --flags=--medvram --breakdown 3
    python -m benchmarks.webui --flags= --flags=--opt-sdp-attention --size 512x512 --size 1024x1024
    python -m benchmarks.webui --model sdxl --size 1024x1024 --kind txt2img --kind hires --breakdown 3
    SFAST_FORGE_DIR=... python -m benchmarks.webui --host forge-neo --model sdxl --size 1024x1024 --card 8

For each set of flags a WebUI for each way on one GPU, each with its model loaded. All make the same images in turns,
through the API: a request's whole time, with text model, sampling, VAE and PNG. Weights are random, as many as SD 1.5
or SDXL has, unless a checkpoint is named. Where the WebUI is and by what it runs is told as for `tests/hosts/live`, see
`a1111.py` and `sdnext.py` there. A breakdown is of further images, each of another prompt, under the profiler
(`probe.py`, `breakdown.py`). A VAE's plan is made when it pays, on a fast GPU after tens of images: with
`--vae-plans-at-once` with the second one, so that the others are as those to come. A card of less memory is emulated
for each WebUI (`small_card/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.webui import breakdown
from benchmarks.webui.hosts import HOSTS, LARGE, WAYS, Host, run
from sfast_ext import cli
from sfast_ext.tools.lib import machine

PROMPT = "a dog on a hill, morning light"
SAMPLER = "Euler a"
KINDS = ("txt2img", "hires", "img2img", "faces", "control")
CLIENT = "HTTP and API"
APART = 40
"""Numbers of images that are taken apart begin here."""
TOGETHER_S = 90.0
"""How long a run waits for those that were started with it."""


def payload_of(host: Host, kind: str, width: int, height: int, options: argparse.Namespace) -> dict[str, Any]:
    """A request."""
    said = {"prompt": PROMPT, "steps": options.steps, "width": width, "height": height, "sampler_name": SAMPLER}
    said |= {"batch_size": options.batch, "save_images": False}
    if kind in ("hires", "faces"):
        said |= host.hires
    if kind in ("img2img", "control"):
        from PIL import Image

        from tests.hosts.live.webui import encoded

        gradient = encoded(Image.linear_gradient("L").resize((width, height)).convert("RGB"))
        if kind == "img2img":
            said |= {"denoising_strength": 0.75, "init_images": [gradient]}
        else:
            unit = {"enabled": True, "image": gradient, "module": "None", "model": "control", "pixel_perfect": True}
            said["alwayson_scripts"] = {"ControlNet": {"args": [unit]}}
    return said


def numbered(payload: dict[str, Any], kind: str, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """The request of one image: its seed, if asked for its prompt, and for faces sizes that no other image has."""
    said = {**payload, "seed": number}
    if options.another_prompt:
        said["prompt"] = f"{payload['prompt']}, {number}"
    if kind == "faces":
        first, *faces = (size_of(4 * number + pass_, payload["width"], payload["height"]) for pass_ in range(4))
        said |= {"width": first[0], "height": first[1]}
        args = [",".join(f"{width}x{height}" for width, height in faces)]
        said["alwayson_scripts"] = {"sfast faces": {"args": args}}
    return said


def size_of(number: int, width: int, height: int) -> tuple[int, int]:
    """A size near this one. It repeats after 17 * 19 numbers."""
    return width + 8 * (5 * number % 17 - 8), height + 8 * (7 * number % 19 - 9)


def taken(webui: Any, kind: str, payload: dict[str, Any]) -> tuple[float, str]:
    """Seconds that an image took, and the first image."""
    began = time.perf_counter()
    answer = webui.post(f"/sdapi/v1/{'img2img' if kind == 'img2img' else 'txt2img'}", payload)
    return time.perf_counter() - began, answer["images"][0]


def taken_apart(webui: Any, kind: str, payload: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The breakdown of so many images. The profiler's own start is in one before them."""
    webui.post("/sfast-probe/start", {})
    requests = []
    for number in range(options.breakdown + 1):
        # sizes and prompts that the images before had not
        said = numbered({**payload, "prompt": f"{PROMPT}, taken apart {number}"}, kind, APART + number, options)
        began = time.time_ns()
        taken(webui, kind, said)
        requests.append(breakdown.Span(CLIENT, began, time.time_ns()))
    probed = webui.post("/sfast-probe/stop", {})
    found = []
    for request in requests[1:]:
        phases = [breakdown.Span(*phase) for phase in probed["phases"] if request.begin <= phase[1] < request.end]
        busy = [(begin, end) for begin, end in probed["busy"] if request.begin <= begin < request.end]
        found.append(breakdown.of_image([request, *phases], busy))
    return breakdown.mean(found)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All WebUIs, started at once, and their images in turns; a row for each kind, size and flags. The file that the
    options name is written after each size."""
    host = HOSTS[options.host](folder, options)
    rows: list[dict[str, Any]] = []
    weights = "random" if options.checkpoint is None else options.checkpoint.name
    described = {"host": options.host, "steps": options.steps, "sampler": SAMPLER}
    described |= {"model": options.model, "weights": weights, "batch": options.batch, "card_gib": options.card}
    described |= {"vae_plans_at_once": options.vae_plans_at_once, "another_prompt": options.another_prompt}
    described |= {"warm": options.warm}
    found = {**machine.describe(), **described, "rows": rows}
    webuis = {(flags, way): host.start(way, n, flags) for n, flags in enumerate(options.flags) for way in options.ways}
    with contextlib.ExitStack() as stack:
        for webui in webuis.values():
            stack.push(webui)
        # SD.Next takes half a minute to start
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda webui: begin(host, webui, options), webuis.values()))
        stack.enter_context(turn(options.turn))
        for kind in options.kinds:
            for size in options.sizes:
                rows += images(host, webuis, options, kind, *size)
                if options.json:
                    records.write(options.json, found)
    return found


def begin(host: Host, webui: Any, options: argparse.Namespace) -> None:
    """Start a WebUI, and wait until its model is loaded."""
    host.ready(webui.__enter__())
    if options.warm:
        taken(webui, "txt2img", {"prompt": PROMPT, "steps": 2, "width": 64, "height": 64, "sampler_name": SAMPLER})


@contextlib.contextmanager
def turn(told: str | None) -> Iterator[None]:
    """Wait until other runs that were started at the same time are ready as well, and those before this one are done.

    Args:
        told: a folder, the number of this run and how many there are, with commas between them; None if it is alone.
    """
    if told is None:
        yield
        return
    name, number, others = told.rsplit(",", 2)
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number}.ready").touch()
    until = time.monotonic() + TOGETHER_S
    while len(list(folder.glob("*.ready"))) < int(others) and time.monotonic() < until:
        time.sleep(0.1)
    # those before come first if they are ready
    time.sleep(0.3 * int(number))
    with open(folder / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def images(
    host: Host, webuis: dict[tuple[str, str], Any], options: argparse.Namespace, kind: str, width: int, height: int
) -> list[dict[str, Any]]:
    """The images of one kind and size, all WebUIs in turns; a row for each set of flags."""
    from tests.hosts.live import a1111, forge
    from tests.hosts.live.webui import difference

    payload = payload_of(host, kind, width, height, options)
    if kind == "control":
        # by another name an image is made without it
        ((_, _, payload),) = forge.named(next(iter(webuis.values())), [("", "", payload)])
    for webui in webuis.values():
        webui.post("/sfast-probe/memory", {})
    before = {flags: webuis[flags, "extended"].get("/sfast/v1/status") for flags in options.flags}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in webuis}
    apart: dict[str, list[float]] = {flags: [] for flags in options.flags}
    for seed in range(options.images + 1):
        made = {}
        for key, webui in webuis.items():
            if key[1] == "stock" and options.stock is not None and seed > options.stock:
                continue
            second, made[key] = taken(webui, kind, numbered(payload, kind, seed, options))
            seconds[key].append(round(second, 4))
        for flags, found in apart.items():
            if (flags, "stock") not in made:
                continue
            found.append(round(difference(made[flags, "stock"], made[flags, "extended"]), 4))
    rows: list[dict[str, Any]] = []
    for flags in options.flags:
        status = webuis[flags, "extended"].get("/sfast/v1/status")
        taken_by = {way: seconds[flags, way] for way in options.ways}
        median = {way: statistics.median(times[1:]) for way, times in taken_by.items()}
        row = {
            "kind": kind,
            "width": width,
            "height": height,
            "flags": flags,
            "median_s": median,
            "ratio": round(median["stock"] / median["extended"], 3),
            "first_image_s": {way: times[0] for way, times in taken_by.items()},
            "total_s": {way: round(sum(times), 3) for way, times in taken_by.items()},
            "images_s": {way: times[1:] for way, times in taken_by.items()},
            "reserved_mb": {way: _reserved(webuis[flags, way]) for way in options.ways},
            "apart_of_255": apart[flags],
            "plans_ran": a1111.count(status, "plans run") - a1111.count(before[flags], "plans run"),
            "vae_plans_ran": a1111.count(status, "vae_eager_runs") - a1111.count(before[flags], "vae_eager_runs"),
            "reasons": status["reasons_since_start"],
            "last_error": status["last_error"],
        }
        print(words(row, rows[0] if rows else row), flush=True)
        if options.breakdown:
            row["breakdown"] = {
                way: taken_apart(webuis[flags, way], kind, payload, options) for way in options.ways
            }
            for way, found in row["breakdown"].items():
                print("\n".join(breakdown.lines(way, found)), flush=True)
        rows.append(row)
    return rows


def _reserved(webui: Any) -> int:
    """MB that torch had reserved of the GPU's memory at most, since it was asked last."""
    return round(webui.post("/sfast-probe/memory", {})["bytes"] / 1e6)


def words(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row in one line; where it is not the first of its size, also its seconds in those of the first."""
    median = row["median_s"]
    told = (
        f"{row['kind']} {row['width']}x{row['height']} {row['flags'] or 'no flag'}: {median['stock']:.3f} s, with the"
        f" extension {median['extended']:.3f} s, {row['ratio']:.2f} times as fast, at most"
        f" {max(row['apart_of_255'])} of 255 off"
    )
    others = {way: seconds for way, seconds in median.items() if way not in ("stock", "extended")}
    told += "".join(f"; {seconds:.3f} s {way}" for way, seconds in others.items())
    if row["kind"] == "faces":
        told += f"; in total {row['total_s']}"
    if row is not first:
        told += f"; {median['extended'] / first['median_s']['extended']:.3f} of {first['flags'] or 'no flag'}"
    if not row["plans_ran"] or row["last_error"]:
        told += f"; NO PLAN RAN: {row['reasons']}, {row['last_error']}"
    return told


def main() -> int:
    """Print the numbers, and write them where that is asked for; 1 where no plan ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=sorted(HOSTS), default="a1111", help="the WebUI (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="default: random weights")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, also on a CPU: to try this out")
    parser.add_argument("--model", choices=sorted(LARGE), default="sd15", help="its size (%(default)s)")
    parser.add_argument(
        "--kind",
        choices=sorted(KINDS),
        action="append",
        dest="kinds",
        help="of request (txt2img); hires doubles sizes; faces (AUTOMATIC1111): hires and three inpaints after it, in "
        "sizes that never repeat; control (Forges, SD 1.5): with a ControlNet",
    )
    parser.add_argument("--card", type=float, metavar="GIB", help="memory of the card that is emulated (the GPU's own)")
    parser.add_argument("--batch", type=int, default=1, help="images at once (%(default)s)")
    parser.add_argument(
        "--way",
        choices=sorted(WAYS.keys() - {"earlier"}),
        action="append",
        dest="more",
        help="one more WebUI each: unet is without VAE and PNG, pillow without PNG, no-text without text encoders, "
        "eight with 8 bits",
    )
    earlier = "a checkout of an earlier state: one more WebUI with that (not SD.Next)"
    parser.add_argument("--earlier", type=Path, metavar="DIR", help=earlier)
    parser.add_argument("--another-prompt", action="store_true", help="for each image")
    parser.add_argument("--breakdown", type=int, default=0, metavar="N", help="images that are taken apart (none)")
    parser.add_argument("--vae-plans-at-once", action="store_true", help="with the second image, not when they pay")
    parser.add_argument("--size", type=cli.size, action="append", dest="sizes", metavar="WxH", help="default: 512x512")
    parser.add_argument("--steps", type=int, default=30, help="of the sampler, Euler a (%(default)s)")
    parser.add_argument("--images", type=int, default=8, help="timed of each size, after the first (%(default)s)")
    parser.add_argument(
        "--flags",
        action="append",
        help="of the WebUI; each set is a WebUI more for each way (AUTOMATIC1111: --opt-sdp-attention)",
    )
    parser.add_argument("--stock", type=int, metavar="N", help="of these with the WebUI alone, at most (all)")
    parser.add_argument("--warm", action="store_true", help="a small image in each WebUI before those that are timed")
    parser.add_argument("--turn", metavar="DIR,N,ALL", help="this is run N of so many that start at the same time")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where models of random weights stay (nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    options.sizes = options.sizes or [(512, 512)]
    options.kinds = list(dict.fromkeys(options.kinds or ["txt2img"]))
    more = (options.more or []) + ["earlier"] * bool(options.earlier)
    options.ways = list(dict.fromkeys(["stock", *more, "extended"]))
    options.flags = list(dict.fromkeys(options.flags or ["--opt-sdp-attention" if options.host == "a1111" else ""]))
    found = run(options, measure)
    return 0 if all(row["plans_ran"] and not row["last_error"] for row in found["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
