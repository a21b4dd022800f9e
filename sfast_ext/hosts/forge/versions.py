"""Which of the programs that are called Forge this is, and whether the adapter knows it."""

from __future__ import annotations

KNOWN = ("2.26",)
"""Releases of Forge Neo that the adapter was run in; see the README's table of hosts."""


def unknown(version: str, release: str | None) -> str | None:
    """Why nothing is accelerated, in words for the user; None in a version that the adapter knows.

    Args:
        version, release: those of the host's `modules_forge.forge_version`. Releases of other programs have none.
    """
    known = f"Forge Neo {', '.join(KNOWN)} is"
    if version == "neo":
        if release in KNOWN:
            return None
        return f"this release of Forge Neo ({release or 'an older one'}) is not known; {known}"
    if version == "classic":
        return f"Forge Classic is not supported; {known}"
    return f"Forge and reForge ({version}) are not supported; {known}"


def found() -> tuple[str, str | None]:
    """Version and release of the host."""
    try:
        from modules_forge import forge_version
    except ImportError:
        return "of an unknown version", None
    release = getattr(forge_version, "release", None)
    return str(getattr(forge_version, "version", "unknown")), None if release is None else str(release)
