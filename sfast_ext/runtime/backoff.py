"""Exponential backoff of captures.

If the behaviour of a model changes before its plans have paid for themselves, each further capture waits longer. If it
changes at every call, there are no further captures.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from sfast_ext.call_signature import Signature

MAX_UNUSED_CAPTURES = 2
"""Captures of one signature without waiting, although none of its plans has paid yet."""
PAID_AFTER = 10
"""A plan has paid for its capture after this many replays."""
MOST_SIGNATURES = 256
"""The counts of so many signatures are kept, the last ones."""


V = TypeVar("V")


class CaptureBackoff:
    """Counts, for each signature, the captures since the last one that paid.

    After the first `max_unused`, a capture waits for 2, 4, 8, ... consecutive calls of the signature with the same
    behaviour. A single capture in a generation is not counted once the next begins: changed settings cause one.
    """

    def __init__(self, max_unused: int = MAX_UNUSED_CAPTURES) -> None:
        self.max_unused = max_unused
        self._in_generation: dict[Signature, int] = {}
        self._unused_captures: dict[Signature, int] = {}
        self._steady: dict[Signature, tuple[Hashable, int]] = {}

    def record_capture(self, signature: Signature) -> None:
        """A plan is about to be built."""
        for counts in (self._unused_captures, self._in_generation):
            _remember(counts, signature, counts.get(signature, 0) + 1)

    def forget_capture(self, signature: Signature) -> None:
        """The plan that was about to be built is not: the user has interrupted it."""
        for counts in (self._unused_captures, self._in_generation):
            if counts.get(signature, 0) > 0:
                counts[signature] -= 1

    def new_generation(self) -> None:
        """A generation begins."""
        for signature, captures in self._in_generation.items():
            if captures == 1 and signature in self._unused_captures:
                self._unused_captures[signature] -= 1
        self._in_generation.clear()

    def record_replay(self, signature: Signature, times: int) -> None:
        """A result of a plan was used, for the `times`-th time."""
        # equal, not greater: a plan that paid long ago says nothing about later ones
        if times == PAID_AFTER:
            self._unused_captures.pop(signature, None)
            self._steady.pop(signature, None)

    def must_wait(self, signature: Signature, behaviour: Hashable) -> bool:
        """Whether a call without a plan gets none yet. Call it once for each such call.

        Args:
            behaviour: distinguishes the plans of one signature.
        """
        unused = self._unused_captures.get(signature, 0)
        if unused < self.max_unused:
            return False
        last, calls = self._steady.get(signature, (None, 0))
        calls = calls + 1 if last == behaviour else 1
        _remember(self._steady, signature, (behaviour, calls))
        return calls < 2 ** (unused - self.max_unused + 1)

    def restart_counts(self) -> None:
        """Something else changed: consecutive calls are counted from zero."""
        self._steady.clear()

    def clear(self) -> None:
        """Forget all."""
        self._unused_captures.clear()
        self._steady.clear()
        self._in_generation.clear()


def _remember(known: dict[Signature, V], signature: Signature, value: V) -> None:
    known.pop(signature, None)
    known[signature] = value
    while len(known) > MOST_SIGNATURES:
        del known[next(iter(known))]
