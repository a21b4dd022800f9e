"""Random scenes in a real Forge or SD.Next: `python -m hosts.live.random_scenes --host neo --scenes 1000 --seed 0`.

A scene is an image with a size, number, prompt, LoRAs, sampler and kind of its own, some with ControlNets, of the
checkpoint that is loaded or of another. All are made by the WebUI alone, then by one with the extension: images must be
the same. What fails is played again by the command that it names, with the scenes of its seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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

from .a1111 import Round, apart
from .random_scene_hosts import HOSTS, Forge, Host
from .webui import WebUI

EACH = 100
"""Scenes of one seed, which a WebUI of its own makes."""
FAILED: list[str] = []
"""In the place of images that the WebUI could not make."""


def played(host: Host, webui: WebUI, steps: Round, until: float = math.inf) -> Iterator[tuple[str, list[str]]]:
    """The images of scenes by their names, of those that are begun before a time."""
    for name, route, payload in host.named(webui, steps):
        if time.monotonic() > until:
            return
        try:
            pictures = host.play(webui, route, payload)
        except RuntimeError as error:
            print(f"{name}: {str(error)[:300]}", file=sys.stderr, flush=True)
            pictures = FAILED
        if route != "options":
            yield name, pictures


@dataclass
class Found:
    """What was seen so far."""

    scenes: int = 0
    failed: int = 0
    """Of these, images that neither of the two could make."""
    worst: float = 0.0
    seeds: list[int] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Those of a further seed."""
        self.scenes, self.failed = self.scenes + other.scenes, self.failed + other.failed
        self.worst, self.seeds = max(self.worst, other.worst), sorted(self.seeds + other.seeds)
        self.counters.update(other.counters)
        self.reasons.update(other.reasons)
        self.faults += other.faults


def judge(
    found: Found, name: str, ours: list[str], stock: list[str], tolerance: float, again: str
) -> dict[str, Any] | None:
    """Compare the images of a scene; what is said of it."""
    if name == "first":
        return None
    found.scenes += 1
    said: dict[str, Any] = {"scene": name, "images": len(ours), "apart": None, "fault": False}
    if not ours and not stock:
        found.failed += 1
    elif len(ours) != len(stock):
        said["fault"] = True
        found.faults.append(f"{name}: {len(ours)} images, {len(stock)} without the extension; {again}")
    else:
        difference = said["apart"] = apart(ours, stock)
        found.worst = max(found.worst, difference)
        if not difference <= tolerance:
            said["fault"] = True
            found.faults.append(f"{name}: {difference:.2f} of 255 apart; {again}")
    return said


def compare(
    host: Host,
    data: Path,
    seed: int,
    count: int,
    again: str,
    seconds: float = math.inf,
    say: Callable[[dict[str, Any]], None] = lambda said: None,
) -> Found:
    """Play the scenes of a seed without the extension and with it.

    Args:
        again: the arguments that play them again.
        seconds: after these no further scene is begun, without the extension after a fourth of what both starts leave
            of them: to make plans takes longer than such small images.
        say: told of each scene as it is judged, and of the counters at the end.
    """
    found, steps, began = Found(seeds=[seed]), host.scenes(seed, count), time.monotonic()
    with host.start(data, seed, extension=False) as webui:
        host.ready(webui)
        now = time.monotonic()
        expected = dict(played(host, webui, steps, now + (seconds - 2 * (now - began)) / 4))
    with host.start(data, seed, extension=True) as webui:
        host.ready(webui)
        for name, pictures in played(host, webui, steps, began + seconds):
            if name not in expected:
                break
            if said := judge(found, name, pictures, expected[name], host.tolerance, again):
                say(said)
        status = webui.get("/sfast/v1/status")
    found.counters.update(status["counters"])
    found.reasons.update(status["reasons_since_start"])
    if status["last_error"] is not None:
        found.faults.append(f"{status['last_error']}; {again}")
    say({"seed": seed, **{name: status[name] for name in ("counters", "reasons_since_start", "last_error")}})
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
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="a line of JSON is added for each scene")
    options = parser.parse_args(given)
    host, began, found = HOSTS[options.host], time.monotonic(), Found()
    if options.card is not None and isinstance(host, Forge):
        host.card = options.card

    def tell() -> None:
        told = {"host": host.name, "flags": host.flags, "card_gib": options.card, **vars(found)}
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
            try:
                return compare(host, data, seed, count, again, options.seconds, say)
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
