"""Folders of compiled code, which runs with all the rights of the user: one where others may have put something is
neither read nor written."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_turns: Any
if os.name == "nt":
    import msvcrt as _turns
else:
    import fcntl as _turns

_ROOT = 0  # may do anything in any case, and puts files into images of containers
WAIT_S = 2.0
"""So long a process waits for others that change the same file. What a process that hangs keeps is not worth more."""
_LOOKED_AT = os.name != "nt"  # the modes that Windows tells say nothing of who may write


def refusal(path: Path, root: Path) -> str | None:
    """Why no compiled code is taken from a file or folder, or kept there; None if it may be, or if it is not there.

    It looks at `root`, the extension's cache folder, and at all in it that leads to `path`. It does not look at what
    lies above: whoever may put another folder in its place is that folder's owner.
    """
    if not _LOOKED_AT:
        return None
    within = (each for each in reversed(path.parents) if each == root or root in each.parents)
    for each in (*within, path):
        try:
            link, found = each.lstat(), each.stat()
        except OSError:
            return None  # nor can it be opened
        reason = _reason(each, link, found)
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
        reason = _reason(file, found) if _LOOKED_AT else None
        if reason is not None:
            raise PermissionError(reason)
        return opened.read()


def write(file: Path, root: Path, content: bytes) -> None:
    """Write a file for this user alone, whole or not at all.

    Raises:
        PermissionError: a folder that leads to it is refused; the message says why.
        OSError: it cannot be written.
    """
    make(file.parent, root)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """Within, no other process that asks changes what this folder keeps: to read a file, add to it and write it.

    Files are written whole in any case; without a turn, the later of two writers undoes what the other added. If the
    folder allows no turns, as some network drives, or another process keeps it for too long, there is none.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            make(root, root)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            handle = os.open(root / ".turn", flags, 0o600)
            held.callback(os.close, handle)
            until = time.monotonic() + WAIT_S
            while not _taken(handle) and time.monotonic() < until:
                time.sleep(0.01)
        yield


def _taken(handle: int) -> bool:
    try:
        if os.name == "nt":
            _turns.locking(handle, _turns.LK_NBLCK, 1)
        else:
            _turns.flock(handle, _turns.LOCK_EX | _turns.LOCK_NB)
    except OSError:
        return False
    # closing the file gives it back
    return True


def _check(path: Path, root: Path) -> None:
    reason = refusal(path, root)
    if reason is not None:
        raise PermissionError(reason)


def _reason(path: Path, *found: os.stat_result) -> str | None:
    *_, last = found
    if any(each.st_uid not in (os.getuid(), _ROOT) for each in found):
        what, do = f"{path} belongs to another user", "remove it"
    elif last.st_mode & stat.S_IWOTH or (last.st_mode & stat.S_IWGRP and not _is_private(last.st_gid)):
        what, do = f"Other users may write to {path}", f"take that from them (chmod go-w {path})"
    else:
        return None
    return (
        f"{what}, so no compiled code is taken from it or kept there; {do}, or set SFAST_CACHE_DIR"
        " to a folder of your own"
    )


def _is_private(group: int) -> bool:
    """Whether a group is the user's own, which Debian and Fedora give each user, who lets it write to all files."""
    import grp
    import pwd

    try:
        user, known = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and known.gr_name == user.pw_name and {*known.gr_mem} <= {user.pw_name}
