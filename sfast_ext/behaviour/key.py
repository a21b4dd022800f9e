"""The behaviour keys of one module as its calls go on: read when something changed, trusted in between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import nn

from sfast_ext.behaviour.fingerprint import Fingerprint, Vouch, fingerprint


class BehaviourKeys:
    """Numbers the behaviours of one module, so that a key of thousands of entries is compared once for each reading.

    Args:
        recognised, transparent: see `Hooks`.
        kept: how many behaviours are remembered.
        first: the number of the first.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: frozenset[str],
        recognised: Vouch | None,
        kept: int,
        first: int = 0,
        transparent: Vouch | None = None,
    ) -> None:
        self._module, self._ignored, self._recognised, self._kept = module, ignored, recognised, kept
        self._transparent = transparent
        self._numbers: OrderedDict[Hashable, tuple[int, Fingerprint]] = OrderedDict()
        self._count = first
        self._fingerprint: Fingerprint | None = None
        self._announced = False
        self._read_in_generation = False
        self.last: tuple[int, str | None] | None = None
        """What the last reading gave; None before the first."""

    def begin_generation(self) -> None:
        """A generation begins. From the first tick on, a reading is sure until the next."""
        self._announced = True
        self._read_in_generation = False

    @property
    def stale(self) -> bool:
        """Whether a generation began since the last reading."""
        return self._announced and not self._read_in_generation

    @property
    def trusted(self) -> bool:
        """Whether `last` may be trusted without another reading."""
        return (
            self._announced
            and self._read_in_generation
            and self._fingerprint is not None
            and self._fingerprint.unchanged_quick()
        )

    def current(self) -> tuple[int, str | None]:
        """What a reading gives, without one where `last` may be trusted."""
        return self.last if self.last is not None and self.trusted else self.read()

    def read(self) -> tuple[int, str | None]:
        """A number for what the module computes now, and the foreign patch that keeps us away, in words, if any."""
        previous = self._fingerprint
        if self.last is not None and previous is not None and previous.unchanged():
            if not self._announced:
                return self.last
            if previous.classes_unchanged(self._module):
                # once a generation the host is asked again what it vouches for
                self.last = (self.last[0], self._foreign_patch(previous))
                self._read_in_generation = True
                return self.last
        read = fingerprint(self._module, self._ignored, self._transparent)
        known = self._numbers.get(read.key)
        if known is None:
            known = self._numbers[read.key] = (self._count, read)
            self._count += 1
            while len(self._numbers) > self._kept:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(read.key)
        # together, and after the host was asked: it may raise
        foreign = self._foreign_patch(read)
        self._fingerprint, self.last = read, (known[0], foreign)
        self._read_in_generation = True
        return self.last

    def _foreign_patch(self, read: Fingerprint) -> str | None:
        vouch = self._recognised
        patches = (p for p in read.patches if vouch is None or not vouch(p.module, p.kind, p.function))
        return next((p.words() for p in patches), None)

    def clear(self) -> None:
        """Forget everything read."""
        self._numbers.clear()
        self.last = self._fingerprint = None
