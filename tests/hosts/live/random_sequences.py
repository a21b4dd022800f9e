"""Random images for `random_events.py`, from a seed: which patches are laid, turned and taken away, and when.

Pure: nothing here knows a host, and the same seed gives the same images.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import random_sites as sites

SIZES = ((128, 128), (128, 192), (192, 128))
STEPS = (4, 8)
MOST_EVENTS = 6
"""Of one image; the one that takes away all that is left may have as many as there are patches."""
MOST_LAID = 4
CALM = 3
"""Images without a patch after all were taken away: by the last of them plans run again."""
SPARE = 2
"""Captures of one image beyond one for each behaviour that it had: if a forward looks at numbers of its
arguments, a plan is made once more."""


@dataclass(frozen=True)
class Event:
    """A patch laid, its number turned, or the patch taken away.

    Args:
        step: before which it happens; -1 is before the image.
        id: of the patch.
    """

    step: int
    op: str
    id: int
    kind: str
    keep: str
    home: str
    seed: int
    strength: float

    def words(self) -> str:
        return f"{self.op} {self.id} ({self.kind}, {self.keep}, {self.home}) at {self.step}"


@dataclass
class Image:
    """An image and what happens in it."""

    width: int
    height: int
    steps: int
    seed: int
    events: list[Event] = field(default_factory=list)
    before: list[Event] = field(default_factory=list)
    """The patches that were laid before, by the events that did so."""
    calm: int = 0
    """The how-manieth it is of images in a row without a patch."""

    def told(self) -> dict[str, Any]:
        """What the host's extension is told."""
        return {"events": [asdict(event) for event in self.events]}

    def behaviours(self) -> int:
        """How many different things the model computes in it, one after another."""
        laid = {event.id: event for event in self.before}
        seen = set()
        for step in range(self.steps):
            for event in self.events:
                if event.step == step or (step == 0 and event.step < 0):
                    if event.op == "take":
                        laid.pop(event.id, None)
                    else:
                        laid[event.id] = event
            moving = any(sites.each_step(event.kind, event.keep) for event in laid.values())
            state = frozenset((event.id, event.strength) for event in laid.values())
            seen.add((state, step if moving else None))
        return len(seen)


def storm_bound(image: Image, parts: int = 0) -> int:
    """The most captures that an image may take.

    Args:
        parts: that ran beside the whole model, each with plans of its own.
    """
    return image.behaviours() * (1 + parts) + SPARE


def storm_bound_of_all(images: Sequence[Image], parts: Sequence[int]) -> int:
    """The most captures that images may take in a row: a few for each, however often their patches change."""
    patched = sum(1 + n for image, n in zip(images, parts) if image.events or image.before)
    return 2 * patched + 2 * len(SIZES)


