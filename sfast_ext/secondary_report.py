"""The report of networks whose calls are no steps of the sampler, such as a VAE's."""

from __future__ import annotations

from sfast_ext.reasons import Reason, given
from sfast_ext.report import Report

_APART = frozenset({"captures", "replays", "eager_runs", "fallbacks", "weights_copied", "memory_given_back"})


class SecondaryReport(Report):
    """Passes events and errors on to a report, and keeps calls apart from those of the steps: what that one says of
    the last image, and why its steps were not accelerated, is about steps.

    Args:
        main: the report of the steps.
        kind: what the calls are of; the first word of their counters.
        what: the network in words, for events.
    """

    def __init__(self, main: Report, kind: str, what: str) -> None:
        super().__init__()
        self._main, self._kind, self._what = main, kind, what
        self.reason: Reason | None = None
        """Why the last call was bypassed; None if it was not."""

    def new_generation(self) -> None:
        """Steps have generations."""

    def bypassed(self, reason: Reason | str) -> None:
        """Record that a call was bypassed, and why: as an event if it is new."""
        self.reason = given(reason)
        self.count("fallbacks")
        self._main.once("bypassed", self.reason.of(self._what))

    def event(self, stage: str, message: Reason | str) -> None:
        """An event of the main report."""
        if self._what not in str(message):
            message = message.of(self._what) if isinstance(message, Reason) else f"{self._what}: {message}"
        self._main.event(stage, message)

    def once(self, stage: str, message: Reason | str) -> None:
        """A fact about the machine, told once whoever finds it."""
        self._main.once(stage, message)

    def error(self, stage: str, exc: BaseException) -> None:
        """An error of the main report."""
        self._main.error(f"{self._what}, {stage}", exc)

    def preparing(self, label: str | None, stage: str = "", began: float = 0.0, left: float | None = None) -> None:
        """A preparation of the main report."""
        self._main.preparing(label, stage, began, left)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter: one apart if it tells of calls or of plans, else the main report's."""
        if name in ("replays", "eager_runs", "captures"):
            self.reason = None
        self._main.count(self._name(name), n)

    def counter(self, name: str) -> int:
        """The value of that counter."""
        return self._main.counter(self._name(name))

    def _name(self, name: str) -> str:
        return f"{self._kind}_{name}" if name in _APART else name
