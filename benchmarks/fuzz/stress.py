"""One model in one process: LoRA changes, sizes and checkpoints in a row, each output checked, memory watched.

    python -m benchmarks.fuzz.stress --json benchmarks/results/stress.json
    python -m benchmarks.fuzz.stress --tiny

Every output is compared with the forward that was there before. The first round visits every size and does every
kind of change; after it no plan may be captured anew and memory has to stay where it is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import records
from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import changes, machine, models

MB = 1 << 20
# what may come and go with which graphs are at hand, before it counts as growth
SLACK_MB = 64
# outputs must change by this much with a LoRA, or the check would not see that one was missed
MIN_EFFECT = 4.0

Size = tuple[int, int]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="sd15", choices=models.NAMES)
    parser.add_argument("--tiny", action="store_true", help="the tiny shape of the model and small images")
    parser.add_argument("--lora", type=int, default=200, help="LoRA changes (%(default)s)")
    parser.add_argument("--sizes", type=int, default=30, help="sizes (%(default)s)")
    parser.add_argument("--checkpoints", type=int, default=10, help="checkpoint swaps (%(default)s)")
    parser.add_argument("--max-graphs", type=int, default=Config.max_graphs, help="CUDA graphs kept (%(default)s)")
    parser.add_argument(
        "--graph-memory-mb", type=int, default=Config.graph_memory_mb, help="their budget (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(given)


def make_sizes(count: int, tiny: bool, chance: random.Random) -> list[Size]:
    """Different sizes, of which many are odd at some level of the UNet."""
    least, greatest = (64, 128) if tiny else (384, 768)
    every = [(w, h) for w in range(least, greatest + 1, 8) for h in range(least, greatest + 1, 8)]
    return chance.sample(every, count)


class Stress:
    """The model, its accelerator and what was seen."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.float16 if device.type == "cuda" else torch.float32
        self.chance = random.Random(args.seed)
        name = f"tiny-{args.model}" if args.tiny else args.model
        self.unet = models.random_unet(name, dtype=self.dtype, device=device)
        states = [models.random_state(self.unet, seed) for seed in (1, 2)]
        self.states = [{k: v.cpu() for k, v in state.items()} for state in states]
        del states
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.config = Config(
            allow_cpu=device.type == "cpu",
            max_graphs=args.max_graphs,
            max_plans=max(Config.max_plans, args.sizes + 2),
            graph_memory_mb=args.graph_memory_mb,
            drop_slower=False,
        )
        self.accelerator = accelerate(self.unet, self.config)
        self.sizes = make_sizes(args.sizes, args.tiny, self.chance)
        self.size = self.sizes[0]
        self.base: list[tuple[nn.Module, torch.Tensor]] = []
        self.keep_base()
        self.last: dict[Size, torch.Tensor] = {}
        self.events: list[dict[str, Any]] = []
        self.loras = self.swaps = 0

    def keep_base(self) -> None:
        """What a LoRA adds to: the weights of the checkpoint."""
        self.base = [(module, weight.detach().clone()) for module, weight in changes.targets(self.unet)]

    @torch.no_grad()
    def lora(self) -> str:
        """Another LoRA in the place of the last, in turns as AUTOMATIC1111 and as SD.Next put it there."""
        self.loras += 1
        replace = self.loras % 2 == 0
        generator = torch.Generator().manual_seed(self.loras)
        for module, weight in self.base:
            changed = weight + changes.difference(weight, generator, strength=1.0)
            if replace:
                module.weight = nn.Parameter(changed, requires_grad=False)  # type: ignore[assignment]
            else:
                module.weight.copy_(changed)  # type: ignore[operator,union-attr]
        return "lora replaced" if replace else "lora in place"

    def checkpoint(self) -> str:
        """The other checkpoint, in turns in place and by way of the CPU."""
        self.swaps += 1
        by_cpu = self.swaps % 2 == 0
        load = changes.load_checkpoint_by_cpu if by_cpu else changes.load_checkpoint
        load(self.unet, self.states[self.swaps % len(self.states)])
        self.keep_base()
        return "checkpoint by the CPU" if by_cpu else "checkpoint in place"

    def next_size(self, size: Size) -> Callable[[], str]:
        """An event that goes on to a size."""

        def change() -> str:
            self.size = size
            return "size"

        return change

    @torch.no_grad()
    def event(self, change: Callable[[], str], round_: int) -> None:
        """Change something, then make a call (a new plan begins with the second), and look."""
        started = time.perf_counter()
        kind = change()
        machine.synchronise(self.device)
        changed = time.perf_counter()
        width, height = self.size
        args, kwargs = models.unet_inputs(self.unet, width, height, timestep=self.chance.randrange(1000))
        replays = self._ran()
        machine.synchronise(self.device)
        called = time.perf_counter()
        output = self.unet(*args, **kwargs)[0]
        machine.synchronise(self.device)
        first = time.perf_counter()
        if self._ran() == replays:
            output = self.unet(*args, **kwargs)[0]
        error = relative_error([output], [self.accelerator.run_original(*args, **kwargs)[0]])
        # the same inputs each time, so that what differs is what the change did
        fixed, more = models.unet_inputs(self.unet, width, height)
        now = self.unet(*fixed, **more)[0].cpu()
        effect = relative_error([now], [self.last[self.size]]) if self.size in self.last else None
        self.last[self.size] = now
        del output, args, kwargs, fixed, more
        machine.synchronise(self.device)
        gpu = self.device.type == "cuda"
        counter = self.accelerator.report.counter
        self.events.append(
            {
                "round": round_,
                "kind": kind,
                "size": f"{width}x{height}",
                "error": error,
                "effect": effect,
                "change_ms": round(1000 * (changed - started), 2),
                "call_ms": round(1000 * (first - called), 2),
                "allocated_mb": torch.cuda.memory_allocated() // MB if gpu else None,
                "reserved_mb": torch.cuda.memory_reserved() // MB if gpu else None,
                "captures": counter("captures"),
                "graph_captures": counter("graph_captures"),
                "evictions": counter("evictions"),
            }
        )

    def _ran(self) -> int:
        counter = self.accelerator.report.counter
        return counter("replays") + counter("eager_runs")

    def schedule(self, loras: int, swaps: int) -> list[list[Callable[[], str]]]:
        """The first round, and all the rest in random order."""
        first_loras, first_swaps = min(4, loras), min(2, swaps)
        order = self.chance.sample(self.sizes, len(self.sizes))
        first: list[Callable[[], str]] = [self.next_size(size) for size in order]
        first += [self.lora] * first_loras + [self.checkpoint] * first_swaps
        rest: list[Callable[[], str]] = [self.next_size(size) for size in self.sizes]
        rest += [self.lora] * (loras - first_loras) + [self.checkpoint] * (swaps - first_swaps)
        self.chance.shuffle(rest)
        return [first, rest]


