"""Gets ready for the first image while the host is idle after its start: makes the plan of the call that an earlier
process made last. It ends as soon as somebody wants an image."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from sfast_ext import host_gpu
from sfast_ext.accelerator import Accelerator
from sfast_ext.jobs.kept_calls import KeptCall, KeptCalls
from sfast_ext.jobs.measurements import kind_of
from sfast_ext.jobs.rehearsal import template
from sfast_ext.jobs.rehearsals import Rehearsals
from sfast_ext.plans.plan import Plan
from sfast_ext.report import Report
from sfast_ext.ui import words
from sfast_ext.ui.requests import Refused, Wanted

QUIET_S = 3.0
"""Seconds without a job of the host's, its model being loaded, before it begins."""
LOOK_S = 0.25
WATCH_S = 0.01
"""Seconds between looks for somebody who waits, while it is at work."""
GIVE_UP_S = 600.0
"""Seconds after the start: a model that is loaded later comes with the user's first image."""
SMALL_CARD = 23 << 29
"""Bytes of a card on which memory is left alone: 11.5 GiB, so that cards sold with 12 GB are none."""
ROOM = 4 << 30
"""Bytes that must be free, in addition to as many as the weights take."""
GPU_ALONE = True
"""Whether models on a CPU are left alone. Nothing would be gained."""


class Host(Protocol):
    """What is asked of a session."""

    report: Report

    def prepares_ahead(self) -> bool:
        """Whether the user's settings and the host's flags permit it."""

    def loaded(self) -> Accelerator | None:
        """The accelerator of the UNet that is loaded."""

    def busy(self) -> bool:
        """Whether the host is at a job."""


class Ahead:
    """Of one session.

    Args:
        waiting: whether somebody waits for the host's queue; None if the host does not tell.
    """

    def __init__(
        self,
        host: Host,
        rehearsals: Rehearsals,
        waiting: Callable[[], bool | None],
        kept: KeptCalls | None = None,
    ) -> None:
        self._host, self._rehearsals, self._waiting = host, rehearsals, waiting
        self._kept = KeptCalls() if kept is None else kept
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._working = False
        # weak: it outlives the plans, which hold graphs of the model
        self._remembered: weakref.ref[Plan] | None = None
        self._generation = 0
        rehearsals.before_users_job = self.end

    def start(self) -> None:
        """Wait, in a thread, until the host is idle, and get ready then. Once for each session."""
        if self._thread is None and not self._over.is_set():
            self._thread = threading.Thread(target=self._run, name="sfast: ahead", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until nothing more is done. Returns whether that is so."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def end(self) -> None:
        """Begin nothing any more. What is under way ends before this returns."""
        self._over.set()
        if self._working:
            self._rehearsals.jobs.close()

    def image_begins(self) -> None:
        """An image is made from now on, whether the host's queue was waited for or not."""
        if not self._over.is_set():
            self.end()
        last = template(self._host.loaded())
        self._generation = 0 if last is None else last.generation_of_use

    def remember(self) -> None:
        """Keep how the model was called first for the image that has ended, if that is another call than before."""
        accelerator = self._host.loaded()
        plans = [] if accelerator is None else list(accelerator.plans.values())
        # a later pass of the image, such as that of hires fix, is of another size
        used = [plan for plan in plans if plan.generation_of_use > self._generation]
        plan = min(used, key=lambda plan: plan.generation_of_use, default=None)
        known = None if self._remembered is None else self._remembered()
        if accelerator is None or plan is None or plan is known or not self._host.prepares_ahead():
            return
        self._remembered = weakref.ref(plan)
        shapes = plan.signature.shapes()
        latent = words.latent_of(shapes)
        if latent is None or (GPU_ALONE and plan.device.type != "cuda"):
            return
        images = words.images_of(plan.label, shapes) or 1
        wanted = Wanted(latent[-1] * words.PIXELS, latent[-2] * words.PIXELS, images)
        try:
            self._kept.keep(_kind(accelerator.module), KeptCall(wanted, plan.signature))
        except (OSError, RuntimeError, ValueError) as exc:
            self._host.report.once("last call", f"not kept for the next start: {exc}")

    def _run(self) -> None:
        began = time.monotonic()
        quiet_since: float | None = None
        try:
            while not self._over.wait(LOOK_S):
                now = time.monotonic()
                waiting = self._waiting()
                if now - began > GIVE_UP_S or waiting is None or not self._host.prepares_ahead():
                    return
                idle = not waiting and not self._host.busy()
                quiet_since = (quiet_since or now) if idle and self._host.loaded() is not None else None
                if quiet_since is not None and now - quiet_since >= QUIET_S:
                    self._get_ready()
                    return
        except Exception as exc:
            self._host.report.error("preparing ahead", exc)

    def _get_ready(self) -> None:
        accelerator = self._host.loaded()
        kept = self._kept.of(_kind(accelerator.module)) if accelerator is not None else None
        if kept is None or not self._fits(accelerator):
            return
        jobs = self._rehearsals.jobs
        self._working = True
        try:
            self._rehearsals.ahead(kept, self._fits)
            while (status := jobs.status()) is not None and status["state"] in ("waiting", "running"):
                if self._over.is_set() or self._waiting() is not False:
                    jobs.cancel()
                time.sleep(WATCH_S)
            self._host.report.event("ahead", f"{kept.wanted.label}: {status['state'] if status else 'nothing'}")
        except Refused:
            pass  # the user has started a job
        finally:
            self._working = False

    def _fits(self, accelerator: Accelerator | None) -> bool:
        """Whether a plan of this model is still to be made, and may be."""
        if accelerator is None or accelerator.plans or self._over.is_set() or not self._host.prepares_ahead():
            return False
        weights = list(accelerator.module.parameters())
        devices = {weight.device for weight in weights}
        if len(devices) != 1:
            return False
        (device,) = devices
        if device.type != "cuda":
            return not GPU_ALONE and device.type == "cpu"
        total = torch.cuda.get_device_properties(device).total_memory
        free = torch.cuda.mem_get_info(device)[0]
        return total >= SMALL_CARD and free >= ROOM + sum(weight.numel() * weight.element_size() for weight in weights)


def _kind(module: nn.Module) -> str:
    """The kind of a model and the card that it is on: WebUIs on two cards make images of sizes of their own."""
    first = next(module.parameters(), None)
    card = "" if first is None else host_gpu.card(first.device)
    return f"{kind_of(module)} {card}".rstrip()
