"""A readers-writer lock around the weights of a module.

The original forward is a reader and may run in any number of threads. Changing the layout of weights needs exclusive
access. The lock is reentrant: a thread never waits for itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sfast_ext import reasons
from sfast_ext.weights.weight import WeightsInUse

_log = logging.getLogger(__name__)


class Gate:
    """The lock of one module. Use `with gate:` around each run of its original forward."""

    def __init__(self) -> None:
        self._free = threading.Condition(threading.Lock())
        self._inside: dict[int, int] = {}
        self._owner: int | None = None
        self._depth = 0
        self._deferred: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._free:
            while self._owner not in (None, me):
                self._free.wait()
            self._inside[me] = self._inside.get(me, 0) + 1

    def __exit__(self, *exc: Any) -> None:
        me = threading.get_ident()
        with self._free:
            self._inside[me] -= 1
            if self._inside[me]:
                return
            del self._inside[me]
            self._free.notify_all()
            if self._inside:
                return
            deferred, self._deferred = self._deferred, []
        for each in deferred:
            try:
                self.when_exclusive(each)
            except Exception:
                # not an error of the forward that ends here
                _log.exception("laying weights out failed")

    @contextlib.contextmanager
    def exclusive(self, wait_s: float = 0.0) -> Iterator[None]:
        """Exclusive access. Reentrant.

        Args:
            wait_s: how long to wait for the other threads, in seconds.

        Raises:
            WeightsInUse: they are still inside.
        """
        me = threading.get_ident()
        until = time.monotonic() + wait_s
        with self._free:
            while self._owner not in (None, me) or self._inside.keys() - {me}:
                left = until - time.monotonic()
                if left <= 0:
                    raise WeightsInUse(reasons.WEIGHTS_IN_USE())
                self._free.wait(left)
            self._owner = me
            self._depth += 1
        try:
            yield
        finally:
            with self._free:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
                    self._free.notify_all()

    def when_exclusive(self, action: Callable[[], None]) -> None:
        """Run an action with exclusive access, now or in the thread that is the last to leave."""
        while True:
            try:
                with self.exclusive():
                    action()
                return
            except WeightsInUse:
                pass
            with self._free:
                if self._inside.keys() - {threading.get_ident()}:
                    self._deferred.append(action)
                    return
                # another thread has exclusive access, for a moment
                self._free.wait_for(lambda: self._owner is None)


_gates: weakref.WeakKeyDictionary[nn.Module, Gate] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def gate_of(module: nn.Module) -> Gate:
    """The gate of a module. There is one for each module."""
    with _making:
        return _gates.setdefault(module, Gate())
