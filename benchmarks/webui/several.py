"""Two AUTOMATIC1111 on two GPUs: at once, and as master and worker of stable-diffusion-webui-distributed.

    SFAST_A1111_DIR=… SFAST_DISTRIBUTED_DIR=… python -m benchmarks.webui.several --json FILE

at-once: three WebUIs with the extension start together: one on the first card, with caches that no other has, and one
on each card, whose empty caches are the same. The one makes images alone, the two make the same ones at the same time.

distributed: a master on the first card gives half of each batch to its worker on the second, with the extension in both
and in none. Both make the same requests; at the end the worker is killed while it works.

Images are compared with those of the WebUI without the extension. Weights are random.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.webui.first_image import cached
from benchmarks.webui.hosts import A1111, LARGE
from benchmarks.webui.images import SAMPLER, numbered, payload_of
from sfast_ext import cli
from sfast_ext.tools.lib import machine

PARTS = ("at-once", "distributed")
ON_CPU = "--use-cpu all --no-half --skip-torch-cuda-test"
CARDS = (0, 1)
LORA = "several"
PREPARED = 2
"""Images after which a size has its plan."""


def flags(card: int, options: argparse.Namespace) -> str:
    """Those of a WebUI on one of the cards."""
    return f"{ON_CPU if options.tiny else f'--device-id {card}'} {options.flags}"


def together(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of these, each in a thread."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [each.result() for each in [pool.submit(action) for action in actions]]


def request(webui: Any, payload: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The seconds that a request took, and its answer."""
    began = time.perf_counter()
    answer = webui.post("/sdapi/v1/txt2img", payload)
    return round(time.perf_counter() - began, 3), answer


def by_seed(answer: dict[str, Any]) -> dict[int, str]:
    """The images of an answer by their seeds."""
    from tests.hosts.live.distributed import texts

    seeds = [int(found[1]) for text in texts(answer) if (found := re.search(r"Seed: (\d+)", text))]
    return dict(zip(seeds, answer["images"]))


def apart(some: dict[str, Any], others: dict[str, Any]) -> float:
    """How far the images of two answers are apart at most, of 255."""
    from tests.hosts.live.webui import difference

    a, b = by_seed(some), by_seed(others)
    assert a.keys() == b.keys(), (sorted(a), sorted(b))
    return max(round(difference(a[seed], b[seed]), 4) for seed in a)


def statuses(webuis: Sequence[Any]) -> list[dict[str, Any]]:
    """The status of each, as it is now."""
    from sfast_ext.ui.api import STATUS_KEPT_S

    time.sleep(STATUS_KEPT_S)
    return [webui.get("/sfast/v1/status") for webui in webuis]


def kept(folder: Path) -> dict[str, Any]:
    """What a folder of caches has: how many kernels in CUDA C++, and what was not written to its end."""
    files = [each for each in folder.rglob("*") if each.is_file()]
    broken = [each.name for each in files if each.name.startswith(".") and each.name != ".turn"]
    return {"kernels": sum(each.suffix == ".cubin" for each in files), "half_written": broken}


