"""Generated values at random places that a forward reads, changed in place and replaced at random steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fuzz.behaviour_events import toggle
from fuzz.value_places import HOMES, PLACES, Place, homes, package, wrappers
from fuzz.values import NUMBERS, Value
from fuzz.world import Event, World

ROOT = {"root wrapped", "root class", "accelerate outside", "root hook"}
"""What others lay over the root. A wrapper is then not the forward that an accelerator finds."""


@dataclass
class Laid:
    """A value in force: the packages and processors of the model and of its twin."""

    words: str
    value: Value
    places: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Package, processor and the module that has the processor, for each of the two."""


def generated_value(w: World, rng: random.Random) -> None:
    """A processor that reads one comes, and goes."""
    name = f"a value, number {rng.randrange(2)}"
    place, value, k = rng.choice(list(PLACES)), Value(rng), rng.choice(NUMBERS)
    path = rng.choice([n for n, m in w.twin.named_modules() if hasattr(m, "processor")])
    if _is_covered(w, name) if name in w.patches else _laid_at(w, path):
        return
    home = rng.choice(homes(place))
    toggle(w, name, lambda: lay(w, name, place, value, k, path, home), foreign=True)


def lay(
    w: World, name: str, place: str, value: Value, k: float, path: str, home: str = HOMES[0]
) -> Callable[[], None]:
    """Put a processor that reads a value at a place on a layer; returns what takes it away.

    Args:
        home: the folder of the code.
    """
    laid, undo = Laid(f"{value.words} in {place} of {path}", value), []
    w.values[name] = laid
    for model in (w.subject, w.twin):
        undo.append(_lay(laid, model.get_submodule(path), PLACES[place], k, home))

    def take() -> None:
        w.values.pop(name, None)
        for each in undo:
            each()

    return take


def _lay(laid: Laid, attention: Any, place: Place, k: float, home: str) -> Callable[[], None]:
    scope, before = package(place, laid.value, home), attention.processor
    attention.processor = processor = scope.Processor(before)
    scope.put(processor, attention, laid.value.make(k))
    laid.places.append((scope, processor, attention))

    def undo() -> None:
        take_off(attention, processor, before)
        attention.__dict__.pop("value_of_a_package", None)

    return undo


def take_off(attention: Any, processor: Any, before: Any) -> None:
    """Put back what was there before, unless somebody took the processor off."""
    if attention.processor is processor:
        attention.processor = before


def _is_covered(w: World, name: str) -> bool:
    """Whether somebody has laid another processor over one: it would come back with that."""
    return any(attention.processor is not processor for _, processor, attention in w.values[name].places)


def _laid_at(w: World, path: str) -> bool:
    attention = w.twin.get_submodule(path)
    return any(attention is module for laid in w.values.values() for _, _, module in laid.places)


def value_changes(w: World, rng: random.Random) -> None:
    """Those in force change, each in place or replaced; at times back to what they were."""
    for laid in w.values.values():
        change(laid, rng.choice(NUMBERS), rng.choice((None, 0, 1, 2, 9)))
    w.behaves_otherwise()


def change(laid: Laid, k: float, where: int | None) -> None:
    """Another number; `where` says how deep in place, None that the whole value is replaced."""
    for scope, processor, attention in laid.places:
        if where is None or not laid.value.change(scope.get(processor, attention), k, where):
            scope.put(processor, attention, laid.value.make(k))


def value_changes_in_turns(w: World, rng: random.Random) -> None:
    """Two settings in turns, as a schedule has them: the plans of each come again."""
    numbers, where = rng.sample(NUMBERS, 2), rng.choice((None, 0, 1, 2, 9))
    for k in (*numbers, *numbers):
        for laid in w.values.values():
            change(laid, k, where)
        w.check()


def value_in_a_wrapper(w: World, rng: random.Random) -> None:
    """A wrapper lies on the forward before we come, and what it reads changes; or it takes a value as an argument."""
    if ROOT & set(w.patches) or "forward" in w.twin.__dict__:
        return
    value, k, by_argument = Value(rng, 2), rng.choice(NUMBERS), rng.random() < 0.4
    steps = [(rng.choice(NUMBERS), rng.choice((None, 0, 1, 9))) for _ in range(3)]
    w.release()
    held, put = [], []
    for model in (w.subject, w.twin):
        scope = wrappers(value)
        if by_argument:
            model.forward = scope.taking_an_argument(model.forward)  # type: ignore[method-assign]
        else:
            held.append(value.make(k))
            wrapper, putting = scope.laid_over(model.forward, held[-1])
            model.forward = wrapper  # type: ignore[method-assign]
            put.append(putting)
    if by_argument:
        held.append(value.make(k))
        w.more = {"settings": held[0]}
    w.foreign.add("a wrapper")
    w.put_on()
    try:
        w.check()
        for k, where in steps:
            for i, each in enumerate(held):
                if where is None or not value.change(each, k, where):
                    held[i] = value.make(k)
                    if put:
                        put[i](held[i])
            if by_argument:
                w.more = {"settings": held[0]}
            w.check()
    finally:
        w.more = {}
        w.foreign.discard("a wrapper")
        w.acc.release()
        for model in (w.subject, w.twin):
            del model.forward
        w.put_on()


def settings_of_equal_blocks(w: World, rng: random.Random) -> None:
    """Processors of one kind on all layers, of which one has another number: equal blocks are recorded once."""
    name, place = "a value on each layer", rng.choice(("an attribute", "a slot", "an attribute of an attribute"))
    value, paths = Value(rng), [n for n, m in w.twin.named_modules() if hasattr(m, "processor")]
    numbers = [rng.choice(NUMBERS[:2])] * len(paths)
    numbers[rng.randrange(len(paths))] = NUMBERS[-1]
    if not (_is_covered(w, name) if name in w.patches else any(_laid_at(w, path) for path in paths)):
        toggle(w, name, lambda: _on_each(w, name, place, value, dict(zip(paths, numbers))), foreign=True)


def _on_each(w: World, name: str, place: str, value: Value, numbers: dict[str, float]) -> Callable[[], None]:
    undo: list[Callable[[], None]] = []
    laid = w.values[name] = Laid(f"{value.words} in {place} of each layer", value)
    for model in (w.subject, w.twin):
        scope = package(PLACES[place], value)
        for path, k in numbers.items():
            attention: Any = model.get_submodule(path)
            undo.append(_processor(scope, attention, value.make(k)))
            laid.places.append((scope, attention.processor, attention))

    def take() -> None:
        w.values.pop(name, None)
        for each in reversed(undo):
            each()

    return take


def _processor(scope: Any, attention: nn.Module, value: Any) -> Callable[[], None]:
    holder: Any = attention
    before, holder.processor = holder.processor, scope.Processor(holder.processor)
    mine = holder.processor
    scope.put(mine, holder, value)
    return lambda: take_off(holder, mine, before)


EVENTS: dict[Event, int] = {
    generated_value: 4, value_changes: 5, value_changes_in_turns: 1, value_in_a_wrapper: 1, settings_of_equal_blocks: 1,
}  # fmt: skip
