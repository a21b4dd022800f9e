"""A soak: `python -m fuzz --events 20000 --seed 0`. What fails is played again by the command that it names."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eight_bit_kernels
import pytest
import torch
from foreign import hidden
from pretended_card import pretended_card

from benchmarks import records
from benchmarks.fuzz.preview import Preview
from benchmarks.fuzz.stress import MB, SLACK_MB
from fuzz import ground, machine, own_products
from fuzz.compare import Wrong
from fuzz.ground import Ground
from sfast_ext import cli
from sfast_ext.runtime import plan_builder
from sfast_ext.tools.lib.machine import describe
from sfast_ext.tools.lib.ways import card

EACH = 100
"""Events of one model; every tenth model is a real UNet, and every third has a live preview beside it on a GPU."""
PRETENDED_BYTES = 1 << 30
GROUNDS = {on.name: on for on in (ground.CPU, ground.PRETENDED)}
COUNTERS = ("captures", "graph_captures", "evictions", "out_of_memory", "replays", "eager_runs", "fallbacks", "errors")
# a library's workspaces come with the first models; growth after so many is ours
MIN_MODELS = 5
MOST_RAISED = 0.05
"""Of all calls: the share that may raise, as the original does."""
MANY_RUNS = 100
"""Runs of plans of which some have products in 8 bits, if these are asked for."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--events", type=int, default=2000)
    length.add_argument("--minutes", type=float, help="goes on for so long instead")
    length.add_argument("--play", nargs="+", metavar=("MODEL:SEED", "EVENT:SEED"), help="these events and no others")
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the next has the next")
    parser.add_argument("--model", choices=("both", "small", "wide", "tokens", "transformer", "unet"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda", "pretended"), default="cpu")
    parser.add_argument("--eight-bits", action="store_true", help="products of 8-bit integers, in half precision")
    parser.add_argument("--without", choices=("triton",), help="what no plan uses")
    parser.add_argument(
        "--as",
        dest="capability",
        type=cli.capability,
        metavar="sm_89",
        help="the card that the GPU passes for; our products and attention wherever they can be, see --model wide",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(given)


class Soak:
    """What was played, and what came of it."""

    def __init__(self, on: Ground) -> None:
        self.on = on
        self.kinds: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.seeds: list[int] = []
        self.faults: list[str] = []
        self.memory: list[dict[str, float]] = []
        self.chosen: Counter[str] = Counter()
        """Kernels that were taken by `own_products`."""
        self.real = on.name == "cuda"
        self.described = {**describe(), "device": torch.cuda.get_device_name(on.device) if self.real else on.name}
        self.started = time.perf_counter()

    def model(self, kind: str, seed: int, events: Sequence[tuple[str, int]]) -> None:
        """The events of one model, to the first that fails."""
        self.seeds.append(seed)
        beside = Preview(self.on.device, channels=16, size=16, pause=0.02) if self.real and seed % 3 == 0 else None
        with beside or contextlib.nullcontext():
            try:
                w = machine.run(kind, seed, events, self.on)
            except Wrong as exc:
                self.faults.append(str(exc))
                return
        if beside is not None:
            self.counters["previews"] += beside.images
            self.faults += [f"seed {seed}: {fault}" for fault in beside.faults]
        self.kinds.update(name for name, _ in events)
        self.counters.update(models=1, calls=w.calls, plan_runs=w.plan_runs, raised=w.raised)
        self.counters["eight_bits"] += w.eight_bits
        self.counters.update({name: w.counter(name) for name in COUNTERS})
        w.forget()
        if self.real:
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            self.memory.append({"seed": seed, "allocated_mb": allocated / MB, "reserved_mb": reserved / MB})

    def grown(self) -> str | None:
        """What the models left of their memory, if it goes on growing."""
        used = [line["allocated_mb"] for line in self.memory]
        half = len(used) // 2
        if half < MIN_MODELS or max(used[half:]) <= max(used[:half]) + SLACK_MB:
            return None
        return f"GPU memory went on growing: {max(used[:half]):.0f} MB, then {max(used[half:]):.0f} MB"

    def raising(self) -> str | None:
        """What is wrong with the events, if the original raises too often: such calls compare nothing."""
        raised, calls = self.counters["raised"], self.counters["calls"]
        if raised <= MOST_RAISED * calls:
            return None
        return f"{raised} of {calls} calls raised, with and without the accelerator: this tests nothing"

    def without_eight_bits(self) -> str | None:
        """What is wrong if plans were to have products in 8 bits, and none had."""
        runs = self.counters["plan_runs"]
        if not self.on.eight_bits or runs < MANY_RUNS or self.counters["eight_bits"]:
            return None
        return f"none of {runs} runs of plans read weights in 8 bits: this tests nothing"

    def result(self) -> dict[str, Any]:
        """What JSON says of it."""
        seconds = time.perf_counter() - self.started
        return {
            **self.described,
            "events": self.kinds.total(),
            "seeds": {"first": min(self.seeds, default=None), "last": max(self.seeds, default=None)},
            **self.counters,
            "seconds": round(seconds, 1),
            "events_by_kind": dict(sorted(self.kinds.items())),
            **({"chosen": dict(sorted(self.chosen.items()))} if self.chosen else {}),
            "memory": self.memory,
            "faults": self.faults,
        }


def write(file: Path | None, result: dict[str, Any]) -> None:
    """The result, if one is asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        records.write(file, result)


def main(given: Sequence[str] | None = None) -> int:
    """Play events and say what came of it; 1 if something failed."""
    options = arguments(given)
    torch.set_num_threads(1)
    logging.getLogger("sfast_ext").setLevel(logging.CRITICAL)
    on = ground.gpu() if options.device == "cuda" else GROUNDS[options.device]
    if options.without:
        on = ground.without_triton(on)
    if options.eight_bits:
        on = ground.with_eight_bits(on)
    if options.device == "cuda":
        # what the original computes is to be as exact as it can be
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    soak = Soak(on)
    soak.described["without"] = [options.without] if options.without else []
    with contextlib.ExitStack() as stack:
        if options.device != "cuda":
            stack.enter_context(hidden("xformers"))
        if options.device == "pretended":
            stack.enter_context(pretended_card(stack.enter_context(pytest.MonkeyPatch.context()), PRETENDED_BYTES))
        if options.eight_bits:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            # the models are small: by its model of a card no plan would have a product in 8 bits
            eight_bit_kernels.pay_everywhere(patch)
            if options.device != "cuda":
                eight_bit_kernels.available(patch)
                patch.setattr(plan_builder, "unsupported", lambda device, dtypes: None)
        if options.capability is not None:
            soak.described["as"] = card(options.capability)
            soak.chosen = stack.enter_context(own_products.everywhere(options.capability))
        play(soak, options)
    soak.faults += filter(None, [soak.grown(), soak.raising(), soak.without_eight_bits()])
    result = soak.result()
    write(options.json, result)
    print(json.dumps({k: v for k, v in result.items() if k not in ("events_by_kind", "memory")}, indent=1))
    return 1 if soak.faults else 0


def play(soak: Soak, options: argparse.Namespace) -> None:
    """Play what is asked for, to the first fault."""
    seed = options.seed
    if options.play:
        (kind, seed), *events = (each.rsplit(":", 1) for each in options.play)
        soak.model(kind, int(seed), [(name, int(each)) for name, each in events])
    else:
        until = soak.started + 60 * options.minutes if options.minutes else None
        while not soak.faults:
            left = EACH if until is not None else options.events - soak.kinds.total()
            if left <= 0 or (until is not None and time.perf_counter() >= until):
                break
            small = "tokens" if options.eight_bits else "small"
            kind = options.model if options.model != "both" else ("unet" if seed % 10 == 9 else small)
            soak.model(kind, seed, list(machine.sequence(seed, min(EACH, left), soak.on, kind)))
            # a run that is ended from outside leaves what it came to
            write(options.json, soak.result())
            print(f"\r{soak.kinds.total()} events, seed {seed}", end="", file=sys.stderr, flush=True)
            seed += 1
        print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
