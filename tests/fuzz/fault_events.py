"""Failures of ours, made on purpose: none may reach the caller."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import fx

import sfast_ext.behaviour.key
import sfast_ext.plans.plan
import sfast_ext.runtime.plan_builder
import sfast_ext.runtime.plan_finder
import sfast_ext.runtime.plan_maker
import sfast_ext.runtime.plan_runner
import sfast_ext.weights.arena
from fuzz.world import Event, World
from sfast_ext import passes
from sfast_ext.plans.graph_pool import GraphPool

# what there is to break, by the name the failure is given
STAGES: dict[str, tuple[Any, str]] = {
    "signature": (sfast_ext.runtime.plan_finder, "flatten_call"),
    "behaviour key": (sfast_ext.behaviour.key, "fingerprint"),
    "sync": (sfast_ext.weights.arena.WeightArena, "sync"),
    "adoption of weights": (sfast_ext.weights.arena, "copy_in"),
    "capture": (sfast_ext.runtime.plan_builder, "capture"),
    "packing": (sfast_ext.weights.arena.WeightArena, "pack"),
    "passes": (sfast_ext.runtime.plan_maker, "run_passes"),
    "binding": (sfast_ext.weights.arena.WeightArena, "bind"),
    "check": (sfast_ext.runtime.plan_builder, "verify_plan"),
    "plan": (sfast_ext.plans.plan.Plan, "run_eagerly"),
    "output": (sfast_ext.runtime.plan_runner, "rebuild_output"),
}
CAPTURING = "in the midst of a graph capture"
GPU_STAGES: dict[str, tuple[Any, str]] = {
    "warm-up": (sfast_ext.plans.plan.Plan, "_warm_up"),
    "graph capture": (GraphPool, "_capture"),
    CAPTURING: (sfast_ext.plans.plan.Plan, "_run_static"),
    "inputs of a replay": (sfast_ext.plans.plan.Plan, "_copy_inputs"),
    "replay": (sfast_ext.plans.plan.Plan, "replay"),
    "outputs of a replay": (sfast_ext.plans.plan.Plan, "_copy_outputs"),
}


class Injected(RuntimeError):
    """A failure made on purpose."""


def broken(w: World, rng: random.Random) -> None:
    """A stage raises, once or always, until the failures end."""
    stage = rng.choice(sorted(STAGES))
    _break(w, rng, stage, STAGES[stage], rng.choice((Injected, torch.cuda.OutOfMemoryError)))


def broken_graph(w: World, rng: random.Random) -> None:
    """Something raises that only a GPU has; out of memory most of all."""
    stage = rng.choice(sorted(GPU_STAGES))
    oom = torch.cuda.OutOfMemoryError
    _break(w, rng, stage, GPU_STAGES[stage], rng.choice((Injected, oom, oom)))


def _break(w: World, rng: random.Random, stage: str, place: tuple[Any, str], kind: Callable[[str], Exception]) -> None:
    times = rng.choice((1, 2, 10**6))
    home, name = place
    real = getattr(home, name)
    if isinstance(real, mock.Mock) or getattr(real, "injected", False):
        return

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal times
        if stage == CAPTURING and not torch.cuda.is_current_stream_capturing():
            return real(*args, **kwargs)
        times -= 1
        if times >= 0:
            if stage == CAPTURING:
                real(*args, **kwargs)
            if stage == "adoption of weights":
                # half of the work is done
                real(args[0], args[1][: len(args[1]) // 2])
            raise kind(stage)
        return real(*args, **kwargs)

    failing.injected = True  # type: ignore[attr-defined]
    _patch(w, home, name, failing)


def broken_pass(w: World, rng: random.Random) -> None:
    """One of the passes raises after it has done its work."""
    i = rng.randrange(len(passes.PASSES))
    entry = passes.PASSES[i]

    def failing(*args: Any) -> int:
        entry.function(*args)
        raise Injected(entry.name)

    changed = list(passes.PASSES)
    changed[i] = entry._replace(function=failing)
    _patch(w, passes, "PASSES", changed)


def spoil(graph: fx.Graph) -> None:
    """Half as much again of all that a graph gives."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    with graph.inserting_before(output):
        output.args = (fx.node.map_arg(output.args[0], lambda n: graph.call_function(torch.mul, (n, 1.5))),)


def wrong_plan(w: World, rng: random.Random) -> None:
    """A plan that computes something else: it must not pass its check."""
    if w.config.check == "never":
        return
    real = sfast_ext.runtime.plan_maker.run_passes

    def wrong(graph_module: Any, context: Any) -> dict[str, int]:
        counts = real(graph_module, context)
        spoil(graph_module.graph)
        return counts

    _patch(w, sfast_ext.runtime.plan_builder, "make_plan", _with(sfast_ext.runtime.plan_builder.make_plan, wrong))
    w.drop_plans()


def _with(rewritten: Callable[..., Any], run_passes: Callable[..., Any]) -> Callable[..., Any]:
    def patched(*args: Any, **options: Any) -> Any:
        with mock.patch.object(sfast_ext.runtime.plan_maker, "run_passes", run_passes):
            return rewritten(*args, **options)

    return patched


def _patch(w: World, home: Any, name: str, value: Any) -> None:
    patch = mock.patch.object(home, name, value)
    patch.start()
    # the last that came is the first to go
    w.faults.insert(0, patch.stop)


def repaired(w: World, rng: random.Random) -> None:
    """Failures end."""
    w.end_faults()


EVENTS: dict[Event, int] = {broken: 3, broken_pass: 1, wrong_plan: 1, repaired: 5}
GPU_EVENTS: dict[Event, int] = {broken_graph: 5}
