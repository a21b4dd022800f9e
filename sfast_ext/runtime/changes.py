"""Forwards that change the state that they can reach: they get no plan, as a replay changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sfast_ext.call_signature import Signature
from sfast_ext.reasons import Reason

MOST = 3
"""A forward may fill what it keeps for later calls in so many calls in a row, in different places each time."""
_KEPT = 64


class StateChanges:
    """Counts the calls in a row in which a forward changed state."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()
        self._last: OrderedDict[Signature, Reason] = OrderedDict()

    def record(self, signature: Signature, key: Hashable, place: str, reason: Reason) -> bool:
        """A call changed state. Returns whether it does so again and again.

        Args:
            key: that of the plan that it did not get.
            place: what it changed.
        """
        before, times = self._found.pop(key, ("", 0))
        self._found[key], self._last[signature] = (place, times + 1), reason
        for each in (self._found, self._last):
            while len(each) > _KEPT:
                each.popitem(last=False)
        return before == place or times + 1 >= MOST

    def settled(self, signature: Signature, key: Hashable) -> None:
        """A call changed nothing."""
        self._found.pop(key, None)
        self._last.pop(signature, None)

    def reason(self, signature: Signature) -> Reason | None:
        """What the last call of a signature changed, or None."""
        return self._last.get(signature)
