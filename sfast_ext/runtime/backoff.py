"""Exponential back-off of captures: where what a model computes changes before its plans have paid for themselves, the
next is made later each time, and none at all where it changes at every call."""

from __future__ import annotations

from collections.abc import Hashable

from sfast_ext.call_signature import Signature

MAX_UNUSED_CAPTURES = 2
"""Captures of one signature that are made at once, though no plan of it has paid yet."""
PAID_AFTER = 10
"""The replay with which a plan has paid for its capture."""


class CaptureBackoff:
    """Counts, for each signature, the captures since one paid.

    After the first `max_unused`, a capture waits for 2, 4, 8, ... calls of the signature with the same behaviour in a
    row. A single one in a generation is what a change of the settings takes, and is not counted when the next begins.
    """

    def __init__(self, max_unused: int = MAX_UNUSED_CAPTURES) -> None:
        self.max_unused = max_unused
        self._in_generation: dict[Signature, int] = {}
        self._unused_captures: dict[Signature, int] = {}
        self._steady: dict[Signature, tuple[Hashable, int]] = {}

    def record_capture(self, signature: Signature) -> None:
        """A plan is about to be made."""
        self._unused_captures[signature] = self._unused_captures.get(signature, 0) + 1
        self._in_generation[signature] = self._in_generation.get(signature, 0) + 1

    def new_generation(self) -> None:
        """A generation begins."""
        for signature, captures in self._in_generation.items():
            if captures == 1 and signature in self._unused_captures:
                self._unused_captures[signature] -= 1
        self._in_generation.clear()

    def record_replay(self, signature: Signature, times: int) -> None:
        """A result of a plan was used, for the `times`-th time."""
        # once for each plan: one that paid long ago says nothing of those that were made since
        if times == PAID_AFTER:
            self._unused_captures.pop(signature, None)
            self._steady.pop(signature, None)

    def must_wait(self, signature: Signature, behaviour: Hashable) -> bool:
        """Whether a call that has no plan is to have none yet; to be asked once for each such call.

        Args:
            behaviour: all that tells the plans of one signature apart.
        """
        unused = self._unused_captures.get(signature, 0)
        if unused < self.max_unused:
            return False
        last, calls = self._steady.get(signature, (None, 0))
        calls = calls + 1 if last == behaviour else 1
        self._steady[signature] = (behaviour, calls)
        return calls < 2 ** (unused - self.max_unused + 1)

    def restart_counts(self) -> None:
        """Something else changed: calls in a row are counted anew."""
        self._steady.clear()

    def clear(self) -> None:
        """Forget all."""
        self._unused_captures.clear()
        self._steady.clear()
        self._in_generation.clear()
