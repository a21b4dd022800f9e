"""Which of the programs that are called Forge this is, and whether the adapter knows it."""

from __future__ import annotations

import hashlib
from pathlib import Path

KNOWN = ("2.26",)
"""Releases of Forge Neo that the adapter was run in; see the README's table of hosts."""

CLASSIC = "classic"
KNOWN_CLASSIC = {"661502f4784b7e5d": "1.11, 1.12"}
"""Digests of the files of Forge Classic that the adapter was run with (`_digest`), as it does not say its release; and
the releases that they are of."""
_READ = ("model_base", "model_management", "model_patcher", "ops")
"""Modules of `ldm_patched.modules` whose names and behaviour the adapter relies on."""


def unknown(version: str, release: str | None) -> str | None:
    """Why nothing is accelerated, in words for the user; None in a version that the adapter knows.

    Args:
        version, release: those of the host's `modules_forge.forge_version`. Forge Classic's release is a digest; other
            programs have none.
    """
    classics = ", ".join(KNOWN_CLASSIC.values())
    known = f"Forge Neo {', '.join(KNOWN)} and Forge Classic {classics} are"
    if version == "neo":
        if release in KNOWN:
            return None
        return f"this release of Forge Neo ({release or 'an older one'}) is not known; {known}"
    if version == CLASSIC:
        return None if release in KNOWN_CLASSIC else f"this Forge Classic is not known; {known}"
    return f"Forge and reForge ({version}) are not supported; {known}"


def found() -> tuple[str, str | None]:
    """Version and release of the host."""
    try:
        from modules_forge import forge_version
    except ImportError:
        return "of an unknown version", None
    version, release = str(getattr(forge_version, "version", "unknown")), getattr(forge_version, "release", None)
    if version == CLASSIC:
        return version, _digest()
    return version, None if release is None else str(release)


def words() -> str:
    """Version and release as a user knows them."""
    version, release = found()
    return " ".join(each for each in (version, KNOWN_CLASSIC.get(release or "", release)) if each)


def _digest() -> str | None:
    """Of Forge Classic's files; None where one is missing."""
    found = hashlib.sha256()
    try:
        from ldm_patched import modules

        for name in _READ:
            text = Path(next(iter(modules.__path__)), f"{name}.py").read_text(encoding="utf-8")
            found.update("\n".join(text.splitlines()).encode())
    except (ImportError, OSError, StopIteration):
        return None
    return found.hexdigest()[:16]
