"""Which session serves this host: the one that most of is known of, among those whose probes hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sfast_ext.hosts.probes import Found, could_be, examine
from sfast_ext.hosts.session import NotInstalled, Session


class Match(NamedTuple):
    """A kind of session, and what of its probes holds in this host."""

    kind: type[Session]
    found: Found
    is_host: bool
    """Whether the host calls itself so."""

    @property
    def holds(self) -> bool:
        """Whether all is there that cannot be done without."""
        return not self.found.required


def matches(kinds: Iterable[type[Session]]) -> list[Match]:
    """Each kind of session that this host could be served by, the best first."""
    found = [
        Match(kind, examine(kind.PROBES), kind.is_host())
        for kind in kinds
        if kind.is_host() or could_be(kind.PROBES)
    ]
    return sorted(found, key=lambda m: (not m.holds, not m.is_host, len(m.found.required), len(m.found.missing)))


def start(version: str, kinds: Iterable[type[Session]]) -> Session | None:
    """Start the session that fits this host best, in place of the one before. If none can be started, nothing stays
    in the host, and the console and the badge say what is missing."""
    for kind in (kinds := tuple(kinds)):
        kind.stop()
    found = matches(kinds)
    if not found:
        return None
    best = found[0]
    why = "; ".join(map(str, best.found.required))
    if best.holds:
        try:
            session = best.kind.start(version, best.found)
        except NotInstalled as exc:
            why = str(exc)
        else:
            session.say(session.greeting())
            for line in session.lost():
                session.say(f"Stable Fast: {line}")
            return session
    print(f"Stable Fast {version} does nothing in {best.kind.HOST}: {why}.")
    return None