def summary(stress: Stress) -> dict[str, Any]:
    """What the events come to."""
    first = [e for e in stress.events if e["round"] == 0]
    rest = [e for e in stress.events if e["round"] == 1]
    lora_effects = [e["effect"] for e in stress.events if "lora" in e["kind"] and e["effect"] is not None]
    found: dict[str, Any] = {
        "events": len(stress.events),
        "worst_error": max(e["error"] for e in stress.events),
        "least_effect_of_a_lora": min(lora_effects, default=None),
        "captures_in_the_first_round": first[-1]["captures"],
        "captures_after_it": (rest or first)[-1]["captures"] - first[-1]["captures"],
        "graph_captures": stress.events[-1]["graph_captures"],
        "evictions": stress.events[-1]["evictions"],
    }
    for kind in sorted({e["kind"] for e in rest}):
        calls = sorted(e["call_ms"] for e in rest if e["kind"] == kind)
        found[f"median ms of the first call after: {kind}"] = calls[len(calls) // 2]
    if rest and rest[0]["allocated_mb"] is not None:
        half = rest[len(rest) // 2 :]
        for name in ("allocated_mb", "reserved_mb"):
            found[name] = {
                "end of the first round": first[-1][name],
                "most in the first round": max(e[name] for e in first),
                "most in the first half of the rest": max(e[name] for e in rest[: len(rest) // 2] or rest),
                "most in the second half": max(e[name] for e in half),
                "end": rest[-1][name],
            }
    return found


def faults(stress: Stress, found: dict[str, Any]) -> list[str]:
    """What is not as it has to be, a sentence each."""
    tolerance = stress.config.tolerance
    result = [
        f"event {i}, {e['kind']} at {e['size']}: relative error {e['error']:.2e}"
        for i, e in enumerate(stress.events)
        if not e["error"] <= tolerance
    ]
    effect = found["least_effect_of_a_lora"]
    if effect is not None and effect < MIN_EFFECT * found["worst_error"]:
        result.append(f"a LoRA changed an output by {effect:.2e} only: a missed one would not have been seen")
    if found["captures_after_it"]:
        result.append(f"{found['captures_after_it']} plans were captured after the first round")
    for name in ("allocated_mb", "reserved_mb"):
        seen = found.get(name)
        if seen is None:
            continue
        before = max(seen["most in the first round"], seen["most in the first half of the rest"])
        if seen["most in the second half"] > before + SLACK_MB:
            result.append(f"{name} went on growing: {seen}")
    report = stress.accelerator.report.as_dict()
    result += [f"the original forward ran {n} times: {reason}" for reason, n in report["reasons_since_start"].items()]
    if report["last_error"]:
        result.append(f"error in {report['last_error']['stage']}: {report['last_error']['message']}")
    return result


def main(given: Sequence[str] | None = None) -> int:
    """Run it; 1 where something is not as it has to be."""
    from tqdm import tqdm

    args = arguments(given)
    started = time.perf_counter()
    stress = Stress(args, machine.device())
    rounds = stress.schedule(args.lora, args.checkpoints)
    with tqdm(total=sum(map(len, rounds)), unit="event", file=sys.stderr, mininterval=2) as progress:
        for number, round_ in enumerate(rounds):
            for change in round_:
                stress.event(change, number)
                progress.update()
    found = summary(stress)
    found["seconds"] = round(time.perf_counter() - started, 1)
    wrong = faults(stress, found)
    weights = stress.accelerator.status()["weights"]
    stress.accelerator.release()
    if stress.device.type == "cuda":
        torch.cuda.empty_cache()
        found["after_release_mb"] = {
            "allocated": torch.cuda.memory_allocated() // MB,
            "reserved": torch.cuda.memory_reserved() // MB,
        }
    print(json.dumps(found, indent=1))
    for fault in wrong:
        print(f"FAULT {fault}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        head = {**machine.describe(), "model": args.model, "tiny": args.tiny, "config": vars(stress.config)}
        result = {**head, "weights": weights, "summary": found, "faults": wrong, "events": stress.events}
        records.write(args.json, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
