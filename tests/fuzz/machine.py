"""All events, and runs of them: from hypothesis, or from a seed for as long as one likes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from fuzz import (
    behaviour_events,
    fault_events,
    ground,
    keeper_events,
    package_events,
    stack_events,
    state_events,
    thread_events,
    transformer_events,
    value_events,
    weight_events,
)
from fuzz.compare import Wrong
from fuzz.ground import Ground
from fuzz.nets import STYLES, TIMESTEPS
from fuzz.world import Event, World, result
from sfast_ext import Config
from sfast_ext.plans.graph_pool import pool_of


def request(w: World, rng: random.Random) -> None:
    """What is asked for changes."""
    r = w.request = replace(w.request)
    for what in rng.sample(("size", "batch", "tokens", "timestep", "timestep", "style", "more", "strided"), 3):
        if what == "size":
            r.width, r.height = rng.choice((8, 16, 24)), rng.choice((8, 16))
        elif what == "batch":
            r.batch = rng.choice((1, 2, 3))
        elif what == "tokens":
            r.tokens = rng.choice((7, 14))
        elif what == "timestep":
            r.timestep = rng.choice(TIMESTEPS)
        elif what == "style":
            r.style = rng.choice(STYLES)
        elif what == "strided":
            r.strided = not r.strided
        else:
            r.residual, r.scale = rng.random() < 0.5, rng.choice((None, "float", "tensor"))


def request_again(w: World, rng: random.Random) -> None:
    """What was asked for some time ago; what has happened since must show."""
    if w.requests:
        w.request = rng.choice(w.requests)


def another_call(w: World, rng: random.Random) -> None:
    """Nothing happens."""


def mode(w: World, rng: random.Random) -> None:
    w.mode = rng.choice(("no_grad", "inference", "gradients", "autocast", "autocast"))
    if w.mode == "autocast" and w.dtype == w.ground.not_cast:
        w.mode = "no_grad"


def switched(w: World, rng: random.Random) -> None:
    """The switch, on and off."""
    _configure(w, replace(w.ground.calm, enabled=not w.config.enabled))


def configured(w: World, rng: random.Random) -> None:
    """Other settings."""
    _configure(w, rng.choice(w.ground.settings))


def _configure(w: World, config: Config) -> None:
    if config.check == "never":
        # nothing would keep a wrong plan away
        w.end_faults()
    w.config = config
    w.acc.configure(config)


def released(w: World, rng: random.Random) -> None:
    """Off and on again, with the same accelerator or a new one."""
    w.release()
    if w.laid_out:
        # layouts are the host's alone now, and strides can be compared once more
        w.both(_permute_in_memory)
        w.laid_out.clear()
    if rng.random() < 0.5:
        w.acc.install()
    else:
        w.put_on()


def _permute_in_memory(m: nn.Module) -> None:
    for p in m.parameters():
        p.data = torch.empty(p.shape, dtype=p.dtype, device=p.device).copy_(p.data)


def evicted(w: World, rng: random.Random) -> None:
    """Memory is short: plans go, all or one, or their graphs."""
    plans = list(w.acc.plans)
    what = rng.choice(("one", "all", "graphs") if w.ground.gpu else ("one", "all"))
    if what == "graphs":
        pool_of(w.ground.device).make_room(w.acc.report)
    elif what == "one" and plans:
        w.acc._cache.drop(rng.choice(plans))
    else:
        w.drop_plans()


def generations(w: World, rng: random.Random) -> None:
    """The host begins to tell when a generation begins, or stops doing so."""
    w.ticks = not w.ticks
    if w.ticks:
        w.acc.new_generation()
    else:
        w.acc._finder.keys._announced = w.acc._finder.keys.stale = False


def calm(w: World, rng: random.Random) -> None:
    """All is taken off and repaired, so that runs do not end up with everything patched."""
    w.end_faults()
    w.states.clear()
    for name in reversed(list(w.patches)):
        w.patches.pop(name)()
        w.foreign.discard(name)
    w.behaves_otherwise()
    _configure(w, w.ground.calm)
    w.mode, w.stream = "no_grad", None


@functools.lru_cache(maxsize=None)
def _streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    # the same for all models: each stream has workspaces of its own, and memory is measured
    return torch.cuda.Stream(), torch.cuda.Stream()


def another_stream(w: World, rng: random.Random) -> None:
    """Calls go to a stream of their own, or to the current one again."""
    w.stream = None if w.stream is not None else _streams()[0]


def streams_in_turn(w: World, rng: random.Random) -> None:
    """Calls of two sizes on two streams, with no wait in between: graphs share memory, and must not overlap."""
    first = w.request
    requests = (first, replace(first, width=8 if first.width != 8 else 16))
    for w.request in requests:
        w.check()
    drawn, ours = [], []
    for i in range(8):
        w.request = requests[i % 2]
        drawn.append(w.draw())
    w.request = first
    torch.cuda.synchronize()
    for i, (args, kwargs) in enumerate(drawn):
        with torch.cuda.stream(_streams()[i // 2 % 2]), w.calling():
            ours.append(result(w.subject, args, kwargs))
    torch.cuda.synchronize()
    for each, (args, kwargs) in zip(ours, drawn):
        with w.calling():
            theirs = result(w.twin, args, kwargs)
        w.compare(each, theirs)


OWN: dict[Event, int] = {
    request: 3, request_again: 6, another_call: 3, mode: 3, switched: 2, configured: 2, released: 4, evicted: 1,
    generations: 2, calm: 12,
}  # fmt: skip
# How often each comes, of so many as there are: most are to be such that plans outlive, or all would be captures.
ANYWHERE = {
    **OWN, **fault_events.EVENTS, **weight_events.EVENTS, **behaviour_events.EVENTS, **stack_events.EVENTS,
    **package_events.EVENTS, **value_events.EVENTS, **keeper_events.EVENTS, **state_events.EVENTS,
}  # fmt: skip
EVENTS = {**ANYWHERE, **stack_events.CPU_EVENTS, **thread_events.CPU_EVENTS}
GPU_EVENTS = {
    **ANYWHERE, **fault_events.GPU_EVENTS, another_stream: 4, streams_in_turn: 3, request: 8, configured: 6,
}  # fmt: skip
# a file knows of one device alone
_FILES = (weight_events.saved, weight_events.pickled)
PRETENDED_EVENTS = {
    **OWN, **{event: times for event, times in weight_events.EVENTS.items() if event not in _FILES},
    weight_events.memory_given_back: 8,
}  # fmt: skip
_EVENTS = {"cpu": EVENTS, "cuda": GPU_EVENTS, "pretended": PRETENDED_EVENTS}
BY_NAME = {event.__name__: event for event in (*EVENTS, *GPU_EVENTS, *transformer_events.EVENTS)}


def listed(events: dict[Event, int]) -> list[str]:
    """Their names, as often as they come."""
    return [event.__name__ for event, times in events.items() for _ in range(times)]


def play(w: World, name: str, seed: int) -> None:
    """One event and the calls that show it changed nothing but what it was to change.

    Raises:
        Wrong: it did; the message has the command that plays the same again.
    """
    w.done.append(f"{name}:{seed}")
    try:
        BY_NAME[name](w, random.Random(seed))
        w.check()
    except Exception as exc:
        raise Wrong(f"{type(exc).__name__}: {exc}\nplay it again: {w.again()}") from exc


def finish(w: World) -> None:
    """The end of a sequence: what is left behind.

    Raises:
        Wrong: it is not what an untouched model has; the message has the command that plays the same again.
    """
    try:
        w.finish()
    except Exception as exc:
        raise Wrong(f"{type(exc).__name__}: {exc}\nafter a release; play it again: {w.again()}") from exc


def sequence(seed: int, events: int, on: Ground, kind: str = "small") -> list[tuple[str, int]]:
    """The events of a seed, for a model of this kind."""
    rng = random.Random(seed)
    names = listed(_EVENTS[on.name])
    if kind == "transformer":
        names += listed(transformer_events.EVENTS)
    return [(rng.choice(names), rng.getrandbits(32)) for _ in range(events)]


def run(kind: str, seed: int, events: Iterable[tuple[str, int]], on: Ground = ground.CPU) -> World:
    """A sequence of events on a model of its own.

    Raises:
        Wrong: see `play` and `finish`.
    """
    w = World(kind, seed, on)
    try:
        for name, each in events:
            play(w, name, each)
    except Wrong:
        w.undo()
        raise
    finish(w)
    return w
