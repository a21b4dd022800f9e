"""Where the time of one replay goes: by kind of operation, held against what the GPU reaches.

    python -m benchmarks.profile --model sd15 --size 512x512 --json benchmarks/results/profile-sd15.json
    python -m benchmarks.profile --model sdxl --size 1024x1024 --json benchmarks/results/profile-sdxl.json
    python -m benchmarks.profile --as sm_89 --without triton    # the plan of a GeForce
    python -m benchmarks.profile --page benchmarks/results/profile-*.json     # writes docs/generated/profile.md

Which kernel belongs to which node of the rewritten graph is seen in a run node by node; how long it takes, in replays
of the CUDA graph, where the same kernels run in the same order, one after another. Where they begin before the one in
front has ended, and wait for it, that is seen in the run by nodes too, each from the end of those in front of it. The
ceilings are measured in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from benchmarks import records
from benchmarks.profile import page as profile_page
from benchmarks.profile.kinds import ARITHMETIC, KINDS, Cost, cost
from sfast_ext import cli
from sfast_ext.call_signature import flatten_call
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.backend.triton_runtime import without_triton
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.plans.plan import Plan
from sfast_ext.plans.register_machine import plan_mode
from sfast_ext.tools import bench
from sfast_ext.tools.lib import Unavailable, engines, machine, models, rates, trace, ways
from sfast_ext.tools.text import significant

# back to back in one recording; the first of them is not counted
REPLAYS = 6
ROUNDS = 5
NODE = "node "
LOST = "of no node"
# kernels that may have another name in the replay than in the run by nodes, before their order is doubted
RENAMED = 0.1
TOP = 25
OPERATIONS = 40


class _Costs(fx.Interpreter):
    """Runs a graph and notes what each node costs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.costs: dict[str, Cost] = {}
        self._node = ""

    def run_node(self, n: fx.Node) -> Any:
        self._node = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call_function(target, args, kwargs)
        self.costs[self._node] = cost(target, args, kwargs, out)
        return out


