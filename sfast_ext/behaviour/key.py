"""The behaviour keys of one module over time: read after a change, trusted in between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.fingerprint import Fingerprint, fingerprint
from sfast_ext.behaviour.foreign_code import Patch
from sfast_ext.behaviour.reader import Vouch
from sfast_ext.behaviour.recorded_outputs import inside_collectors, written_there
from sfast_ext.reasons import Reason


class BehaviourKeys:
    """Numbers the behaviours of one module, so that a key with thousands of entries is only compared once per reading.

    Args:
        recognised, transparent, ignored_globals: see `Hooks`.
        kept: the number of behaviours to remember.
        first: the number of the first behaviour.
        below: returns the forward of the module that our forward replaced, None for that of the class.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: frozenset[str],
        recognised: Vouch | None,
        kept: int,
        first: int = 0,
        transparent: Vouch | None = None,
        below: Callable[[], Any] = lambda: None,
        ignored_globals: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self._module, self._ignored, self._recognised, self._kept = module, ignored, recognised, kept
        self._transparent, self._below, self._ignored_globals = transparent, below, ignored_globals
        self._numbers: OrderedDict[Hashable, tuple[int, Fingerprint]] = OrderedDict()
        self._count = first
        self._fingerprint: Fingerprint | None = None
        self._announced = False
        self.stale = False
        """Whether a generation began since the last reading."""
        self.last: tuple[int, Reason | None] | None = None
        """The result of the last reading. None before the first."""

    def begin_generation(self) -> None:
        """A generation begins. From the first call on, one reading is trusted for a generation."""
        self._announced = self.stale = True

    @property
    def trusted(self) -> bool:
        """Whether `last` is valid without another reading."""
        return (
            self._announced
            and not self.stale
            and self._fingerprint is not None
            and self._fingerprint.unchanged_quick()
        )

    def current(self) -> tuple[int, Reason | None]:
        """`last` if it is trusted, otherwise a new reading."""
        return self.last if self.last is not None and self.trusted else self.read()

    def read(self) -> tuple[int, Reason | None]:
        """The number of the current behaviour, and what forbids a plan, or None.

        That is a foreign patch, or a value that cannot be compared.
        """
        previous = self._fingerprint
        if self.last is not None and previous is not None and previous.unchanged():
            if not self._announced:
                return self.last
            if previous.classes_unchanged(self._module):
                # the host vouches again once per generation
                self.last = (self.last[0], self._foreign_patch(previous))
                self.stale = False
                return self.last
        read = fingerprint(self._module, self._ignored, self._transparent, self._below(), self._ignored_globals)
        known = self._numbers.get(read.key)
        if known is None:
            known = self._numbers[read.key] = (self._count, read)
            self._count += 1
            while len(self._numbers) > self._kept:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(read.key)
        # set together, and after the host's callback, which may raise
        foreign = self._foreign_patch(read)
        self._fingerprint, self.last = read, (known[0], foreign)
        self.stale = False
        return self.last

    def _foreign_patch(self, read: Fingerprint) -> Reason | None:
        vouch = self._recognised
        patches = (p for p in self._foreign_patches(read) if vouch is None or not vouch(p.module, p.kind, p.function))
        found = chain((patch.reason() for patch in patches), (value.reason() for value in read.unknown))
        return next(found, None)

    def _foreign_patches(self, read: Fingerprint) -> list[Patch]:
        """Without the hooks that record results for a forward that is captured."""
        recording = [p for p in read.patches if p.kind == "hook" and written_there(p.function)]
        if not recording:
            return read.patches
        inside = inside_collectors(self._module)
        known = {id(patch) for patch in recording if id(patch.module) in inside}
        return [patch for patch in read.patches if id(patch) not in known]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the last reading saw this tensor object: another one in its place has another key, as long as a
        reference to this one is held."""
        found = self._fingerprint.tensors.get(id(tensor)) if self._fingerprint is not None else None
        return found is not None and found() is tensor

    def clear(self) -> None:
        """Forget all readings."""
        self._numbers.clear()
        self.last = self._fingerprint = None