class Drawing:
    """Draws the events of a sequence."""

    def __init__(self, seed: int, events: int, host: str, kinds: Sequence[str]) -> None:
        self.events = events
        self.rng = random.Random(f"{host} {seed}")
        self.kinds = list(kinds)
        self.some = self.kinds
        """Those that are laid until all are taken away: plans run under some kinds, and under others none."""
        self.laid: list[Event] = []
        self.count = 0
        self._ids = 0

    def left(self) -> int:
        """How many events there may still be, beside those that take away what is laid."""
        return self.events - self.count - len(self.laid)

    def image(self, size: tuple[int, int] | None = None) -> Image:
        """One without events so far."""
        width, height = size or self.rng.choice(SIZES)
        steps = self.rng.randint(*STEPS)
        return Image(width, height, steps, self.rng.randint(1, 3), before=list(self.laid))

    def stirred(self) -> Image:
        """One with random events."""
        image = self.image()
        steps = self.rng.choices(range(-1, image.steps), k=self.rng.randint(0, MOST_EVENTS))
        for step in sorted(steps):
            if self.left() > 0:
                image.events.append(self._any(step))
        return image

    def cleared(self) -> Image:
        """One that takes all patches away, at random steps or before it."""
        image = self.image()
        number = len(self.laid)
        steps = [-1] * number if self.rng.random() < 0.3 else self.rng.choices(range(-1, image.steps), k=number)
        image.events += [self._take(step) for step in sorted(steps)]
        return image

    def calm(self) -> list[Image]:
        """Some without a patch, of one size."""
        size = self.rng.choice(SIZES)
        images = [self.image(size) for _ in range(CALM)]
        for number, image in enumerate(images, 1):
            image.calm = number
        self.some = self.rng.sample(self.kinds, min(len(self.kinds), self.rng.randint(1, 4)))
        return images

    def _any(self, step: int) -> Event:
        draw = self.rng.random()
        turning = [event for event in self.laid if sites.can_turn(event.kind, event.keep)]
        if self.laid and (draw < 0.35 or len(self.laid) >= MOST_LAID):
            return self._take(step)
        # a patch that is laid has to be taken away as well
        if turning and (draw < 0.6 or self.left() == 1):
            return self._turn(step, self.rng.choice(turning))
        return self._lay(step)

    def _lay(self, step: int) -> Event:
        kind = self.rng.choice(self.some)
        keep, home = self.rng.choice(sites.SITES[kind].keeps), self.rng.choice(sites.HOMES)
        self._ids += 1
        event = Event(step, "lay", self._ids, kind, keep, home, self.rng.randrange(1000), self._strength(kind))
        self.laid.append(event)
        return self._counted(event)

    def _turn(self, step: int, of: Event) -> Event:
        return self._counted(replace(of, step=step, op="turn", strength=self._strength(of.kind)))

    def _take(self, step: int) -> Event:
        event = self.rng.choice(self.laid)
        group = sites.SITES[event.kind].group
        if group:
            event = next(e for e in reversed(self.laid) if sites.SITES[e.kind].group == group)
        self.laid.remove(event)
        return self._counted(replace(event, step=step, op="take"))

    def _strength(self, kind: str) -> float:
        site = sites.SITES[kind]
        return round(self.rng.uniform(site.low, site.high), 3)

    def _counted(self, event: Event) -> Event:
        self.count += 1
        return event


def sequence(seed: int, events: int, host: str, kinds: Sequence[str] = ()) -> list[Image]:
    """Images with so many events, one more at most; all patches are taken away in the end.

    Args:
        kinds: of patches; all that there are for the host if it is empty.
    """
    drawing = Drawing(seed, events, host, kinds or sites.kinds(host))
    images = drawing.calm()[:1]
    while drawing.left() > 0:
        if drawing.laid and drawing.rng.random() < 0.25:
            images += [drawing.cleared(), *drawing.calm()]
        else:
            images.append(drawing.stirred())
    if drawing.laid:
        images += [drawing.cleared(), *drawing.calm()]
    return images


def each_alone(host: str, kinds: Sequence[str] = (), *, short: bool = False) -> list[Image]:
    """An image without a patch, then three for each kind, each way of keeping its number and each home: one with the
    patch at a single step; one that begins with it, and in whose middle its number is turned; one that loses it.

    Args:
        short: one way and one home for each kind.
    """

    def image(*events: Event, before: Sequence[Event] = ()) -> Image:
        return Image(*SIZES[0], 6, 1, list(events), list(before))

    images = [image()]
    ways = [
        (kind, keep, home)
        for number, kind in enumerate(kinds or sites.kinds(host))
        for keep in _some(sites.SITES[kind].keeps, number, short)
        for home in _some(sites.HOMES, number, short)
    ]
    for number, (kind, keep, home) in enumerate(ways):
        site = sites.SITES[kind]
        passing = Event(2, "lay", 2 * number, kind, keep, home, number, site.high)
        laid = replace(passing, step=-1, id=2 * number + 1)
        first = [laid]
        if sites.can_turn(kind, keep):
            first.append(replace(laid, step=3, op="turn", strength=site.low))
        images.append(image(passing, replace(passing, step=3, op="take")))
        images.append(image(*first))
        images.append(image(replace(first[-1], step=3, op="take"), before=first[-1:]))
    return images


def _some(what: Sequence[str], number: int, short: bool) -> Sequence[str]:
    return [what[number % len(what)]] if short else what
