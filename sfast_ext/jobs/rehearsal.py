"""Calls of the loaded model like those of its last image, at sizes that no image had yet."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sfast_ext.accelerator import Accelerator
from sfast_ext.example_call import ExampleCall, UnknownInput
from sfast_ext.jobs.kept_calls import KeptCall
from sfast_ext.plans.plan import Plan
from sfast_ext.reasons import text
from sfast_ext.report import Report, rehearsal, words_of
from sfast_ext.runtime.verify import milliseconds
from sfast_ext.ui import words
from sfast_ext.ui.requests import Refused, Wanted

MAKE_ONE = "make one image with this model first: what is prepared and measured is called as the last image was"
NO_LENGTH = "the length of the prompt cannot be chosen with this model"
TRIES = 3
"""Calls until a plan runs: the first or the second builds it. If there is none after them, the last has told why."""
ROUNDS = 7
"""Measurements of each, in turns; the median counts."""


class Rehearsal:
    """Calls one model at sizes of the user's.

    Args:
        name_images: tells the host's words how many images a call is of.
        stopped: asked between calls, and at each stage of a preparation by the host's own hook.
        one_by_one: whether the host calls the model for the prompt and for the negative prompt, one by one, if their
            lengths differ.
        kept: a call of an earlier process, to go by while there was none in this one.

    Raises:
        Refused: no image was made yet.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        report: Report,
        name_images: Callable[[int], object],
        stopped: Callable[[], bool],
        one_by_one: bool = False,
        kept: KeptCall | None = None,
    ) -> None:
        plan = template(accelerator) or (accelerator.waiting if accelerator is not None else None)
        if accelerator is None or (plan is None and kept is None):
            raise Refused(MAKE_ONE)
        self._accelerator, self._report = accelerator, report
        self._name_images, self._stopped, self._one_by_one = name_images, stopped, one_by_one
        if plan is not None:
            self._device, signature = plan.device, plan.signature
            images = words.images_of(plan.label, signature.shapes())
        else:
            assert kept is not None
            self._device, signature = next(accelerator.module.parameters()).device, kept.signature
            images = kept.wanted.images
        try:
            self._call = ExampleCall(signature)
        except UnknownInput as exc:
            raise Refused(f"{exc}; {MAKE_ONE}") from exc
        # with guidance a call has two rows for each image
        self._rows = self._call.rows // images if images else (2 if self._call.rows % 2 == 0 else 1)

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Around all calls: they belong to no image, and torch's random state is what it was, afterwards."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), rehearsal():
            yield

    def prepare(self, wanted: Wanted) -> dict[str, Any] | None:
        """Make the plans of a size. Returns what came of it; None if it was interrupted."""
        return self._row(wanted, self._calls(wanted), lambda args, kwargs: {})

    def measure(self, wanted: Wanted) -> dict[str, Any] | None:
        """Time the original forward and the accelerated one in turns; see `prepare`."""

        def timed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
            module, accelerator = self._accelerator.module, self._accelerator
            before, after = [], []
            for _ in range(ROUNDS):
                if self._stopped():
                    return None
                before.append(self._milliseconds(lambda: accelerator.run_original(*args, **kwargs)))
                after.append(self._milliseconds(lambda: module(*args, **kwargs)))
            found = {"ms_before": statistics.median(before), "ms_after": statistics.median(after)}
            return {**found, "speedup": found["ms_before"] / found["ms_after"]}

        return self._row(wanted, self._calls(wanted)[:1], timed)

    def _milliseconds(self, call: Callable[[], Any]) -> float:
        # the first call after one of the other kind lays weights out in memory (weights/host_order.py)
        call()
        return milliseconds(call, self._device, 1)

    def _calls(self, wanted: Wanted) -> list[tuple[int, int | None]]:
        """Rows and tokens of each call that an image may need. The first is that of prompts of one length."""
        images, tokens = wanted.images, wanted.tokens_of_model
        calls = [(images * self._rows, tokens)]
        if self._one_by_one and self._rows > 1 and tokens is not None and tokens > words.CHUNK:
            # a long prompt with a short negative prompt
            calls += [(images, tokens), (images, words.CHUNK)]
        return calls

    def _row(
        self,
        wanted: Wanted,
        calls: list[tuple[int, int | None]],
        then: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None],
    ) -> dict[str, Any] | None:
        row: dict[str, Any] = {"label": wanted.label, "size": f"{wanted.width}x{wanted.height}"}
        row.update(images=wanted.images, tokens=wanted.tokens, ready=False, reason=None)
        height, width = wanted.height // words.PIXELS, wanted.width // words.PIXELS
        try:
            if wanted.tokens is not None and (self._call.tokens is None or self._call.tokens % words.CHUNK):
                raise UnknownInput(NO_LENGTH)
            more: dict[str, Any] | None = {}
            with self._call.surroundings():
                self._name_images(wanted.images)
                for number, (rows, tokens) in enumerate(calls):
                    args, kwargs = self._call.inputs(height, width, rows, self._device, tokens=tokens)
                    self._accelerator.new_generation()
                    row["reason"] = self._make_ready(args, kwargs)
                    if self._stopped():
                        return None
                    if row["reason"] is not None:
                        return row
                    if number == 0:
                        more = then(args, kwargs)
            return None if more is None else {**row, "ready": True, **more}
        except UnknownInput as exc:
            return {**row, "reason": f"{exc}; make an image without what gives it, then try again"}
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return {**row, "ready": False, "reason": "the GPU has not enough memory for this size"}
        except Exception as exc:  # of the model: not every size fits every model
            return {**row, "ready": False, "reason": words_of(exc)}

    def _make_ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Call the model until its plan runs. Returns why it does not."""
        reason = None
        for _ in range(TRIES):
            if self._stopped():
                return None
            with self._report.tally() as tally:
                self._accelerator.module(*args, **kwargs)
            if tally.accelerated:
                return None
            reason = tally.reason
        return text(reason) or "this size was not prepared; the report says why"


def template(accelerator: Accelerator | None) -> Plan | None:
    """The plan that was used last; None if there is none."""
    plans = list(accelerator.plans.values()) if accelerator is not None else []
    return max(plans, key=lambda plan: plan.generation_of_use) if plans else None