class _Ranges(fx.Interpreter):
    """Runs a graph, each node in a range of the profiler that has its name."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with record_function(f"{NODE}{n.name}"):
            return super().run_node(n)


class Subject:
    """The plan of one call, and the ways to run it that are recorded."""

    def __init__(
        self, model: str, width: int, height: int, images: int, device: torch.device, way: ways.Way = ways.OURS
    ) -> None:
        self.device = device
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        unet = bench.make_unet(model, dtype=getattr(torch, way.dtype) if way.dtype else dtype, device=device)
        engine = way.start(way.model(unet))
        assert isinstance(engine, ways.Ours)
        self.engine = engine
        args, kwargs = models.unet_inputs(unet, width, height, images)
        self.engine.start(args, kwargs)
        for _ in range(3):
            self.engine.call()
        remark = self.engine.remark()
        if remark:
            raise RuntimeError(remark)
        self.plan: Plan = list(self.engine.accelerator.plans.values())[-1]
        self._inputs = list(self.plan._inputs) or flatten_call(args, kwargs, device).tensors(device)

    def costs(self) -> dict[str, Cost]:
        runner = _Costs(self.plan._graph_module)
        with plan_mode(self.device):
            runner.run(*self._inputs)
        return runner.costs

    def by_nodes(self) -> None:
        with plan_mode(self.device):
            _Ranges(self.plan._graph_module).run(*self._inputs)

    def replay(self) -> torch.Tensor:
        if self.plan.graph is None:
            with plan_mode(self.device):
                return self.plan._function(*self._inputs)[0]
        pool = pool_of(self.device)
        with pool.lock:
            pool.begin_use()
            self.plan.graph.graph.replay()
            pool.end_use()
            return self.plan.graph.outputs[0]

    def replays(self) -> None:
        for _ in range(REPLAYS):
            self.replay()


def analyse(events: Sequence[trace.Event], costs: Mapping[str, Cost], ceilings: Mapping[str, float]) -> dict[str, Any]:
    """What a recording of `replays` and `nodes` says."""
    launched, replayed = trace.of_call(events, "nodes"), trace.of_call(events, "replays")
    names, told = trace.attribute(events, launched, NODE)
    nodes = [name[len(NODE) :] if name is not None else None for name in names]
    each, rest = divmod(len(replayed), REPLAYS)
    runs = [replayed[i * each : (i + 1) * each] for i in range(1, REPLAYS)] if each and not rest else []
    renamed = sum(a.name != b.name for a, b in zip(launched, runs[0])) if runs else 0
    gaps = _gaps(runs)
    overlap = gaps["gaps_ms"] is not None and gaps["gaps_ms"] < 0
    same = bool(runs) and each == len(launched) and renamed <= RENAMED * each and not overlap
    if same:
        durations = [statistics.median(run[i].duration for run in runs) for i in range(each)]
    else:
        durations = _one_after_another(launched)
    found = _Sums(launched, nodes, durations, costs, ceilings)
    return {
        "durations_from": f"the median of {len(runs)} replays" if same else "the run by nodes",
        "kernels_overlap": overlap,
        "kernels_renamed_in_the_replay": renamed,
        "launched": {"by_nodes": trace.count(launched), "by_a_replay": trace.count(runs[0]) if runs else None},
        "attributed_by": told,
        **gaps,
        "kinds": found.kinds(),
        "operations": found.operations(),
        "kernels": found.kernels(),
    }


def _one_after_another(launched: Sequence[trace.Event]) -> list[float]:
    """Microseconds of each, from the end of those in front of it where it began earlier and waited for them."""
    durations, ended = [], 0.0
    for event in launched:
        durations.append(max(0.0, event.end - max(event.start, ended)))
        ended = max(ended, event.end)
    return durations


def _gaps(runs: Sequence[Sequence[trace.Event]]) -> dict[str, float | None]:
    """Milliseconds that kernels and copies of a replay take, and between them."""
    if not runs:
        return {"kernels_ms": None, "span_ms": None, "gaps_ms": None}
    work = [sum(event.duration for event in run) for run in runs]
    span = [max(event.end for event in run) - run[0].start for run in runs]
    gaps = [whole - busy for whole, busy in zip(span, work)]
    values = {"kernels_ms": work, "span_ms": span, "gaps_ms": gaps}
    return {name: round(statistics.median(each) / 1e3, 4) for name, each in values.items()}


class _Sums:
    """Times of kernels, added up by what they belong to."""

    def __init__(
        self,
        launched: Sequence[trace.Event],
        nodes: Sequence[str | None],
        durations: Sequence[float],
        costs: Mapping[str, Cost],
        ceilings: Mapping[str, float],
    ) -> None:
        self._costs, self._ceilings = costs, ceilings
        self._of_node: dict[str, list[tuple[trace.Event, float]]] = defaultdict(list)
        self._lost: list[tuple[trace.Event, float]] = []
        self._names: dict[str, list[float]] = defaultdict(list)
        self._kinds_of: dict[str, Counter[str]] = defaultdict(Counter)
        for event, node, duration in zip(launched, nodes, durations):
            belongs = node if node in costs else None
            (self._of_node[belongs] if belongs is not None else self._lost).append((event, duration))
            self._names[event.name].append(duration)
            self._kinds_of[event.name][costs[belongs].kind if belongs is not None else LOST] += 1

    def kinds(self) -> list[dict[str, Any]]:
        """A row for each kind that has kernels, and one for kernels that belong to no node where there are any."""
        groups: dict[str, list[str]] = defaultdict(list)
        for node in self._of_node:
            groups[self._costs[node].kind].append(node)
        rows = [{"kind": kind, **self._row(groups[kind], kind)} for kind in KINDS if kind in groups]
        if self._lost:
            rows.append({"kind": LOST, "ms": _ms(self._lost), **_counts(self._lost)})
        return rows

    def operations(self) -> list[dict[str, Any]]:
        """A row for each operation on operands of one shape, those that take longest together first."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for node in self._of_node:
            groups[self._costs[node].operation, self._costs[node].shapes].append(node)
        rows = []
        for (operation, shapes), nodes in groups.items():
            kind = self._costs[nodes[0]].kind
            rows.append({"operation": operation, "shapes": shapes, "kind": kind, **self._row(nodes, kind)})
        return sorted(rows, key=lambda row: -row["ms"])[:OPERATIONS]

    def kernels(self) -> list[dict[str, Any]]:
        """The kernels that take longest, by their names."""
        rows = [
            {
                "name": name,
                "kinds": dict(self._kinds_of[name].most_common()),
                "count": len(taken),
                "ms": round(sum(taken) / 1e3, 4),
            }
            for name, taken in self._names.items()
        ]
        return sorted(rows, key=lambda row: -float(str(row["ms"])))[:TOP]

    def _row(self, nodes: Sequence[str], kind: str) -> dict[str, Any]:
        launched = [pair for node in nodes for pair in self._of_node[node]]
        ms = _ms(launched)
        flops, moved = (sum(getattr(self._costs[node], what) for node in nodes) for what in ("flops", "bytes"))
        matrix, copy = self._ceilings["matrix_tflops"], self._ceilings["copy_tb_s"]
        floor = sum(max(self._costs[n].flops / matrix, self._costs[n].bytes / copy) for n in nodes) / rates.TERA
        # none of their own where they ended within what was in front of them
        tflops, tb = (rates.per_second(work, ms) if ms else 0.0 for work in (flops, moved))
        arithmetic = kind in ARITHMETIC
        return {
            "ms": round(ms, 4),
            "nodes": len(nodes),
            **_counts(launched),
            "gflop": round(flops / 1e9, 3),
            "gb": round(moved / 1e9, 4),
            "tflops": round(tflops, 2),
            "tb_s": round(tb, 3),
            "ceiling": f"{matrix:.0f} TFLOP/s" if arithmetic else f"{copy:.2f} TB/s",
            "fraction_of_ceiling": round(tflops / matrix if arithmetic else tb / copy, 3),
            "least_ms": round(1e3 * floor, 4),
        }


