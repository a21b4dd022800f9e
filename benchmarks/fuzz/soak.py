"""One process for minutes on end: requests, LoRA, checkpoints and the switch at random, a live preview next to them.

    python -m benchmarks.fuzz.soak --json benchmarks/results/soak.json
    python -m benchmarks.fuzz.soak --device cpu --model tiny --minutes 60

Every output is compared with what an untouched UNet gave for the same request and the same weights, and has to be the
same to the bit as long as its graph was not made anew. After a warm-up that does all there is to do, no plan may be
captured and memory has to stay where it is.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import records
from benchmarks.fuzz.memory import growth, host_mb
from benchmarks.fuzz.preview import Preview
from benchmarks.fuzz.stress import MB, MIN_EFFECT, SLACK_MB
from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import changes, machine, models

LIMIT = 0.02
HOST_SLACK_MB = 100
# calls whose checks are looked at together: each look waits for the GPU
TOGETHER = 50
STEPS = (10, 30)
VARIANTS = 2
CHECKPOINTS = 2
LORAS = 4
"""The first is none."""

# width, height, images, tokens
Request = tuple[int, int, int, int]
REQUESTS: dict[str, list[Request]] = {
    "sd15": [
        (512, 512, 1, 77), (512, 512, 1, 154), (512, 512, 4, 77), (768, 512, 1, 77), (512, 768, 2, 77),
        (640, 448, 1, 231), (448, 576, 2, 154), (768, 768, 1, 77),
    ],
    "tiny": [
        (64, 64, 1, 77), (64, 64, 1, 154), (64, 64, 3, 77), (96, 64, 1, 77), (64, 72, 2, 77), (80, 56, 1, 231),
    ],
}  # fmt: skip
UNETS = {"sd15": "sd15", "tiny": "tiny-sd15"}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="at least so long, from the start (%(default)s)")
    parser.add_argument("--calls", type=int, default=20000, help="and at least so many calls (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=machine.device().type)
    parser.add_argument("--model", choices=sorted(UNETS), default="sd15")
    parser.add_argument("--max-graphs", type=int, default=5, help="CUDA graphs kept, fewer than requests (%(default)s)")
    parser.add_argument("--every", type=float, default=10, help="seconds between two looks at memory (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(given)


@dataclass(frozen=True)
class Weights:
    """What is loaded: a checkpoint, and a LoRA in it, 0 for none."""

    checkpoint: int = 0
    lora: int = 0


class Loader:
    """Brings weights into UNets of one architecture, always to the same bits."""

    def __init__(self, unet: nn.Module) -> None:
        states = [models.random_state(unet, 1 + i) for i in range(CHECKPOINTS)]
        self.differences: list[list[torch.Tensor]] = []
        for lora in range(1, LORAS):
            generator = torch.Generator().manual_seed(lora)
            pairs = changes.targets(unet)
            self.differences.append([changes.difference(w.detach(), generator, strength=1.0) for _, w in pairs])
        names = {id(p): name for name, p in unet.named_parameters()}
        targets = [names[id(weight)] for _, weight in changes.targets(unet)]
        self.bases = [[state[name] for name in targets] for state in states]
        self.states = [{k: v.cpu() for k, v in state.items()} for state in states]

    @torch.no_grad()
    def lora(self, unet: nn.Module, weights: Weights, *, replaced: bool) -> None:
        """Another LoRA in the place of the last, as AUTOMATIC1111 or as SD.Next puts it there."""
        base = self.bases[weights.checkpoint]
        differences: Sequence[torch.Tensor | None]
        differences = self.differences[weights.lora - 1] if weights.lora else [None] * len(base)
        for (module, weight), was, difference in zip(list(changes.targets(unet)), base, differences):
            changed = was.clone() if difference is None else was + difference
            if replaced:
                module.weight = nn.Parameter(changed, requires_grad=False)  # type: ignore[assignment]
            else:
                weight.copy_(changed)

    def load(self, unet: nn.Module, weights: Weights, *, by_cpu: bool) -> None:
        """A checkpoint, and the LoRA in it."""
        load = changes.load_checkpoint_by_cpu if by_cpu else changes.load_checkpoint
        load(unet, self.states[weights.checkpoint])
        if weights.lora:
            self.lora(unet, weights, replaced=False)


@dataclass
class Seen:
    """What a request gives with some weights: the untouched UNet's output, and the accelerated one's first."""

    reference: torch.Tensor
    first: torch.Tensor
    epoch: int = -1
    """Of its request when `first` was made, see `Soak.epochs`; -1 before."""


class Soak:
    """The model, its accelerator, what it has to give and what was seen."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.started = time.perf_counter()
        self.device = torch.device(args.device)
        self.chance = random.Random(args.seed)
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.unet = models.random_unet(UNETS[args.model], dtype=dtype, device=self.device)
        self.loader = Loader(self.unet)
        self.weights = Weights()
        self.loader.load(self.unet, self.weights, by_cpu=False)
        self.requests = REQUESTS[args.model]
        self.inputs = {
            (i, variant): models.unet_inputs(
                self.unet, width, height, images, tokens=tokens, seed=variant, timestep=901 - 300 * variant
            )
            for i, (width, height, images, tokens) in enumerate(self.requests)
            for variant in range(VARIANTS)
        }
        self.seen, self.least_effect = self.references()
        self.config = Config(allow_cpu=self.device.type == "cpu", max_graphs=args.max_graphs, drop_slower=False)
        self.accelerator = accelerate(self.unet, self.config)
        self.calls = self.on_plans = self.compared_to_the_bit = self.other_bits = 0
        self.epochs: Counter[int] = Counter()
        """How often each request's plan or graph was made."""
        self.enabled = True
        self.worst = 0.0
        self.kinds: Counter[str] = Counter()
        self.pending: list[tuple[str, float, torch.Tensor]] = []
        """Checks not looked at yet: in words, the most that is allowed, a number on the GPU."""
        self.faults: list[str] = []
        self.timeline: list[dict[str, Any]] = []

    @torch.no_grad()
    def references(self) -> tuple[dict[tuple[int, int, Weights], Seen], float]:
        """What the original gives, each once, and the least that it changes with the weights."""
        seen: dict[tuple[int, int, Weights], Seen] = {}
        least = float("inf")
        twin = copy.deepcopy(self.unet)
        for checkpoint, lora in itertools.product(range(CHECKPOINTS), range(LORAS)):
            weights = Weights(checkpoint, lora)
            self.loader.load(twin, weights, by_cpu=False)
            for (request, variant), (args, kwargs) in self.inputs.items():
                output = twin(*args, **kwargs)[0]
                others = [s.reference for (r, v, _), s in seen.items() if (r, v) == (request, variant)]
                least = min([least, *(relative_error([output], [other]) for other in others)])
                seen[request, variant, weights] = Seen(output, torch.empty_like(output))
        return seen, least

    def change(self, kind: str) -> None:
        """Something that a user does between two images."""
        self.kinds[kind] += 1
        self.look()
        was = self.weights
        if "checkpoint" in kind:
            self.weights = Weights((was.checkpoint + 1) % CHECKPOINTS, self.chance.randrange(LORAS))
            self.loader.load(self.unet, self.weights, by_cpu="CPU" in kind)
        elif "lora" in kind:
            other = self.chance.choice([i for i in range(LORAS) if i != was.lora])
            self.weights = replace(was, lora=other)
            self.loader.lora(self.unet, self.weights, replaced="replaced" in kind)
        self.enabled = kind != "switched off"
        self.accelerator.configure(replace(self.config, enabled=self.enabled))

    @torch.no_grad()
    def image(self, request: int, steps: int) -> None:
        """So many calls of one request."""
        for _ in range(steps):
            variant = self.chance.randrange(VARIANTS)
            args, kwargs = self.inputs[request, variant]
            seen = self.seen[request, variant, self.weights]
            ran, made = self.ran(), self.made()
            output = self.unet(*args, **kwargs)[0]
            self.calls += 1
            self.epochs[request] += self.made() > made
            words = f"call {self.calls}, {self.requests[request]}, {self.weights}"
            reference = seen.reference.float()
            self.pending.append((words, LIMIT, (output.float() - reference).norm() / reference.norm()))
            if self.ran() > ran:
                self.on_plans += 1
                self.compare_bits(words, output, seen, self.epochs[request])
            elif self.enabled and self.timeline:
                self.faults.append(f"{words}: the original forward ran")
            if len(self.pending) >= TOGETHER:
                self.look()

    def compare_bits(self, words: str, output: torch.Tensor, seen: Seen, epoch: int) -> None:
        """Hold an output against the first of its kind."""
        if seen.epoch == epoch:
            self.compared_to_the_bit += 1
            self.pending.append((f"{words}: not the bits of the last time", 0.0, (output != seen.first).any().float()))
            return
        if seen.epoch >= 0:
            # allowed: a graph that is made anew may run other kernels
            self.other_bits += not torch.equal(output, seen.first)
        seen.first.copy_(output)
        seen.epoch = epoch

    def look(self) -> None:
        """Look at the checks of the last calls."""
        if not self.pending:
            return
        for (words, limit, _), error in zip(self.pending, torch.stack([e for *_, e in self.pending]).tolist()):
            if limit:
                self.worst = max(self.worst, error)
            if not error <= limit:
                self.faults.append(f"{words}: {error:.3g}, {limit:g} is allowed")
        self.pending.clear()

    def measure(self, preview: Preview) -> None:
        """A line of the time line."""
        self.look()
        gc.collect()
        machine.synchronise(self.device)
        gpu = self.device.type == "cuda"
        if gpu:
            # what a change of weights left in the cache is no growth
            torch.cuda.empty_cache()
        self.timeline.append(
            {
                "seconds": round(time.perf_counter() - self.started, 1),
                "calls": self.calls,
                "previews": preview.images,
                "captures": self.counter("captures"),
                "graph_captures": self.counter("graph_captures"),
                "evictions": self.counter("evictions"),
                "allocated_mb": round(torch.cuda.memory_allocated() / MB, 1) if gpu else None,
                "reserved_mb": round(torch.cuda.memory_reserved() / MB, 1) if gpu else None,
                "host_mb": host_mb(),
            }
        )
        print(", ".join(f"{k} {v}" for k, v in self.timeline[-1].items() if v is not None), file=sys.stderr, flush=True)

    def counter(self, name: str) -> int:
        """A counter of the report."""
        return self.accelerator.report.counter(name)

    def ran(self) -> int:
        """Calls that plans have answered."""
        return self.counter("replays") + self.counter("eager_runs")

    def made(self) -> int:
        """Plans and graphs that were captured."""
        return self.counter("captures") + self.counter("graph_captures")

    def warm_up(self) -> None:
        """Everything that there is to do, twice."""
        for _ in range(2):
            for request in range(len(self.requests)):
                self.image(request, 3)
            for kind in KINDS:
                self.change(kind)
                self.image(0, 3)
        self.change("nothing")
        self.look()

    def run(self, minutes: float, calls: int, every: float, preview: Preview) -> None:
        """Images at random until both are reached."""
        self.warm_up()
        self.measure(preview)
        until, next_look = self.started + 60 * minutes, time.perf_counter() + every
        while (time.perf_counter() < until or self.calls < calls) and len(self.faults) < 20:
            self.change(self.chance.choices(list(KINDS), list(KINDS.values()))[0])
            self.image(self.chance.randrange(len(self.requests)), self.chance.randint(*STEPS))
            if time.perf_counter() >= next_look:
                self.measure(preview)
                next_look = time.perf_counter() + every
        self.change("nothing")
        self.measure(preview)


