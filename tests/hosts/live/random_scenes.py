"""Random scenes in a real WebUI: `python -m hosts.live.random_scenes --host neo --scenes 1000 --seed 0`.

A scene is an image with a size, number, prompt, LoRAs, sampler and kind of its own, some with ControlNets, of the
checkpoint that is loaded or of another. All are made by the WebUI alone, then by one with the extension: images must be
the same. With --eight-bits both have the extension and compute in 8 bits, and --card is that of the second alone: what
is compared are half-precision weights in system memory with all weights on the GPU. Before the scenes, after the first
ones and at the end the extension is off for an image, and memory is compared. With --alone the WebUI without the
extension makes the images of these scenes on that card, and what it holds itself at these times is told. What fails is
played again by the command that it names, with the scenes of its seed.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import records

from . import random_scene_memory
from .a1111 import Round, apart
from .random_scene_draws import OURS, Host
from .random_scene_hosts import HOSTS
from .random_scene_memory import Resident
from .webui import WebUI, pixels

EACH = 100
"""Scenes of one seed, which a WebUI of its own makes."""
FAILED: list[str] = []
"""In the place of images that the WebUI could not make."""
FIRST = 8
"""Scenes after which memory is what that at the end is compared with: by then most of what a WebUI keeps is there."""
TOLD = ("counters", "reasons_since_start", "last_error")
ASIDE = ("first", "plain", "least")
"""Images that are no scenes."""
OFF: dict[str, Any] = {"sfast_enabled": False}
Held = dict[str, dict[str, Any]]
"""What a WebUI at rest holds, by the time."""


def at_rest(host: Host, when: str) -> Round:
    """Steps that switch the extension off, bring the WebUI to rest and ask for its memory, and switch it on again."""
    *to_first, plain = host.rest()
    # AUTOMATIC1111 keeps copies of the weights from a model's first LoRA on: 1.7 GB for SD 1.5
    return [
        ("", "options", OFF),
        *to_first,
        host.least(),
        plain,
        (when, random_scene_memory.ROUTE, {}),
        ("", "options", {"sfast_enabled": True}),
    ]


def with_rests(host: Host, steps: Round) -> Round:
    """Steps with what tells of memory: before them, after the first scenes and at the end."""
    numbers = [i for i, (name, route, _) in enumerate(steps) if route != "options" and name not in ASIDE]
    early = numbers[min(FIRST, len(numbers) // 2 + 1) - 1] + 1
    settings: dict[str, Any] = {}
    for _, route, payload in steps[:early]:
        settings |= payload if route == "options" else {}
    back: Round = [("", "options", settings)] if settings else []
    return [*at_rest(host, "start"), *steps[:early], *at_rest(host, "first"), *back, *steps[early:]]


def stock(steps: Round) -> Round:
    """These steps as a WebUI without the extension takes them, which does not know its settings."""
    kept = []
    for name, route, payload in steps:
        if route == "options":
            payload = {key: value for key, value in payload.items() if key not in OURS}
        if payload or route != "options":
            kept.append((name, route, payload))
    return kept


def played(
    host: Host, webui: WebUI, steps: Round, held: Held, until: float = math.inf
) -> Iterator[tuple[str, list[str]]]:
    """The images of scenes by their names, of those that are begun before a time.

    Args:
        held: gets what the WebUI holds.
    """
    for name, route, payload in host.named(webui, steps):
        if time.monotonic() > until:
            return
        if route == random_scene_memory.ROUTE:
            held[name] = random_scene_memory.asked(webui)
            continue
        try:
            images = host.play(webui, route, payload)
        except RuntimeError as error:
            print(f"{name}: {str(error)[:300]}", file=sys.stderr, flush=True)
            images = FAILED
        if route != "options":
            yield name, images


@dataclass
class Found:
    """What was seen so far."""

    scenes: int = 0
    failed: int = 0
    """Of these, images that neither of the two could make."""
    resident: int = 0
    """Scenes with images of plans whose half-precision weights were in system memory."""
    worst: float = 0.0
    distances: list[float] = field(default_factory=list)
    least: float = math.inf
    """How much a LoRA of the least weight changed."""
    seeds: list[int] = field(default_factory=list)
    memory: list[Held] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Those of a further seed."""
        self.scenes, self.failed = self.scenes + other.scenes, self.failed + other.failed
        self.resident, self.least = self.resident + other.resident, min(self.least, other.least)
        self.worst, self.seeds = max(self.worst, other.worst), sorted(self.seeds + other.seeds)
        self.distances += other.distances
        self.memory += other.memory
        self.counters.update(other.counters)
        self.reasons.update(other.reasons)
        self.faults += other.faults

    def told(self) -> dict[str, Any]:
        """For the report."""
        found = {name: value for name, value in vars(self).items() if name != "distances"}
        found["median"] = statistics.median(self.distances) if self.distances else None
        return {**found, "least": self.least if math.isfinite(self.least) else None}


