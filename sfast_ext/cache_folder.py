"""Folders of compiled code, which runs with all the rights of the user: one where others may have put something is
neither read nor written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_LOOKED_AT = os.name != "nt"  # the modes that Windows tells say nothing of who may write
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def refusal(path: Path, root: Path) -> str | None:
    """Why no compiled code is taken from a file or folder, or kept there; None where it may be, and where it is not
    there.

    Looked at are `root`, a cache folder of ours, and all in it that leads to `path`. What lies above is not: who may
    put another folder in the place of ours there is that folder's owner.
    """
    if not _LOOKED_AT:
        return None
    within = (each for each in reversed(path.parents) if each == root or root in each.parents)
    for each in (*within, path):
        try:
            owners, mode = (each.lstat().st_uid, each.stat().st_uid), each.stat().st_mode
        except OSError:
            return None  # nor can it be opened
        reason = _reason(each, owners, mode)
        if reason is not None:
            return reason
    return None


def make(folder: Path, root: Path) -> None:
    """Make a folder, and those that lead to it, for this user alone.

    Raises:
        PermissionError: it is refused, or one of those from `root` on; the message says why.
        OSError: it cannot be made.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            _check(each, root)
            each.mkdir(mode=0o700, exist_ok=True)
    _check(folder, root)


def read(file: Path, root: Path) -> bytes:
    """What a file of compiled code holds.

    Raises:
        PermissionError: the file is refused, or a folder that leads to it; the message says why.
        OSError: it cannot be read.
    """
    _check(file.parent, root)
    with file.open("rb") as opened:
        found = os.fstat(opened.fileno())  # of what is read, whatever takes its place meanwhile
        reason = _reason(file, (found.st_uid,), found.st_mode) if _LOOKED_AT else None
        if reason is not None:
            raise PermissionError(reason)
        return opened.read()


def _check(path: Path, root: Path) -> None:
    reason = refusal(path, root)
    if reason is not None:
        raise PermissionError(reason)


def _reason(path: Path, owners: tuple[int, ...], mode: int) -> str | None:
    if any(owner != os.getuid() for owner in owners):
        what, do = f"{path} belongs to another user", "remove it"
    elif mode & _OTHERS_WRITE:
        what, do = f"Other users may write to {path}", f"take that from them (chmod go-w {path})"
    else:
        return None
    return (
        f"{what}, so no compiled code is taken from it or kept there; {do}, or set TORCH_EXTENSIONS_DIR and"
        " SFAST_CACHE_DIR to folders of your own"
    )
