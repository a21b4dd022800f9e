"""Keeps the WebUI's garbage collections short.

Each time Python visits every object of the process: about a million in SD.Next and 0.75 million in AUTOMATIC1111, of
which nearly all are code and the page, made before a model is loaded. A collection takes half a second or more. It
comes once in some images, while many objects are made. SD.Next with --medvram or --lowvram collects garbage at the end
of each image in addition, and on every card at each part of an image if more than 70 % of the memory is in use ("GC
threshold").

The objects of the start are frozen (`gc.freeze`), so they are not visited again. An object that is no longer referenced
is freed as before, frozen or not; only cycles of frozen objects stay, until the WebUI unloads its scripts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from torch import nn

from sfast_ext.gc_pause import YOUNG, frozen_by_others
from sfast_ext.hosts.session import Session
from sfast_ext.report import Report

LARGE = 64 << 20
"""Bytes of parameters that are more than tests and classes make at import."""


def freeze_if_on(session: Session) -> None:
    """Freeze the objects of a WebUI's start, if the extension is on, until the session is released."""
    if session.config().enabled:
        session.installation.add(*freeze(session.report))


def freeze(report: Report) -> list[Callable[[], None]]:
    """Freeze all objects of the process, if no network is among them. To be called before a model is loaded.

    Returns:
        What undoes it; nothing if nothing was frozen.
    """
    if frozen_by_others():
        return []
    if parameter_bytes(gc.get_objects()) > LARGE:
        # accelerate's hooks make cycles of networks: a frozen one would keep its memory
        report.once("garbage", "a network is loaded already: the WebUI's garbage collections stay as long as they are")
        return []
    gc.collect(YOUNG)
    gc.freeze()
    return [gc.unfreeze]


def parameter_bytes(objects: Iterable[object]) -> int:
    """The size of all parameters of the modules among some objects."""
    # `isinstance` asks proxies for the class of what they stand for
    modules = [each for each in objects if issubclass(type(each), nn.Module)]
    held = [p for module in modules for p in module.__dict__.get("_parameters", {}).values()]
    return sum(p.numel() * p.element_size() for p in held if p is not None and p.device.type != "meta")