def at_once(host: A1111, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One WebUI alone, and two at the same time."""
    alone = cached(host.start("extended", 0, flags(0, options)), folder / "alone")
    pair = [cached(host.start("extended", 1 + card, flags(card, options)), folder / "pair") for card in CARDS]
    stock = host.start("stock", 0, flags(0, options))
    width, height = options.size
    payload = payload_of(host, "txt2img", width, height, options)
    seconds: dict[str, list[Any]] = {"stock": [], "alone": [], "pair": []}
    off: dict[str, list[float]] = {"alone to stock": [], "pair to alone": []}
    with contextlib.ExitStack() as stack:
        webuis = [alone, *pair, stock]
        for webui in webuis:
            stack.push(webui)
        together([webui.__enter__ for webui in webuis])
        for number in range(options.images + PREPARED):
            said = numbered(payload, "txt2img", number, options)
            second, expected = request(stock, said)
            seconds["stock"].append(second)
            second, one = request(alone, said)
            seconds["alone"].append(second)
            both = together([functools.partial(request, webui, said) for webui in pair])
            seconds["pair"].append([second for second, _ in both])
            off["alone to stock"].append(apart(one, expected))
            off["pair to alone"].append(max(apart(one, made) for _, made in both))
        measured = [] if options.tiny else measure_both(pair, options)
        reports = statuses((alone, *pair))
        found = {
            "images_s": seconds,
            "median_s": {
                "stock": statistics.median(seconds["stock"][PREPARED:]),
                "alone": statistics.median(seconds["alone"][PREPARED:]),
                "pair": [statistics.median(times[card] for times in seconds["pair"][PREPARED:]) for card in CARDS],
            },
            "apart_of_255": {name: max(each) for name, each in off.items()},
            "kept": {name: kept(folder / name) for name in ("alone", "pair")},
            "measured": measured,
            "webuis": [told(report) for report in reports],
        }
    print(f"at once: {found}", flush=True)
    return found


def measure_both(pair: Sequence[Any], options: argparse.Namespace) -> list[Any]:
    """What both have measured at the same time, and which card each measurement names."""
    size = "{}x{}".format(*options.size)
    for webui in pair:
        webui.post("/sfast/v1/measure", {"sizes": [size]})
    until = time.monotonic() + 60
    while time.monotonic() < until and any(webui.get("/sfast/v1/job")["job"]["state"] == "running" for webui in pair):
        time.sleep(0.5)
    return list(pair[0].get("/sfast/v1/measurements"))


def told(report: dict[str, Any]) -> dict[str, Any]:
    """What a status says of the card, of plans and of failures."""
    known = {name: report["environment"].get(name) for name in ("gpu", "gpu_memory_mb")}
    counters = {name: report["counters"].get(name, 0) for name in ("captures", "replays", "eager_runs", "errors")}
    return {**known, **counters, "last_error": report["last_error"], "reasons": report["reasons_since_start"]}


def write_lora(checkpoint: Path, folder: Path) -> None:
    """A LoRA of the first levels of a large checkpoint."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from tests.hosts.live import a1111_loras

    generator = torch.Generator().manual_seed(4)
    tensors: dict[str, Any] = {}
    with safe_open(checkpoint, "pt") as file:
        for name, path in a1111_loras.unet_layers().items():
            weight = file.get_tensor(f"{path}.weight").float()
            made = a1111_loras.low_rank(weight, lambda *shape: torch.randn(shape, generator=generator), 0.3)
            tensors |= {f"{name}.{part}": value for part, value in made.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / f"{LORA}.safetensors")


def steps(payload: dict[str, Any], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests to the master, by name."""
    width, height = options.size
    lora = "strong" if options.tiny else LORA
    wider = {"width": width + 128}
    changes: list[tuple[str, dict[str, Any]]] = [
        ("2 images", {"batch_size": 2}),
        ("2 images, another prompt", {"batch_size": 2}),
        ("8 images", {"batch_size": 8}),
        ("8 images again", {"batch_size": 8}),
        ("8 images once more", {"batch_size": 8}),
        ("a LoRA", {"batch_size": 2, "prompt": f"a dog <lora:{lora}:0.7>"}),
        ("its weight", {"batch_size": 2, "prompt": f"a dog <lora:{lora}:-0.4>"}),
        ("no LoRA again", {"batch_size": 2}),
        ("another size", {"batch_size": 2, **wider}),
        ("that size again", {"batch_size": 2, **wider}),
        ("that size once more", {"batch_size": 2, **wider}),
        ("3 images", {"batch_size": 3}),
    ]
    for number, (name, change) in enumerate(changes):
        yield name, {**payload, "prompt": f"a ship, {number}", "seed": 100 * number, **change}


class Pair:
    """A master and its worker, with the extension or without."""

    def __init__(self, way: str, hosts: Sequence[A1111], options: argparse.Namespace) -> None:
        self.way, self._master_host, self._options = way, hosts[0], options
        self.worker = hosts[1].start(way, 0, flags(CARDS[1], options))
        self.master: Any = None

    def make_master(self, stack: contextlib.ExitStack) -> Any:
        """The master: its configuration has the port of the worker, which runs."""
        from tests.hosts.live import distributed

        host = self._master_host
        more = distributed.add_engine(host.data, self.worker, f"distributed-{self.way}")
        host.packages = distributed.packages()
        self.master = host.start(self.way, 0, " ".join([flags(CARDS[0], self._options), *more]))
        stack.push(self.master)
        return self.master

    def plans(self) -> list[int]:
        """How many plans have run in each."""
        from tests.hosts.live import a1111

        return [a1111.count(report, "plans run") for report in statuses((self.master, self.worker))]


def over_both(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Batches over a master and its worker."""
    from tests.hosts.live import distributed

    hosts = []
    for name in ("master", "worker"):
        (folder / name).mkdir()
        hosts.append(A1111(folder / name, options))
        # a grid would be the first image of an answer
        hosts[-1].settings["return_grid"] = False
    if not options.tiny:
        models = options.models.resolve()
        write_lora(models / "Stable-diffusion" / f"{LARGE[options.model]}.safetensors", models / "Lora")
    width, height = options.size
    payload = payload_of(hosts[0], "txt2img", width, height, options)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        pairs = [Pair(way, hosts, options) for way in ("stock", "extended")]
        for pair in pairs:
            stack.push(pair.worker)
        together([pair.worker.__enter__ for pair in pairs])
        together([pair.make_master(stack).__enter__ for pair in pairs])
        before = pairs[1].plans()
        for name, said in steps(payload, options):
            made, row = {}, {"step": name, "images": said["batch_size"]}
            for pair in pairs:
                row[f"{pair.way}_s"], made[pair.way] = request(pair.master, said)
            row["apart_of_255"] = apart(made["stock"], made["extended"])
            row["by_worker"] = distributed.labelled(made["extended"])
            now = pairs[1].plans()
            row["plans_ran"], before = [some - were for some, were in zip(now, before)], now
            rows.append(row)
            print(row, flush=True)
        eight = {**payload, "batch_size": 8, "seed": 200}
        alone = {pair.way: [request(pair.worker, eight)[0] for _ in range(3)] for pair in pairs}
        print(f"8 images by one card: {alone}", flush=True)
        reports = [told(report) for report in statuses((pairs[1].master, pairs[1].worker))]
        long = {**payload, "batch_size": 8, "steps": 30 if options.tiny else 150, "seed": 900}
        killed = {
            pair.way: vars(distributed.kill(pair.master, pair.worker, long, {**payload, "batch_size": 2, "seed": 950}))
            for pair in pairs
        }
        after = told(statuses([pairs[1].master])[0])
    return {"rows": rows, "one_card_8_images_s": alone, "webuis": reports, "killed": killed, "master_after": after}


def main() -> int:
    """Print the numbers, and write them if asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", dest="parts", help="all")
    parser.add_argument("--model", choices=sorted(LARGE), default="sd15", help="its size (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU instead, to try this out")
    parser.add_argument("--size", type=cli.size, default=(512, 512), metavar="WxH", help="of images (512x512)")
    parser.add_argument("--steps", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--images", type=int, default=6, help="at once, after the first two (%(default)s)")
    parser.add_argument("--flags", default="", help="of the WebUIs, in addition to --device-id")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where models of random weights stay (nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    options.checkpoint = options.card = None
    options.vae_plans_at_once, options.batch, options.another_prompt = False, 1, True
    parts = options.parts or list(PARTS)
    needed = ["SFAST_A1111_DIR", *(["SFAST_DISTRIBUTED_DIR"] if "distributed" in parts else [])]
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        print(f"benchmarks.webui.several needs {' and '.join(missing)}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    found = {**machine.describe(), "model": options.model, "weights": "random", "steps": options.steps}
    found |= {"size": "{}x{}".format(*options.size), "sampler": SAMPLER, "flags": options.flags}
    with tempfile.TemporaryDirectory(prefix="sfast-") as name:
        folder = Path(name)
        options.models = options.models or folder / "models"
        if "at-once" in parts:
            (folder / "at-once").mkdir()
            found["at_once"] = at_once(A1111(folder / "at-once", options), options, folder / "at-once")
        if options.json:
            records.write(options.json, found)
        if "distributed" in parts:
            (folder / "distributed").mkdir()
            found["distributed"] = over_both(folder / "distributed", options)
        if options.json:
            records.write(options.json, found)
    webuis = [report for part in ("at_once", "distributed") for report in found.get(part, {}).get("webuis", [])]
    return int(any(report["last_error"] or report["errors"] for report in webuis))


if __name__ == "__main__":
    raise SystemExit(main())
