"""Processors that keep something from call to call: maps, counters, their last output. A capture, a comparison or a
replay that is not theirs must leave no trace."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fuzz.behaviour_events import toggle
from fuzz.compare import Wrong
from fuzz.value_events import take_off
from fuzz.value_places import module
from fuzz.world import Event, World

KEEPER = "a processor that keeps"
MOST = 20
"""Maps that are kept."""
SOURCE = """
import collections

import numpy as np

KEPT = {{}}


class Options:
    pass


class Processor:
    calls = 0
    maps = collections.deque(maxlen=20)

    def __init__(self, inner):
        self.inner, self.last, self.bank, self.options, self.array = inner, None, {{}}, Options(), np.zeros(2)
        self.options.calls = 0

    def __call__(self, attn, *args, **kwargs):
        out = self.inner(attn, *args, **kwargs)
        {keeps}
        return out


def closed():
    calls, maps = 0, []

    def count(out):
        nonlocal calls
        calls += 1
        maps.append(out)
        del maps[:-20]
        return calls

    return count, lambda: (calls, maps)


count, COUNTED = closed()
"""
KEEPS: dict[str, str] = {
    "a counter in an attribute": "self.calls += 1",
    "a counter of an attribute": "self.options.calls += 1",
    "a counter of the class": "Processor.calls += 1",
    "a counter in a global": "KEPT['calls'] = KEPT.get('calls', 0) + 1",
    "a counter in an array": "self.array[1] += 1",
    "a counter and maps in a closure": "count(out)",
    "a counter that matters": "self.calls += 1\n        out = out * (1.0 if self.calls % 3 else 0.5)",
    "maps in a deque": "self.maps.append(out)",
    "maps in a global": "KEPT.setdefault('maps', []).append(out)\n        del KEPT['maps'][:-20]",
    "the last output": "self.last = out",
    "the last output by name": "self.bank[kwargs.get('name', 'out')] = out.clone()",
    "a mix with the last output": (
        "old, self.last = self.last, out\n"
        "        out = out if old is None or old.shape != out.shape or old.dtype != out.dtype else 0.5 * (out + old)"
    ),
}


def processor_that_keeps(w: World, rng: random.Random) -> None:
    """It comes, and goes."""
    path = rng.choice([n for n, m in w.twin.named_modules() if hasattr(m, "processor")])
    kind = rng.choice(list(KEEPS))
    if KEEPER not in w.patches or not w.patches[KEEPER].covered():  # type: ignore[attr-defined]
        toggle(w, KEEPER, lambda: keep(w, path, kind), foreign=True)


def keep(w: World, path: str, kind: str) -> Callable[[], None]:
    """Put it on; what it has kept is compared after each call. Returns what takes it away."""
    undo: list[Callable[[], None]] = []
    covered: list[Callable[[], bool]] = []
    laid: list[tuple[Any, Any]] = []

    def put_on(m: Any) -> None:
        scope, attention = module(SOURCE.format(keeps=KEEPS[kind])), m.get_submodule(path)
        before = attention.processor
        attention.processor = scope.Processor(before)
        laid.append((scope, attention.processor))
        mine = attention.processor
        covered.append(lambda: attention.processor is not mine)
        undo.append(lambda: take_off(attention, mine, before))

    w.both(put_on)

    def look() -> None:
        ours, theirs = (_state(*each) for each in laid)
        _alike(ours, theirs, f"{kind} of {path}")

    w.watched[KEEPER] = look

    def take() -> None:
        w.watched.pop(KEEPER, None)
        for each in undo:
            each()

    take.covered = lambda: any(each() for each in covered)  # type: ignore[attr-defined]
    return take


def _state(scope: Any, processor: Any) -> dict[str, Any]:
    own = {name: value for name, value in vars(processor).items() if name != "inner"}
    own["options"] = vars(processor.options)
    return {**own, "class": (scope.Processor.calls, list(scope.Processor.maps)), "kept": scope.KEPT,
            "closure": scope.COUNTED()}  # fmt: skip


def _alike(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(ours, FakeTensor):
        raise Wrong(f"a FakeTensor is in {where}")
    if type(ours) is not type(theirs):
        raise Wrong(f"{where} has {ours!r}, not {theirs!r}")
    if isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.device != theirs.device:
            raise Wrong(f"{where} has another tensor: {ours.shape}, {ours.dtype}")
    elif isinstance(theirs, dict):
        if list(ours) != list(theirs):
            raise Wrong(f"{where} has {list(ours)}, not {list(theirs)}")
        for key, value in theirs.items():
            _alike(ours[key], value, f"{key} of {where}")
    elif isinstance(theirs, (list, tuple, collections.deque)):
        if len(ours) != len(theirs):
            raise Wrong(f"{where} has {len(ours)}, not {len(theirs)}")
        for mine, other in zip(ours, theirs):
            _alike(mine, other, where)
    elif isinstance(theirs, np.ndarray):
        if not np.array_equal(ours, theirs):
            raise Wrong(f"{where} has {ours}, not {theirs}")
    elif isinstance(theirs, (int, float, str, type(None))) and ours != theirs:
        raise Wrong(f"{where} has {ours!r}, not {theirs!r}")


EVENTS: dict[Event, int] = {processor_that_keeps: 2}
