"""What the extension puts into a host, step by step: all of it, or nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sfast_ext.hosts.attachment import wrap
from sfast_ext.hosts.probes import Examined, Feature
from sfast_ext.report import words_of


class Installation:
    """Steps that can be undone. Each name of the host's comes from a probe.

    Args:
        found: what was found in the host.
        error: called with the name of a stage and an exception if a step cannot be undone. The others are.
    """

    def __init__(self, found: Examined, error: Callable[[str, Exception], object]) -> None:
        self.found, self._error = found, error
        self.lost: dict[Feature, str] = {feature: str(missing[0]) for feature, missing in found.lost.items()}
        """The features that are not installed, and why."""
        self._undo: list[Callable[[], object]] = []
        self._failed: list[Callable[[], object]] = []

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Lay a function around one of the host's, see `attachment.wrap`.

        Args:
            name: that of its probe.
        """
        place = self.found.place(name)
        self.add(wrap(place.owner, place.attribute, around))

    def callback(self, name: str, action: Callable[..., Any], empty: Any = None) -> None:
        """Register a callback with the host.

        Args:
            name: that of the probe of the function that registers it, such as "on_model_loaded".
            empty: what it gives once it was undone. The host forgets callbacks when it unloads its scripts; until then
                this one does nothing.
        """
        there = True

        @functools.wraps(action)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return action(*args, **kwargs) if there else empty

        def leave() -> None:
            nonlocal there
            there = False

        place = self.found.place(name)
        self.add(leave)
        # before it is called: one that raises may have registered it
        self.on_failure(lambda: forget_callback(place.owner, ours))
        place.value(ours)

    def add(self, *undo: Callable[[], object]) -> None:
        """Add steps that are undone by these."""
        self._undo.extend(undo)

    def on_failure(self, undo: Callable[[], object]) -> None:
        """Add what is undone only if the installation fails: the host forgets it when it unloads its scripts."""
        self._failed.append(undo)

    def feature(self, feature: Feature, install: Callable[[], object]) -> bool:
        """Take the steps of a feature if all of its probes hold. If a step raises, they are undone, and the feature is
        lost alone. Returns whether it is there."""
        if feature in self.lost:
            return False
        before = len(self._undo), len(self._failed)
        try:
            install()
        except Exception as exc:
            self.lost[feature] = words_of(exc)
            self._undo_since(*before)
            return False
        return True

    def undo(self) -> None:
        """Undo all steps, the last first."""
        self._undo_since(0)
        self._failed.clear()

    def fail(self) -> None:
        """Undo all steps, and what the host would keep until it unloads its scripts."""
        self._undo_since(0, 0)

    def _undo_since(self, number: int, failed: int | None = None) -> None:
        steps = self._undo[number:] + ([] if failed is None else self._failed[failed:])
        del self._undo[number:]
        if failed is not None:
            del self._failed[failed:]
        for step in reversed(steps):
            try:
                step()
            except Exception as exc:
                self._error("undo", exc)


def forget_callback(script_callbacks: Any, callback: Callable[..., Any]) -> None:
    """Take a callback out of the lists of a host."""
    remove = getattr(script_callbacks, "remove_callbacks_for_function", None)
    if remove is not None:
        remove(callback)
    lists = getattr(script_callbacks, "callback_map", None)
    for each in lists.values() if isinstance(lists, dict) else ():
        for entry in [e for e in each if e is callback or getattr(e, "callback", None) is callback]:
            each.remove(entry)
