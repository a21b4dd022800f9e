"""Keeps the WebUI's garbage collections short.

Each time Python visits every object of the process: about a million in SD.Next and 0.75 million in AUTOMATIC1111, of
which nearly all are code and the page, made before a model is loaded. A collection takes half a second or more. It
comes by itself in the middle of some images. SD.Next with --medvram or --lowvram collects garbage at the end of each
image in addition, and on every card at each part of an image if more than 70 % of the memory is in use ("GC
threshold").

The objects of the start are frozen (`gc.freeze`), so they are not visited again. Python then collects more often by
itself, as a smaller part of what is left has to be new. An object that is no longer referenced is freed as before,
frozen or not. Only cycles that frozen objects are part of stay, with what they refer to, until the WebUI unloads its
scripts. It loads them again with a network there, and then nothing is frozen.
"""

from __future__ import annotations

from collections.abc import Callable

from sfast_ext import gc_pause
from sfast_ext.hosts.session import Session
from sfast_ext.report import Report


def freeze_if_on(session: Session) -> None:
    """Freeze the objects of a WebUI's start, if the extension is on, until the session is released."""
    if session.config().enabled:
        session.installation.add(*freeze(session.report))


def freeze(report: Report) -> list[Callable[[], None]]:
    """Freeze all objects of the process, if no network is among them. To be called before a model is loaded.

    Returns:
        What undoes it; nothing if nothing was frozen.
    """
    if gc_pause.some_are_frozen():
        return []
    if not gc_pause.freeze():
        report.once("garbage", "a network is loaded already: the WebUI's garbage collections stay as long as they are")
        return []
    return [gc_pause.thaw]
