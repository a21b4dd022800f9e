"""A processor of a package's, and what its code finds outside itself: numbers, containers and functions of its module,
attributes of its class, and of what it calls."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from fuzz.behaviour_events import both, toggle
from fuzz.world import Event, World

PROCESSOR = "processor of a package"
SOURCE = """
FACTOR = 1.0
STATE = {"factor": 1.0}
FACTORS = [1.0]


def helper():
    return further()


def further():
    return FACTOR


class Options:
    least = 1.0

    def scaled(self, x):
        return x * self.least * FACTORS[0]


class Processor:
    rate = 1.0

    def __init__(self, inner):
        self.inner, self.options, self.strength = inner, Options(), 1.0

    def __call__(self, *args, **kwargs):
        out = self.options.scaled(self.inner(*args, **kwargs))
        return out * helper() * STATE["factor"] * self.rate * self.strength
"""


def package() -> Any:
    """The package's module, as when it is imported."""
    module = types.ModuleType("stateful_package.processors")
    exec(compile(SOURCE, "/site-packages/stateful_package/processors.py", "exec"), vars(module))
    return module


def _on(w: World) -> list[Any]:
    """The package's module as long as a processor of its is in use."""
    found = (getattr(m, "processor", None) for m in w.twin.modules())
    return [p.module_of_its_own for p in found if hasattr(p, "module_of_its_own")]


CHANGES: tuple[Callable[[Any, float], Any], ...] = (
    lambda module, k: setattr(module, "FACTOR", k),
    lambda module, k: module.STATE.update(factor=k),
    lambda module, k: module.FACTORS.__setitem__(0, k),
    lambda module, k: setattr(module, "FACTORS", [k]),
    lambda module, k: setattr(module.Options, "least", k),
    lambda module, k: setattr(module.Processor, "rate", k),
    lambda module, k: setattr(module, "further", lambda: k),
)


def processor_of_a_package(w: World, rng: random.Random) -> None:
    """It comes, what it reads changes, and it goes."""
    change, k, path = rng.choice(CHANGES), rng.uniform(0.8, 1.2), rng.choice(_paths(w))
    if PROCESSOR in w.patches and rng.random() < 0.75:
        for module in _on(w):
            change(module, k)
        w.behaves_otherwise()
        return
    scope = package()
    if "processor" in w.patches:
        # what it is made of may be what no plan can have, and would stay when that is taken for gone
        return
    # what the fingerprint may not depend on: nobody reads it
    scope.Processor.module_of_its_own = scope

    def put_on(m: nn.Module) -> Callable[[], None]:
        attention: Any = m.get_submodule(path)
        before = attention.processor
        attention.processor = scope.Processor(before)

        def undo() -> None:
            attention.processor = before

        return undo

    toggle(w, PROCESSOR, lambda: both(w, put_on))


def strength_of_its_processors(w: World, rng: random.Random) -> None:
    k = rng.uniform(0.8, 1.2)
    for m in (w.subject, w.twin):
        for module in m.modules():
            if hasattr(getattr(module, "processor", None), "module_of_its_own"):
                module.processor.strength = k
    w.behaves_otherwise()


def _paths(w: World) -> list[str]:
    return [name for name, module in w.twin.named_modules() if hasattr(module, "processor")]


EVENTS: dict[Event, int] = {processor_of_a_package: 3, strength_of_its_processors: 1}
