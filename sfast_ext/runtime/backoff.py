"""Exponential back-off of captures: where what a model computes changes before its plans have paid for themselves, the
next is made later each time, and none at all where it changes at every call."""

from __future__ import annotations

from collections.abc import Hashable

from sfast_ext.call_signature import Signature

FREE = 2
"""Captures of one signature that are made at once, though no plan of it has paid yet."""
PAYS = 10
"""The replay with which a plan has paid for its capture."""


class Backoff:
    """Counts, for each signature, the captures since one paid.

    After the first `free`, a capture waits for 2, 4, 8, ... calls of the signature with the same behaviour in a row. A
    single one in a generation is what a change of the settings takes, and is not counted when the next begins.
    """

    def __init__(self, free: int = FREE) -> None:
        self.free = free
        self._in_generation: dict[Signature, int] = {}
        self._unpaid: dict[Signature, int] = {}
        self._steady: dict[Signature, tuple[Hashable, int]] = {}

    def captured(self, signature: Signature) -> None:
        """A plan is about to be made."""
        self._unpaid[signature] = self._unpaid.get(signature, 0) + 1
        self._in_generation[signature] = self._in_generation.get(signature, 0) + 1

    def new_generation(self) -> None:
        """A generation begins."""
        for signature, captures in self._in_generation.items():
            if captures == 1 and signature in self._unpaid:
                self._unpaid[signature] -= 1
        self._in_generation.clear()

    def replayed(self, signature: Signature, times: int) -> None:
        """A result of a plan was used, for the `times`-th time."""
        # once for each plan: one that paid long ago says nothing of those that were made since
        if times == PAYS:
            self._unpaid.pop(signature, None)
            self._steady.pop(signature, None)

    def waits(self, signature: Signature, behaviour: Hashable) -> bool:
        """Whether a call that has no plan is to have none yet; to be asked once for each such call.

        Args:
            behaviour: all that tells the plans of one signature apart.
        """
        unpaid = self._unpaid.get(signature, 0)
        if unpaid < self.free:
            return False
        last, calls = self._steady.get(signature, (None, 0))
        calls = calls + 1 if last == behaviour else 1
        self._steady[signature] = (behaviour, calls)
        return calls < 2 ** (unpaid - self.free + 1)

    def interrupted(self) -> None:
        """Something else changed: calls in a row are counted anew."""
        self._steady.clear()

    def clear(self) -> None:
        """Forget all."""
        self._unpaid.clear()
        self._steady.clear()
        self._in_generation.clear()