def sizes_of(images: list[str]) -> list[tuple[int, ...]]:
    """Heights and widths of images."""
    return [pixels(each).shape[:2] for each in images]


def keep(folder: Path, name: str, data: Path, **images: list[str]) -> None:
    """Write the images of a scene by who made them, and what the WebUI said, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    name = name.replace("/", "-")
    for who, made in images.items():
        for number, image in enumerate(made):
            (folder / f"{name}-{number}-{who}.png").write_bytes(base64.b64decode(image))
    for log in data.glob("*.log"):
        shutil.copy(log, folder / f"{name}-{log.name}")


def judge(
    found: Found, name: str, ours: list[str], stock: list[str], tolerance: float, again: str
) -> dict[str, Any] | None:
    """Compare the images of a scene; what is said of it."""
    if name in ASIDE:
        return None
    found.scenes += 1
    difference, why = None, None
    if not ours and not stock:
        found.failed += 1
    elif len(ours) != len(stock):
        why = f"{len(ours)} images, the reference made {len(stock)}"
    elif (sizes := sizes_of(ours)) != (expected := sizes_of(stock)):
        why = f"images of {sizes}, the reference made {expected}"
    else:
        difference = apart(ours, stock)
        found.worst = max(found.worst, difference)
        found.distances.append(difference)
        if not difference <= tolerance:
            why = f"{difference:.2f} of 255 apart"
    if why is not None:
        found.faults.append(f"{name}: {why}; {again}")
    return {"scene": name, "images": len(ours), "apart": difference, "fault": why is not None}


def judge_run(host: Host, found: Found, expected: dict[str, list[str]], held: Held, again: str) -> None:
    """Judge what the whole run shows: whether it could see a wrong image, whether memory leaks, and whether what it is
    about was there at all."""
    faults = random_scene_memory.faults(held)
    if expected.get("plain") and expected.get("least"):
        found.least = apart(expected["least"], expected["plain"])
        if found.least <= host.tolerance:
            faults.append(f"a LoRA of the least weight changes {found.least:.2f} of 255: nothing wrong would be seen")
    elif "plain" in expected:
        faults.append("the image with a LoRA of the least weight was not made: nothing tells what would be seen")
    if host.eight_bits and host.card is not None and not found.resident:
        faults.append("nothing was resident: the run shows nothing")
    found.faults += [f"{fault}; {again}" for fault in faults]
    found.memory.append(held)


def compare(
    host: Host,
    data: Path,
    seed: int,
    count: int,
    again: str,
    seconds: float = math.inf,
    say: Callable[[dict[str, Any]], None] = lambda said: None,
    kept: Path | None = None,
) -> Found:
    """Play the scenes of a seed in the reference, then in the WebUI that is compared with it.

    Args:
        again: the arguments that play them again.
        seconds: after these no further scene is begun, in the reference without the extension after a fourth of what
            both starts leave of them: to make plans takes longer than such small images. In 8 bits both make them: it
            is two fifths, as weights on a small card move.
        say: told of each scene as it is judged, and of the counters at the end.
        kept: where the images and logs of faults are kept.
    """
    found, began = Found(seeds=[seed]), time.monotonic()
    steps, held, resident = with_rests(host, host.scenes(seed, count)), Held(), Resident()
    with host.start(data, seed, reference=True) as webui:
        host.ready(webui)
        now = time.monotonic()
        until = now + (seconds - 2 * (now - began)) * (0.4 if host.eight_bits else 0.25)
        expected: dict[str, list[str]] = {}
        for name, images in played(host, webui, steps if host.eight_bits else stock(steps), {}, until):
            # of the images at rest the first: SD.Next 058a7f0c may ignore LoRAs after offload *sequential* was chosen
            expected.setdefault(name, images)
    with host.start(data, seed, reference=False) as webui:
        host.ready(webui)
        for name, images in played(host, webui, steps, held, began + seconds):
            if name not in expected:
                break
            if said := judge(found, name, images, expected[name], host.tolerance, again):
                said["resident"] = resident.ran(webui.get("/sfast/v1/status"))
                found.resident += said["resident"]
                say(said)
                if said["fault"] and kept is not None:
                    keep(kept, name, data, compared=images, reference=expected[name])
        status = webui.get("/sfast/v1/status")
        # whatever time is left: this is what the run is for
        list(played(host, webui, at_rest(host, "end"), held))
    judge_run(host, found, expected, held, again)
    found.counters.update(status["counters"])
    found.reasons.update(status["reasons_since_start"])
    if status["last_error"] is not None:
        found.faults.append(f"{status['last_error']}; {again}")
    say({"seed": seed, "memory": held, **{name: status[name] for name in TOLD}})
    return found


def alone(
    host: Host, data: Path, seed: int, count: int, seconds: float, say: Callable[[dict[str, Any]], None]
) -> Found:
    """Play the scenes of a seed in the WebUI without the extension, and note what it holds. Nothing is compared."""
    found, began, held = Found(seeds=[seed]), time.monotonic(), Held()
    steps = stock(with_rests(host, host.scenes(seed, count)))
    with host.start(data, seed, reference=False) as webui:
        host.ready(webui)
        for name, images in played(host, webui, steps, held, began + seconds):
            found.scenes += name not in ASIDE
            found.failed += name not in ASIDE and not images
        list(played(host, webui, stock(at_rest(host, "end")), held))
    found.memory.append(held)
    say({"seed": seed, "memory": held})
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Play scenes; returns 1 if an image was another. What was seen until Ctrl-C is told as well."""
    parser = argparse.ArgumentParser(prog="hosts.live.random_scenes", description=__doc__)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenes; the next have the next")
    parser.add_argument("--each", type=int, default=EACH, help="scenes of one seed")
    parser.add_argument("--jobs", type=int, default=1, help="how many seeds are played at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after these no further scene is begun")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="models of several runs; made if missing")
    parser.add_argument("--card", type=float, metavar="GIB", help="memory of the card that is emulated on a GPU")
    parser.add_argument("--eight-bits", action="store_true", help="8 bits on; on the card next to the GPU as it is")
    parser.add_argument("--alone", action="store_true", help="the WebUI without the extension; nothing is compared")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the images of faults, and the WebUI's output")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="a line of JSON is added for each scene")
    options = parser.parse_args(given)
    host, began, found = HOSTS[options.host], time.monotonic(), Found()
    host.card, host.eight_bits, host.alone = options.card, options.eight_bits, options.alone

    def tell() -> None:
        told = {"host": host.name, "flags": host.flags, "card_gib": options.card, "eight_bits": options.eight_bits}
        told["alone"] = options.alone
        told |= {"tolerance": host.tolerance, **found.told()}
        told["seconds"] = round(time.monotonic() - began)
        told["core_seconds"] = round(sum(os.times()[2:4]))
        print(json.dumps(told), flush=True)
        if options.json:
            records.write(options.json, told)

    def say(said: dict[str, Any]) -> None:
        if options.lines:
            with options.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        models = options.models or Path(folder, "made")
        if not models.is_dir():
            host.make_models(models)

        def one(seed: int, count: int) -> Found:
            data = Path(folder, str(seed))
            data.mkdir()
            host.make_data(data, models)
            again = f"--host {options.host} --scenes {count} --each {options.each} --seed {seed}"
            again += f" --card {options.card:g}" if options.card else ""
            again += " --eight-bits" * options.eight_bits
            try:
                if options.alone:
                    return alone(host, data, seed, count, options.seconds, say)
                return compare(host, data, seed, count, again, options.seconds, say, options.keep)
            except (OSError, RuntimeError) as error:
                say({"seed": seed, "fault": True, "ended": str(error)[:2000]})
                return Found(seeds=[seed], faults=[f"the WebUI ended: {error}; {again}"])

        runs = [
            pool.submit(one, options.seed + number, min(options.each, options.scenes - first))
            for number, first in enumerate(range(0, options.scenes, options.each))
        ]
        try:
            for run in as_completed(runs):
                found.add(run.result())
                tell()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            tell()
    return bool(found.faults)


if __name__ == "__main__":
    sys.exit(main())
