"""What a host answers says whether and how an image was accelerated; an image's metadata names settings that change
pixels, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sfast_ext import environment
from sfast_ext.hosts import per_request, reasons
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.eight_bits import EightBits
from sfast_ext.reasons import Reason, text
from sfast_ext.report import Report, Tally
from sfast_ext.ui import settings, words
from sfast_ext.ui.settings_table import SETTINGS, HostConfig

KEY = "Stable Fast"
"""Its name among the host's `extra_generation_params`."""
NAMES = frozenset(each.infotext for each in SETTINGS if each.infotext is not None)
"""Those of settings in an infotext."""


@dataclass
class _Begun:
    """What is known of a request before its first step."""

    reason: Reason | None = None
    """Why nothing will be accelerated."""
    config: HostConfig | None = None


class Answers:
    """Laid around the function of the host that makes the images of one request.

    Args:
        config: gives the configuration; asked within a request, whose own settings count.
        guarded: runs an action whose exceptions do not reach the host.
        eight_bits: says what is to be known of 8 bits.
    """

    def __init__(
        self,
        report: Report,
        attachments: Iterable[Attachment],
        config: Callable[[], HostConfig],
        guarded: Callable[[Callable[[], object]], None],
        eight_bits: EightBits,
    ) -> None:
        self._report, self._attachments = report, tuple(attachments)
        self._config, self._guarded, self._eight_bits = config, guarded, eight_bits

    def process(self, original: Callable[..., Any], p: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's `process_images_inner`. The images' infotexts are written in it, so what is added after it is in
        the answer alone."""
        begun = _Begun()
        self._guarded(lambda: self._begin(p, begun))
        with self._report.tally() as tally:
            result = original(p, *args, **kwargs)
        self._guarded(lambda: self._complete(result, tally, begun, per_request.ignored(p)))
        self._guarded(lambda: self._eight_bits.end(self._statuses))
        return result

    def _begin(self, p: Any, begun: _Begun) -> None:
        """Name settings that change pixels in the infotext, and note what is known before the first step."""
        config = self._config()
        missing = None if config.allow_cpu else environment.no_gpu()
        begun.reason = missing if config.enabled else reasons.SWITCHED_OFF()
        begun.config = config
        self._eight_bits.begin(p, config)
        self._name_settings(p, settings.infotext(config) if begun.reason is None else {})

    def _name_settings(self, p: Any, named: dict[str, Any]) -> None:
        """Let an infotext name these settings, and no others of this extension.

        In another dictionary: hosts copy a request for each image of a grid, and the copies share theirs, so an image
        would have the entries of the one before it.
        """
        others = {key: value for key, value in p.extra_generation_params.items() if key not in NAMES}
        if named or len(others) < len(p.extra_generation_params):
            p.extra_generation_params = {**others, **named}

    def _complete(self, result: Any, tally: Tally, begun: _Begun, ignored: list[str]) -> None:
        if not (tally.accelerated or tally.prepared or tally.bypassed):
            self._report.no_calls()
        params = getattr(result, "extra_generation_params", None)
        if isinstance(params, dict):
            # a copy: the host's own is what further infotexts of this request are made of
            told = {"note": self._note(begun), "ignored": ignored}
            summary = {**self._summary(tally, begun.reason), **{name: each for name, each in told.items() if each}}
            result.extra_generation_params = {**params, KEY: summary}

    def _note(self, begun: _Begun) -> str | None:
        """What its user should know, now that it is made."""
        if begun.config is None or begun.reason is not None or not begun.config.eight_bits:
            return None
        note: str | None = self._eight_bits.status(begun.config, self._statuses())["note"]
        return note

    def _summary(self, tally: Tally, reason: Reason | None) -> dict[str, Any]:
        done = {"accelerated": tally.accelerated, "prepared": tally.prepared, "original": tally.bypassed}
        why = reason or tally.reason
        said = {"reason": text(why), "code": None if why is None else why.code}
        return {"state": _state(tally), **done, "speedup": self._speedup(tally), **said}

    def _speedup(self, tally: Tally) -> float | None:
        if not tally.accelerated:
            return None
        plan = words.plan_of_last_image(self._statuses())
        times = plan["speedup"] if plan is not None else None
        return None if times is None else round(times, 2)

    def _statuses(self) -> list[dict[str, Any]]:
        return [each for attachment in self._attachments for each in attachment.status()]


def _state(tally: Tally) -> str:
    if tally.accelerated:
        return "partly accelerated" if tally.bypassed else "accelerated"
    return "prepared" if tally.prepared else "not accelerated"
