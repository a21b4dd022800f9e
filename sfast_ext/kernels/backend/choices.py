"""Which of several ways to compute the same runs a shape: the fastest, as measured on the user's own GPU.

A plan's first run measures, within a budget (`measuring`). What was measured is kept on disk, by GPU, driver and
versions. A shape that was not measured runs as the caller expects to be fastest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext import cache_folder
from sfast_ext.kernels.backend import cuda_libraries, gpu_clock, launch_log, nvrtc

logger = logging.getLogger("sfast_ext")

OWN = "torch"
"""The name of what runs a shape that was not measured."""
# another must take less than this fraction of its time
MARGIN = 0.98
# relative L2 error against its result, beyond rounding in bfloat16: versions of xformers that do not fit the GPU have
# given zeros and NaN
LIMIT = 2e-2
_ROUNDS, _RUNS = 3, 4
_ROUND = 2.0
"""Milliseconds of a round: what takes longer runs less often in it."""
_LONG = 10.0
"""Milliseconds: what takes as long is measured once."""
# clock cycles that the GPU sleeps at first, some 0.2 ms; `gpu_clock` lets it sleep longer if a launch comes later
_HEAD_START = 400_000
_FORMAT = 1

Run = Callable[[], Tensor]


class Choice(NamedTuple):
    """What runs a shape, and the milliseconds of all that were measured."""

    name: str
    milliseconds: dict[str, float]


@dataclass
class Budget:
    """Seconds that may still be spent on measurements; None without a limit."""

    left: float | None
    thorough: bool
    measured: int = 0
    """Shapes that were measured."""


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextlib.contextmanager
def measuring(seconds: float | None, thorough: bool = False) -> Iterator[Budget]:
    """Within, in this thread, shapes that are met for the first time are measured until the seconds are spent. What was
    measured is written to disk at the end. Within another such context that one's budget holds.

    Args:
        thorough: measure also what is known from another card.
    """
    outer = _budget.get()
    if outer is not None:
        yield outer
        return
    budget = Budget(seconds, thorough)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)
        for memory in list(_memories.values()):
            memory.save()


@dataclass
class Memory:
    """What was measured on one GPU, in a file; None keeps nothing."""

    file: Path | None
    machine: dict[str, Any]
    _known: dict[str, dict[str, Any]] | None = None
    _new: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, what: str, key: str) -> Choice | None:
        """What was chosen for a shape, in this process or another."""
        if self._known is None:
            self._known = self._read()
        return _valid(self._known.get(what, {}).get(key))

    def put(self, what: str, key: str, choice: Choice) -> None:
        """Remember a choice; `save` writes it."""
        self.get(what, key)
        for kept in (self._known, self._new):
            assert kept is not None
            kept.setdefault(what, {})[key] = {"chosen": choice.name, "ms": choice.milliseconds}

    def choices(self) -> dict[str, dict[str, Choice]]:
        """All that is known, by what was chosen and shape."""
        self.get("", "")
        found: dict[str, dict[str, Choice]] = {}
        for what, keys in (self._known or {}).items():
            valid = {key: _valid(kept) for key, kept in keys.items()}
            found[what] = {key: choice for key, choice in valid.items() if choice is not None}
        return found

    def save(self) -> None:
        """Write what is new, in addition to what others have written meanwhile."""
        if self.file is None or not self._new:
            return
        try:
            with cache_folder.turn(nvrtc.folder()):
                merged = self._read()
                for what, keys in self._new.items():
                    merged.setdefault(what, {}).update(keys)
                text = json.dumps({"format": _FORMAT, "machine": self.machine, "choices": merged}, indent=1)
                cache_folder.write(self.file, nvrtc.folder(), text.encode())
        except OSError as exc:
            logger.debug("choices are measured anew each time: %s", exc)
            return
        self._new = {}

    def _read(self) -> dict[str, dict[str, Any]]:
        """What the file holds; nothing if it is missing, spoilt or another format's."""
        if self.file is None:
            return {}
        try:
            kept = json.loads(cache_folder.read(self.file, nvrtc.folder()))
            found = kept["choices"] if kept["format"] == _FORMAT else {}
            return {str(what): dict(keys) for what, keys in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _valid(found: Any) -> Choice | None:
    try:
        return Choice(str(found["chosen"]), {str(name): float(ms) for name, ms in found["ms"].items()})
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


_memories: dict[torch.device, Memory] = {}


def memory_of(device: torch.device) -> Memory:
    """What was measured on a GPU, its driver and these versions."""
    if device not in _memories:
        machine = machine_of(device)
        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        file: Path | None = None
        with contextlib.suppress(RuntimeError, OSError):  # the user has no home
            file = nvrtc.folder() / f"choices-{name}.json"
        _memories[device] = Memory(file, machine)
    return _memories[device]


def machine_of(device: torch.device) -> dict[str, Any]:
    """What measurements depend on, as JSON can carry."""
    machine: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": device.type}
    machine["sources"] = _sources()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = cuda_libraries.bindings().driver
        machine["gpu"] = properties.name
        machine["multiprocessors"] = properties.multi_processor_count
        machine["driver"] = driver.cuDriverGetVersion() if driver is not None else None
        machine["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return machine


@functools.lru_cache(maxsize=None)
def _sources() -> str:
    """A digest of the kernels in CUDA C++, which are among what is measured."""
    found = hashlib.sha256()
    for file in sorted(nvrtc.SOURCES.iterdir()):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


class Choices:
    """Chooses for one operation.

    Args:
        what: its name on disk.
        clock: the milliseconds of a call.
        may_time: whether times can be taken now: not while a CUDA graph is captured.
        memory: of a device, keeps choices.
        own: the name of what runs a shape that was not measured.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[Run], float] | None = None,
        may_time: Callable[[], bool] | None = None,
        memory: Callable[[torch.device], Memory] = memory_of,
        own: str = OWN,
    ) -> None:
        self._what, self._own = what, own
        self._clock = clock or _milliseconds
        self._may_time = may_time or _outside_of_captures
        self._memory = memory
        self._chosen: dict[tuple[torch.device, str], str] = {}

    def run(
        self,
        device: torch.device,
        key: str,
        own: Run,
        others: Mapping[str, Run],
        expected: str | None = None,
        sure: bool = False,
        trials: Mapping[str, Run] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> Tensor:
        """The result of the one chosen for `key`; of the `expected` one if none is chosen yet, and none can be.

        `others` are part of the question: once a library is imported that was not, shapes are measured anew.

        Args:
            expected: the name of the one that is expected to be the fastest, by default `own`, or one of `others`.
            sure: that is known on such a card; only a thorough budget measures.
            trials: what is measured in the place of all of them, by name, that of `own` included: needed if one may not
                run twice, as it overwrites an operand.
            limits: how far the results of some may be from `own`'s, by name, by default `LIMIT`.
        """
        place = device, f"{key} of {', '.join(sorted(others))}"
        ways = trials or {self._own: own, **others}
        name = self._chosen.get(place) or self._find(*place, ways, expected or self._own, sure, limits or {})
        other = others.get(name)
        if other is None:
            return own()
        try:
            return other()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:
            logger.debug("%s by %s raised and is put aside for %s", self._what, name, key, exc_info=True)
            self._chosen[place] = self._own
            return own()

    def _find(
        self,
        device: torch.device,
        key: str,
        ways: Mapping[str, Run],
        expected: str,
        sure: bool,
        limits: Mapping[str, float],
    ) -> str:
        memory = self._memory(device)
        known = memory.get(self._what, key)
        if known is not None:
            self._chosen[device, key] = known.name
            return known.name
        budget = _budget.get()
        if budget is None or (budget.left is not None and budget.left <= 0) or not self._may_time():
            return expected
        if sure and not budget.thorough:
            return expected
        launch_log.put(launch_log.Opaque("measurements"))
        began = time.perf_counter()
        try:
            choice = self._quickest(ways, limits)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # what it was to measure says itself what is wrong with it
            logger.debug("%s is not measured", self._what, exc_info=True)
            self._chosen[device, key] = self._own
            return self._own
        if budget.left is not None:
            budget.left -= time.perf_counter() - began
        budget.measured += 1
        memory.put(self._what, key, choice)
        self._chosen[device, key] = choice.name
        return choice.name

    def _quickest(self, ways: Mapping[str, Run], limits: Mapping[str, float]) -> Choice:
        expected = ways[self._own]()
        taken = {self._own: self._clock(ways[self._own])}
        for name, other in ways.items():
            if name == self._own:
                continue
            try:
                if _alike(other(), expected, limits.get(name, LIMIT)):
                    taken[name] = self._clock(other)
                else:
                    logger.debug("%s by %s is put aside: its result is another", self._what, name)
            except Exception as exc:
                logger.debug("%s by %s is put aside: %s", self._what, name, exc)
        best = min(taken, key=lambda name: taken[name])
        chosen = best if taken[best] < MARGIN * taken[self._own] else self._own
        return Choice(chosen, {n: round(ms, 4) for n, ms in taken.items()})


def _alike(result: Tensor, expected: Tensor, limit: float) -> bool:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    expected = expected.float().flatten()
    away = result.float().flatten() - expected
    square, square_of_all = torch.stack([_square(away), _square(expected)]).tolist()
    # beyond float32 nothing is known
    return math.isfinite(square_of_all) and bool(square <= limit**2 * square_of_all)


def _square(x: Tensor) -> Tensor:
    """Of the norm of x (N,). By cuBLAS, which is loaded anyway, and takes less than 2^31 values: torch's norm takes 50
    MB of system memory for its kernels."""
    parts = [torch.dot(part, part) for part in x.split(1 << 30)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _outside_of_captures() -> bool:
    return not torch.cuda.is_current_stream_capturing()


def _milliseconds(run: Run) -> float:
    """GPU milliseconds of a run without waiting for the CPU, as in a CUDA graph: the least of a few rounds."""
    least = gpu_clock.milliseconds(run, 1, _HEAD_START)
    if least < _LONG:
        runs = max(1, min(_RUNS, int(_ROUND / max(least, 1e-3))))
        least = min(gpu_clock.milliseconds(run, runs, _HEAD_START) for _ in range(_ROUNDS))
    return least
