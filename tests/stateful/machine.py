"""All events, and runs of them: from hypothesis, or from a seed for as long as one likes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import sfast_ext.accelerator
import sfast_ext.plan
import sfast_ext.proof
import sfast_ext.weights
from sfast_ext import Config, passes
from stateful import behaviour_events, weight_events
from stateful.nets import STYLES, TIMESTEPS
from stateful.world import CPU, World, Wrong

# what there is to break, by the name the failure is given
STAGES: dict[str, tuple[Any, str]] = {
    "signature": (sfast_ext.accelerator, "flatten_call"),
    "behaviour key": (sfast_ext.accelerator, "fingerprint"),
    "sync": (sfast_ext.weights.WeightArena, "sync"),
    "adoption of weights": (sfast_ext.weights.WeightArena, "_adopt"),
    "capture": (sfast_ext.accelerator, "capture"),
    "packing": (sfast_ext.weights.WeightArena, "pack"),
    "passes": (sfast_ext.proof, "run_passes"),
    "binding": (sfast_ext.weights.WeightArena, "bind"),
    "check": (sfast_ext.accelerator, "prove"),
    "plan": (sfast_ext.plan.Plan, "run_eagerly"),
    "output": (sfast_ext.plan.Plan, "output"),
}


class Injected(RuntimeError):
    """A failure made on purpose."""


def request(w: World, rng: random.Random) -> None:
    """What is asked for changes."""
    r = w.request
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


def another_call(w: World, rng: random.Random) -> None:
    """Nothing happens."""


def mode(w: World, rng: random.Random) -> None:
    w.mode = rng.choice(("no_grad", "inference", "gradients", "autocast", "autocast"))
    if w.mode == "autocast" and w.dtype == torch.float64:
        w.mode = "no_grad"


def switched(w: World, rng: random.Random) -> None:
    """The switch, on and off."""
    _configure(w, Config(allow_cpu=True, enabled=not w.config.enabled))


def configured(w: World, rng: random.Random) -> None:
    """Other settings."""
    config = rng.choice((
        CPU, Config(allow_cpu=True, triton=False), Config(allow_cpu=True, cuda_graphs=False),
        Config(allow_cpu=True, max_plans=2), Config(allow_cpu=True, check="always"),
        Config(allow_cpu=True, check="never"), Config(allow_cpu=True, native=False, max_plans=1),
        Config(allow_cpu=True, tolerance=1e-12), Config(),
    ))  # fmt: skip
    _configure(w, config)


def _configure(w: World, config: Config) -> None:
    if config.check == "never":
        # nothing would keep a wrong plan away
        w.end_faults()
    w.config = config
    w.acc.configure(config)


def released(w: World, rng: random.Random) -> None:
    """Off and on again, with the same accelerator or a new one; at times with a call in between."""
    w.end_faults()
    w.acc.release()
    if rng.random() < 0.5:
        ours, theirs = w.call_both()
        if not isinstance(theirs, Exception):
            w._compare(ours, theirs, exactly=not w.laid_out)
    if rng.random() < 0.5:
        w.acc.install()
    else:
        w.put_on()


def evicted(w: World, rng: random.Random) -> None:
    """Memory is short: plans go, all or one."""
    plans = list(w.acc.plans)
    if plans and rng.random() < 0.5:
        w.acc._drop(rng.choice(plans))
    else:
        w.acc._drop_all("of this test")


def generations(w: World, rng: random.Random) -> None:
    """The host begins to tell when a generation begins, or stops doing so."""
    w.ticks = not w.ticks
    if w.ticks:
        w.acc.new_generation()
    else:
        w.acc._ticks = False


def broken(w: World, rng: random.Random) -> None:
    """A stage raises, once or always, until the failures end."""
    stage = rng.choice(sorted(STAGES))
    times = rng.choice((1, 2, 10**6))
    home, name = STAGES[stage]
    real = getattr(home, name)
    if isinstance(real, mock.Mock) or getattr(real, "injected", False):
        return

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal times
        times -= 1
        if times >= 0:
            if stage == "adoption of weights":
                # half of the work is done
                real(args[0], args[1][: len(args[1]) // 2])
            raise Injected(stage)
        return real(*args, **kwargs)

    failing.injected = True  # type: ignore[attr-defined]
    _patch(w, home, name, failing)


def broken_pass(w: World, rng: random.Random) -> None:
    """One of the passes raises after it has done its work."""
    i = rng.randrange(len(passes.PASSES))
    name, real = passes.PASSES[i]

    def failing(*args: Any) -> int:
        real(*args)
        raise Injected(name)

    changed = list(passes.PASSES)
    changed[i] = (name, failing)
    _patch(w, passes, "PASSES", changed)


def wrong_plan(w: World, rng: random.Random) -> None:
    """A plan that computes something else: it must not pass its check."""
    if w.config.check == "never":
        return
    real = sfast_ext.proof.run_passes

    def wrong(graph_module: Any, context: Any) -> dict[str, int]:
        counts = real(graph_module, context)
        forward = graph_module.forward
        graph_module.forward = lambda *leaves: [o * 1.5 for o in forward(*leaves)]
        return counts

    _patch(w, sfast_ext.accelerator, "rewritten", _with(sfast_ext.accelerator.rewritten, wrong))
    w.acc._drop_all("of this test")


def _with(rewritten: Callable[..., Any], run_passes: Callable[..., Any]) -> Callable[..., Any]:
    def patched(*args: Any) -> Any:
        with mock.patch.object(sfast_ext.proof, "run_passes", run_passes):
            return rewritten(*args)

    return patched


def _patch(w: World, home: Any, name: str, value: Any) -> None:
    patch = mock.patch.object(home, name, value)
    patch.start()
    # the last that came is the first to go
    w.faults.insert(0, patch.stop)


def repaired(w: World, rng: random.Random) -> None:
    """Failures end."""
    w.end_faults()


def calm(w: World, rng: random.Random) -> None:
    """All is taken off and repaired, so that runs do not end up with everything patched."""
    w.end_faults()
    for name in reversed(list(w.patches)):
        w.patches.pop(name)()
        w.foreign.discard(name)
    w.behaves_otherwise()
    _configure(w, CPU)
    w.mode = "no_grad"


OWN = [
    *[request] * 4, another_call, another_call, *[mode] * 4, switched, configured, configured, released, released,
    evicted, generations, broken, broken, broken_pass, wrong_plan, *[repaired] * 4, *[calm] * 12,
]  # fmt: skip
EVENTS: list[Callable[[World, random.Random], None]] = [
    *OWN, *weight_events.EVENTS, *weight_events.EVENTS, *behaviour_events.EVENTS,
]  # fmt: skip


def play(w: World, event: Callable[[World, random.Random], None], seed: int) -> None:
    """One event and the calls that show it changed nothing but what it was to change.

    Raises:
        Wrong: it did.
    """
    event(w, random.Random(seed))
    w.check()


def run(kind: str, seed: int, events: int) -> World:
    """A sequence of random events on a model of its own.

    Raises:
        Wrong: something is not as without us; the message has the events up to there.
    """
    rng = random.Random(seed)
    w = World(kind, seed)
    done: list[str] = []
    try:
        for _ in range(events):
            event, each = rng.choice(EVENTS), rng.getrandbits(32)
            done.append(f"{event.__name__}:{each}")
            play(w, event, each)
    except Exception as exc:
        raise Wrong(f"{kind}, seed {seed}, after {' '.join(done)}: {type(exc).__name__}: {exc}") from exc
    finally:
        try:
            w.finish()
        except Wrong as exc:
            raise Wrong(f"{kind}, seed {seed}, release after {' '.join(done)}: {exc}") from exc
    return w
