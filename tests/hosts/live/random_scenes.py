"""Random scenes in a real Forge: `python -m hosts.live.random_scenes --host classic --scenes 2000 --seed 0`.

A scene is an image with a size, number, prompt, LoRAs, sampler and kind of its own, of the checkpoint that is loaded
or of another. All are made by the WebUI alone, then by one with the extension: images must be the same. What fails is
played again by the command that it names, with the scenes of its hundred.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.webui.hosts import small_card

from . import forge
from .a1111 import IMG2IMG, IN_FP32, IN_HALF, INIT, PLAIN, Round, apart, make_data, play
from .webui import WebUI

HOSTS = {"neo": forge.NEO, "classic": forge.CLASSIC, "forge": forge.OLD, "reforge": forge.REFORGE}
EACH = 100
"""Scenes of one seed, which a WebUI of its own makes."""
FIRST = "first"
CHECKPOINTS = ("one", "other", "three")
SIZES = ((64, 64), (64, 64), (128, 128), (72, 136), (192, 64))
SAMPLERS = ("Euler", "Euler a", "Heun", "DPM++ 2M")
LONG = "and many more words that make it longer than the length that a text model reads at once, " * 4


def scenes(seed: int, count: int, program: forge.Program = forge.NEO) -> Round:
    """Steps that a seed stands for: each is an image, before some another checkpoint is loaded."""
    # Forge fails by itself with a LoRA for another architecture
    checkpoints = CHECKPOINTS[:2] if program is forge.OLD else CHECKPOINTS
    draw = random.Random(seed)
    found: Round = []
    for number in range(count):
        if draw.random() < 0.12:
            name = draw.choice(checkpoints)
            found.append((f"to {name}", "options", {"sd_model_checkpoint": f"{name}.safetensors"}))
        found.append((f"{seed}/{number}", *_picture(draw)))
    return found


def _picture(draw: random.Random) -> tuple[str, dict[str, Any]]:
    width, height = draw.choice(SIZES)
    prompt = draw.choice(("a dog", "a ship on the sea", "a dog AND a ship:0.6", "[a dog:a ship:0.5]", LONG))
    # weak ones: stronger ones make of rounding another image
    for name in draw.sample(("strong", "second"), draw.choice((0, 0, 1, 1, 2))):
        prompt += f" <lora:{name}:{draw.choice((-0.1, 0.05, 0.1, 0.2))}>"
    payload = {**PLAIN, "prompt": prompt, "width": width, "height": height, "seed": draw.randrange(1000)}
    payload |= {
        "sampler_name": draw.choice(SAMPLERS),
        "steps": draw.randint(2, 4),
        "batch_size": draw.choice((1, 1, 2)),
    }
    payload |= {"cfg_scale": draw.choice((7.0, 7.0, 1.0)), "negative_prompt": draw.choice(("", "a cat", LONG))}
    kind = draw.random()
    if kind < 0.2:
        return "img2img", {**payload, "init_images": [INIT], "denoising_strength": 0.6}
    if kind < 0.3:
        hires = {"enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "None", "denoising_strength": 0.5}
        return "txt2img", {**payload, **hires, "hr_cfg_scale": 7.0, "hr_additional_modules": ["Use same choices"]}
    return "txt2img", payload


def played(webui: WebUI, steps: Round) -> Iterator[tuple[str, list[str]]]:
    """The images of scenes by their names."""
    for name, route, payload in steps:
        pictures = play(webui, route, payload)
        if pictures:
            yield name, pictures


@dataclass
class Found:
    """What was seen so far."""

    scenes: int = 0
    worst: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, words: str) -> None:
        self.faults.append(words)
        print(words, flush=True)


def compare(data: Path, program: forge.Program, steps: Round, again: str, found: Found, packages: Path | None) -> None:
    """Play these scenes without the extension and with it.

    Args:
        again: the arguments that play them again.
        packages: see `WebUI`.
    """
    tolerance = IN_FP32 if "fp32" in program.flags else IN_HALF
    # the first image from another differs from its repetitions by itself: Forge draws noise anew for it
    begin: Round = [("", "options", {"sd_model_checkpoint": "one.safetensors"}), (FIRST, "img2img", IMG2IMG), *steps]
    with forge.start(data, "stock", {"disabled_extensions": ["stable-fast"]}, program, packages=packages) as webui:
        expected = dict(played(webui, begin))
    with forge.start(data, "extended", {"sfast_allow_cpu": True}, program, packages=packages) as webui:
        for name, pictures in played(webui, begin):
            if name == FIRST:
                continue
            difference = apart(pictures, expected[name])
            found.scenes += 1
            found.worst = max(found.worst, difference)
            if difference > tolerance:
                found.fault(f"{name}: {difference:.2f} of 255 apart; {again}")
        status = webui.get("/sfast/v1/status")
    found.counters.update(status["counters"])
    if status["last_error"] is not None:
        found.fault(f"{status['last_error']}; {again}")


def main(given: Sequence[str] | None = None) -> int:
    """Play scenes; returns 1 if an image was another. What was seen until Ctrl-C is told as well."""
    parser = argparse.ArgumentParser(prog="hosts.live.random_scenes", description=__doc__)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--scenes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {EACH} scenes; the next have the next")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="models of several runs; made if missing")
    parser.add_argument("--card", type=float, metavar="GIB", help="memory of the card that is emulated on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    program, began, found, packages = HOSTS[options.host], time.monotonic(), Found(), small_card(options.card)

    def tell() -> None:
        told = {"host": program.name, "flags": program.flags, "card_gib": options.card, **vars(found)}
        told["seconds"] = round(time.monotonic() - began)
        print(json.dumps(told), flush=True)
        if options.json:
            records.write(options.json, told)

    with tempfile.TemporaryDirectory() as folder:
        models = options.models or Path(folder, "made")
        if not models.is_dir():
            forge.make_models(models, program)
        data = Path(folder, "data")
        data.mkdir()
        make_data(data, models)
        try:
            for first in range(0, options.scenes, EACH):
                seed, count = options.seed + first // EACH, min(EACH, options.scenes - first)
                again = f"--host {options.host} --scenes {count} --seed {seed}"
                again += f" --card {options.card:g}" if options.card else ""
                compare(data, program, scenes(seed, count, program), again, found, packages)
                tell()
        except KeyboardInterrupt:
            tell()
    return bool(found.faults)


if __name__ == "__main__":
    sys.exit(main())
