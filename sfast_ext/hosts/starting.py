"""Which session serves this host: the one that most of is known of, among those whose probes hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from sfast_ext import host_gpu, last_start
from sfast_ext.hosts.probes import Examined, could_be, examine
from sfast_ext.hosts.reasons import UNSERVED
from sfast_ext.hosts.refusal import Refusal
from sfast_ext.hosts.session import NotInstalled, Session
from sfast_ext.report import logger, words_of


class Match(NamedTuple):
    """A kind of session, and what of its probes holds in this host."""

    kind: type[Session]
    found: Examined
    is_host: bool
    """Whether the host calls itself so."""

    @property
    def holds(self) -> bool:
        """Whether all is there that cannot be done without."""
        return not self.found.required


def matches(kinds: Iterable[type[Session]]) -> list[Match]:
    """Each kind of session that this host could be served by, the best first. Those of other programs are tried only if
    none of the host's own holds."""
    kinds = tuple(kinds)
    named = {kind for kind in kinds if kind.is_host()}
    found = [Match(kind, examine(kind.PROBES), True) for kind in kinds if kind in named]
    if not any(each.holds for each in found):
        others = [kind for kind in kinds if kind not in named and could_be(kind.PROBES)]
        found += [Match(kind, examine(kind.PROBES), False) for kind in others]
    return sorted(found, key=lambda m: (not m.holds, not m.is_host, len(m.found.required), len(m.found.missing)))


def start(version: str, kinds: Iterable[type[Session]]) -> Session | None:
    """Start the session that fits this host best, in place of the one before. If none can be started, nothing stays
    in the host but a way to ask why, and the console says what is missing."""
    for kind in (kinds := tuple(kinds)):
        kind.stop()
    found = matches(kinds)
    if not found:
        print(f"Stable Fast {version} does nothing: this WebUI is not known; {', '.join(names(kinds))} are.")
        return None
    best = found[0]
    choose_gpu()
    if best.holds:
        try:
            session = best.kind.start(version, best.found)
        except NotInstalled as exc:
            _refuse(version, best, str(exc))
            return None
        lines = [session.greeting(), *(f"Stable Fast: {line}" for line in session.lost())]
        for line in lines:
            session.say(line)
        _keep(session, session.remarks())
        return session
    _refuse(version, best, "; ".join(map(str, best.found.required)))
    return None


def choose_gpu() -> None:
    """Tell the core which GPU the host computes on, see `host_gpu`. All these hosts say it in `modules.devices`."""
    device: Any = None
    with contextlib.suppress(Exception):  # what is missing is told of by the probes
        from modules import devices

        device = getattr(devices, "device", None)
    host_gpu.use(device if isinstance(device, torch.device) else None)


def names(kinds: Iterable[type[Session]]) -> list[str]:
    """Those of hosts."""
    return [kind.HOST for kind in kinds]


def _refuse(version: str, match: Match, missing: str) -> None:
    what = UNSERVED(missing)
    print(f"Stable Fast {version} does nothing in {match.kind.HOST}: {missing}.")
    try:
        session = match.kind(version, match.found)
        _keep(session, [str(what)])
        Refusal(session, what).install()
    except Exception as exc:  # of a host in which this cannot be shown either
        logger.warning("the badge does not say so: %s", words_of(exc))


def _keep(session: Session, lines: list[str]) -> None:
    told = {"version": session.version, "host": f"{session.HOST} {session.host_version()}", "lines": lines}
    try:
        last_start.keep(told)
    except (OSError, RuntimeError) as exc:
        session.report.once("last start", f"not kept for doctor: {exc}")