# how often each comes, of a hundred
KINDS = {
    "nothing": 42, "lora in place": 24, "lora replaced": 16, "checkpoint in place": 5, "checkpoint by the CPU": 3,
    "switched off": 10,
}  # fmt: skip


def judge(soak: Soak, preview: Preview) -> tuple[dict[str, Any], list[str]]:
    """What it comes to, and what is not as it has to be, a sentence each."""
    first, last = soak.timeline[0], soak.timeline[-1]
    found: dict[str, Any] = {
        "calls": soak.calls,
        "calls_on_plans": soak.on_plans,
        "compared_to_the_bit": soak.compared_to_the_bit,
        "other_bits_after_a_new_graph": soak.other_bits,
        "worst_error": soak.worst,
        "least_effect_of_other_weights": soak.least_effect,
        "changes": dict(soak.kinds),
        "previews": preview.images,
        **{f"{name}_after_the_warm_up": last[name] - first[name] for name in ("captures", "graph_captures")},
        "evictions": last["evictions"],
        "seconds": round(time.perf_counter() - soak.started, 1),
        "memory": {name: growth(soak.timeline, name) for name in ("allocated_mb", "reserved_mb", "host_mb")},
    }
    faults = [*soak.faults, *preview.faults]
    if soak.least_effect < MIN_EFFECT * soak.worst:
        faults.append(f"other weights change an output by {soak.least_effect:.2e} only: stale ones would not be seen")
    if found["captures_after_the_warm_up"]:
        faults.append(f"{found['captures_after_the_warm_up']} plans were captured after the warm-up")
    for name in ("allocated_mb", "reserved_mb"):
        seen = found["memory"][name]
        if seen and seen["median of the last quarter"] > seen["median of the first quarter"] + SLACK_MB:
            faults.append(f"{name} went on growing: {seen}")
    host = found["memory"]["host_mb"]
    if host and host["end"] > host["after the warm-up"] + HOST_SLACK_MB:
        faults.append(f"the memory of the process went on growing: {host}")
    if not preview.images:
        faults.append("the preview made no image")
    report = soak.accelerator.report.as_dict()
    since_start = report["reasons_since_start"].items()
    faults += [f"the original forward ran {count} times: {reason}" for reason, count in since_start]
    if report["last_error"]:
        faults.append(f"error in {report['last_error']['stage']}: {report['last_error']['message']}")
    return found, faults


def main(given: Sequence[str] | None = None) -> int:
    """Run it; 1 where something is not as it has to be."""
    args = arguments(given)
    if args.device == "cpu":
        # the preview works at the same time
        torch.set_num_threads(1)
    soak = Soak(args)
    small = {"channels": 16, "size": 16} if args.model == "tiny" else {}
    with Preview(soak.device, **small) as preview:
        soak.run(args.minutes, args.calls, args.every, preview)
    found, faults = judge(soak, preview)
    soak.accelerator.release()
    if soak.device.type == "cuda":
        torch.cuda.empty_cache()
        found["allocated_mb_after_release"] = round(torch.cuda.memory_allocated() / MB, 1)
    print(json.dumps(found, indent=1))
    for fault in faults:
        print(f"FAULT {fault}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        head = {**machine.describe(), "model": args.model, "device": args.device, "config": vars(soak.config)}
        result = {**head, "seed": args.seed, "summary": found, "faults": faults, "timeline": soak.timeline}
        records.write(args.json, result)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