def _ms(launched: Sequence[tuple[trace.Event, float]]) -> float:
    return sum(duration for _, duration in launched) / 1e3


def _counts(launched: Sequence[tuple[trace.Event, float]]) -> dict[str, int]:
    kernels, copies = trace.count(event for event, _ in launched)
    return {"kernels": kernels, "copies": copies}


def _times(calls: Mapping[str, engines.Call], device: torch.device) -> dict[str, list[float]]:
    clock = engines.Clock(device)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name] += clock.times(call, 4)
    return taken


@torch.no_grad()
def measure(
    model: str, width: int, height: int, images: int, device: torch.device, way: ways.Way = ways.OURS
) -> dict[str, Any]:
    """The profile of one call, as JSON can carry.

    Raises:
        Unavailable: the GPU cannot pass for the one that is asked for.
    """
    with ways.passing_for(way.capability), contextlib.nullcontext() if way.triton else without_triton():
        return _measure(model, width, height, images, device, way)


def _measure(model: str, width: int, height: int, images: int, device: torch.device, way: ways.Way) -> dict[str, Any]:
    subject = Subject(model, width, height, images, device, way)
    costs = subject.costs()
    subject.by_nodes()
    product, copy = rates.Product(device), rates.Copy(device)
    calls: dict[str, engines.Call] = {
        "call": subject.engine.call,
        "replay": subject.replay,
        "product": product,
        "copy": copy,
    }
    taken = _times(calls, device)
    ceilings = {"matrix_tflops": rates.tera(product, taken["product"]), "copy_tb_s": rates.tera(copy, taken["copy"])}
    events = trace.record({"replays": subject.replays, "nodes": subject.by_nodes}, device)
    return {
        **machine.describe(),
        "model": model,
        "width": width,
        "height": height,
        "images": images,
        **way.stack(),
        "call_ms": significant(statistics.median(taken["call"])),
        "replay_ms": significant(statistics.median(taken["replay"])),
        **{name: significant(value) for name, value in ceilings.items()},
        "flops": sum(each.flops for each in costs.values()),
        "fused": dict(subject.plan.fused),
        **analyse(events, costs, ceilings),
    }


def main(given: Sequence[str] | None = None) -> int:
    """Profile one call and write JSON, or write the page from such files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=models.NAMES + models.TINY_NAMES)
    parser.add_argument("--size", type=cli.size, metavar="WxH", help="default: 1024x1024 for SDXL, else 512x512")
    parser.add_argument("--images", type=int, default=1, help="images at once (%(default)s)")
    cli.add_stack(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile there")
    parser.add_argument(
        "--page", type=Path, nargs="+", metavar="FILE", help="write docs/generated/profile.md from these"
    )
    args = parser.parse_args(given)
    if args.page:
        profile_page.write([json.loads(file.read_text(encoding="utf-8")) for file in args.page])
        return 0
    device = machine.device()
    if device.type != "cuda":
        print("a profile needs an NVIDIA GPU", file=sys.stderr)
        return 1
    width, height = args.size or ((1024, 1024) if "sdxl" in args.model else (512, 512))
    try:
        found = measure(args.model, width, height, args.images, device, ways.asked(args))
    except Unavailable as exc:
        print(exc, file=sys.stderr)
        return 1
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        records.write(args.json, found)
    print(profile_page.section(found))
    for name, reasons in registry.declined().items():
        for reason, count in reasons.items():
            print(f"{name} declined {count} times: {reason}")
    return 0
