"""Failures of ours, made on purpose, and the pair of a model and its untouched twin that they are tried on."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz.compare import compare_modules, places
from fuzz.nets import Request, arguments, make, move
from torch import nn

from sfast_ext import Config, Hooks, accelerate, accelerator_of, call_signature, environment, passes
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.backend import nvrtc, trial
from sfast_ext.plans import graph_pool, plan, recapture
from sfast_ext.runtime import model_state, plan_builder, plan_maker, residency, verify
from sfast_ext.runtime.verify import relative_error

CPU = Config(allow_cpu=True)
# fp32 sums in another order
EXACT = 1e-4
# two roundings to fp16 of the same sums
HALF = 2e-2


OOM = torch.cuda.OutOfMemoryError


class Injected(RuntimeError):
    """A failure made on purpose."""


class Fault:
    """Stands in the place of a function, and raises."""

    def __init__(self, real: Any, kind: Callable[[str], Exception], done: bool) -> None:
        self.real, self.kind, self.done = real, kind, done
        self.times = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        if self.done:
            self.real(*args, **kwargs)
        raise self.kind("injected")

    def __get__(self, instance: Any, owner: Any) -> Any:
        # in the place of a method, it is called with the object
        return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)


def failing(
    patch: pytest.MonkeyPatch, home: Any, name: str, kind: Callable[[str], Exception] = Injected, *, done: bool = False
) -> Fault:
    """Break `home.name`; with `done`, only after it has done its work. In a kernel's file, the kernel's as well."""
    fault = Fault(getattr(home, name), kind, done)
    patch.setattr(home, name, fault)
    if name in ("reference", "fallback"):
        patch.setattr(home.launch, name, fault)
    return fault


class Pair:
    """A model under an accelerator, and its twin that never knew one."""

    def __init__(
        self, kind: str = "small", config: Config = CPU, hooks: Hooks | None = None, *, gpu: bool = False
    ) -> None:
        self.kind, self.gpu = kind, gpu
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        self.dtype = torch.float16 if gpu else torch.float32
        self.twin = make(kind, 0)
        move(self.twin, self.device)
        nn.Module.to(self.twin, self.dtype)
        self.ours = copy.deepcopy(self.twin)
        self.rng = random.Random(0)
        self.held = places(self.ours)
        self.acc = accelerate(self.ours, config, hooks=hooks or Hooks())

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        change(self.ours)
        change(self.twin)

    def same(
        self,
        times: int = 1,
        *,
        dtype: torch.dtype | None = None,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **ask: Any,
    ) -> None:
        """Calls with new inputs, compared with the twin's: to the bit if the original forward gave the result."""
        for _ in range(times):
            args, kwargs = arguments(Request(**ask), self.rng, dtype or self.dtype, kind=self.kind, device=self.device)
            if change is not None:
                args = (change(args[0]), *args[1:])
            before, alike = self.runs, self.laid_out_alike()
            ours, theirs = self.ours(*args, **kwargs)["sample"], self.twin(*args, **kwargs)["sample"]
            if self.runs == before and alike and self.laid_out_alike() and not self.gpu:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            else:
                # a layout that the plans chose rounds otherwise, and a GPU chooses its algorithms anew
                assert relative_error([ours], [theirs]) < (HALF if self.gpu else EXACT)
                assert torch.equal(ours.isfinite(), theirs.isfinite())

    def laid_out_alike(self) -> bool:
        return all(a.stride() == b.stride() for a, b in zip(self.ours.parameters(), self.twin.parameters()))

    @property
    def runs(self) -> int:
        """Calls whose result was a plan's."""
        return self.counter("eager_runs") + self.counter("replays")

    def plan_runs_again(self, times: int = 2, **ask: Any) -> None:
        before = self.runs
        self.same(times, **ask)
        assert self.runs > before, self.words()

    def counter(self, name: str) -> int:
        return self.acc.report.counter(name)

    def words(self) -> str:
        """All that the report says."""
        report = self.acc.report.as_dict()
        return " | ".join([str(report["last_error"]), *report["reasons"], *(e["message"] for e in report["events"])])

    def error(self) -> str:
        """What failed last, and where."""
        last = self.acc.report.as_dict()["last_error"]
        assert last is not None
        return f"{last['stage']}: {last['message']}"

    def release(self) -> None:
        """Afterwards the model is one that was never touched."""
        self.acc.release()
        self.untouched()

    def untouched(self) -> None:
        compare_modules(self.ours, self.twin)
        assert places(self.ours) == self.held and accelerator_of(self.ours) is None
        for ours, theirs in zip(self.ours.modules(), self.twin.modules()):
            assert ours.__dict__.keys() == theirs.__dict__.keys()
        self.same()


@dataclass(frozen=True)
class Stage:
    """Where a failure is made, and the words by which the report is to name it."""

    home: Any
    name: str
    words: str
    kind: Callable[[str], Exception] = Injected
    done: bool = False
    tries: int = 1

    def fail(self, pair: Pair, patch: pytest.MonkeyPatch) -> Fault:
        home = pair.acc.hooks if self.home is Hooks else self.home
        return failing(patch, home, self.name, self.kind, done=self.done)


@dataclass(frozen=True)
class PassStage(Stage):
    """The pass of this number in the list raises when its work is done."""

    number: int = 0

    def fail(self, pair: Pair, patch: pytest.MonkeyPatch) -> Fault:
        entry = passes.PASSES[self.number]
        fault = Fault(entry.function, self.kind, True)
        patch.setattr(passes, "PASSES", [*passes.PASSES])
        passes.PASSES[self.number] = entry._replace(function=fault)
        return fault


@dataclass(frozen=True)
class KernelStage(Stage):
    """A kernel raises: a function of its file that it calls."""

    def fail(self, pair: Pair, patch: pytest.MonkeyPatch) -> Fault:
        return failing(patch, self.home, self.name, self.kind)


class Counting:
    """Counts the captures that are begun."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.times, self._real = 0, plan_builder.capture
        patch.setattr(plan_builder, "capture", self)

    def __call__(self, *args: Any) -> Any:
        self.times += 1
        return self._real(*args)


class PretendedGPU:
    """Says that it is a GPU. Its tensors lie on the CPU, its graphs run again what they recorded.

    What decides about graphs, memory and eviction is the project's own; only the calls into CUDA are stood in for.
    """

    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return other is self or other == torch.device("cpu")

    def __hash__(self) -> int:
        return hash("pretended")

    def __str__(self) -> str:
        return "cuda:0"


class PretendedEvent(mock.Mock):
    """An event; each run takes a millisecond."""

    def elapsed_time(self, _end):
        return 1.0


class PretendedGraph:
    """Stands in for torch.cuda.CUDAGraph, as torch 2.1 has it: one that was reset must not be destroyed."""

    there: weakref.WeakSet[PretendedGraph] = weakref.WeakSet()
    capturing: PretendedGraph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self.again: Callable[[], Any] | None = None
        self.kept = keep_graph
        self.there.add(self)

    def capture_begin(self, **_: Any) -> None:
        assert PretendedGraph.capturing is None
        PretendedGraph.capturing = self

    def capture_end(self) -> None:
        assert PretendedGraph.capturing is self
        PretendedGraph.capturing = None

    def instantiate(self) -> None:
        assert self.kept and PretendedGraph.capturing is None

    def raw_cuda_graph(self) -> int:
        return id(self)

    raw_cuda_graph_exec = raw_cuda_graph

    def reset(self) -> None:
        raise AssertionError("in torch 2.1 the destructor releases the pool once more, and the process ends")

    def replay(self) -> None:
        assert self.again is not None and PretendedGraph.capturing is None
        self.again()


class PretendedStream:
    """Stands in for torch.cuda.Stream: there is one, whose work is done at once."""

    cuda_stream = 0

    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Any: ...


def stand_in_for_cuda(patch: pytest.MonkeyPatch, **others: Any) -> None:
    """Stand in for the calls into CUDA that graphs and streams make, and for those named."""
    nothing = contextlib.nullcontext()
    importlib.import_module("torch._dynamo")  # torch 2.5 looks at the class of events when it is imported
    patch.setattr(graph_pool, "_pools", {})
    patch.setattr(graph_pool, "_own_random_state", lambda device: nothing)
    patch.setattr(graph_pool, "current_stream", lambda index: 0)
    patch.setattr(trial, "unsupported", lambda device: None)
    patch.setattr(nvrtc, "bind", lambda index: None)
    patch.setattr(nvrtc, "current_stream", lambda index: 0)
    # by the times here a graph that was evicted would stay away for a while
    patch.setattr(recapture.Recapture, "is_due", lambda self, with_ms: True)
    patch.setattr(plan_maker, "channels_last_pays", lambda graph, device: True)
    patch.setattr(attention, "_PREFERENCE", None)  # nothing is measured
    # one run of each: nobody looks at the second
    for name in ("quickest", "milliseconds"):
        patch.setattr(verify, name, lambda run, device, times=1: (run(), 1.0)[1])
    patch.setattr(verify, "CLEARLY_FASTER", 1.0)
    stream = PretendedStream()
    for name, stand_in in {
        "CUDAGraph": PretendedGraph, "Event": PretendedEvent, "Stream": PretendedStream,
        "current_stream": lambda device: stream, "stream": lambda stream: nothing,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None, "graph_pool_handle": object,
        "device": lambda device: nothing,
        "get_device_capability": lambda device=None: (8, 6),
        **others,
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(PretendedGraph, "there", weakref.WeakSet())
    patch.setattr(PretendedGraph, "capturing", None)


def pretend_a_gpu(patch: pytest.MonkeyPatch) -> graph_pool.GraphPool:
    """From now on the model's device passes for a GPU; its graph pool."""
    device: Any = PretendedGPU()
    cpu = torch.device("cpu")
    patch.setattr(model_state.ModuleContext, "device", lambda self: device)
    for room in (call_signature, plan):
        patch.setattr(room, "as_tensor", lambda leaf, _, real=call_signature.as_tensor: real(leaf, cpu))
    stand_in_for_cuda(patch, memory_reserved=lambda device: 0, mem_get_info=lambda device: (0, 0))
    patch.setattr(residency, "room", lambda device: 1 << 40)
    patch.setattr(environment, "gpu_memory", lambda device=None: None)
    honest = graph_pool.GraphPool._capture

    def capture(
        pool: graph_pool.GraphPool, run: Callable[[], list[torch.Tensor]], expected: int
    ) -> graph_pool.CapturedGraph:
        captured = honest(pool, run, expected)
        captured.graph.again = lambda: [o.copy_(n) for o, n in zip(captured.outputs, run())]
        return captured

    patch.setattr(graph_pool.GraphPool, "_capture", capture)
    return graph_pool.pool_of(device)


class WhileCapturing(Fault):
    """Raises only if a graph is being captured."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if PretendedGraph.capturing else self.real(*args, **kwargs)


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class InTheMidst(Fault):
    """Raises if a graph is being captured, after the kernels were recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if capturing() else self.real(*args, **kwargs)


def greedy(_: str) -> Exception:
    """The allocator's own exception."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except OOM as exc:
        return exc
    raise AssertionError("a petabyte was to be had")


def usable() -> None:
    torch.cuda.synchronize()
    assert not capturing() and torch.ones(3, device="cuda").sum().item() == 3
    # hosts draw their noise from the default generator
    torch.randn(3, device="cuda")
    torch.cuda.empty_cache()


WITHOUT_TRITON = """
import sys
import weakref
sys.modules["triton"] = None
sys.path[:0] = ["tests"]
import torch
import sfast_ext
from sfast_ext import environment
from sfast_ext.cli import main
from faulty import Pair

torch.set_grad_enabled(False)
pair = Pair()
pair.same(3)
assert pair.runs == 2, pair.words()
pair.release()
main(["doctor", "--json"])
"""

SYNCHRONISES = """
import sys
import weakref
sys.path[:0] = ["tests"]
import torch
from faulty import Pair
from sfast_ext import Config
from sfast_ext.plans.plan import Plan

torch.set_grad_enabled(False)
honest, times = Plan._run_static, []

def waits(plan):
    if torch.cuda.is_current_stream_capturing():
        times.append(torch.ones(1, device="cuda").item())
    return honest(plan)

Plan._run_static = waits
pair = Pair(config=Config(drop_slower=False, tolerance=0.05), gpu=True)
pair.same(4)
assert pair.counter("eager_runs") == 3 and "runs without a CUDA graph" in pair.words(), pair.words()
Plan._run_static = honest
pair.acc.configure(Config(drop_slower=False, tolerance=0.05, max_graphs=3))
pair.same(3)
assert pair.counter("replays") == 3, pair.words()
pair.release()
torch.cuda.empty_cache()
assert torch.ones(3, device="cuda").sum().item() == 3
print("{}")
"""

COMPUTES = """
import json, sys
sys.path[:0] = ["tests"]
import torch
from faulty import Pair
from sfast_ext import Config

torch.set_grad_enabled(False)
pair = Pair(config=Config(drop_slower=False, tolerance=0.05), gpu=True)
pair.same(3)
print(json.dumps({"runs": pair.runs, "errors": pair.counter("errors"), "words": pair.words()}))
pair.release()
"""


def python(script: str, **environment: str) -> Any:
    """Runs a script in a process of its own; what it printed, as JSON."""
    words = [sys.executable, "-c", script]
    where: dict[str, Any] = {"cwd": Path(__file__).parents[1], "env": {**os.environ, **environment}}
    done = subprocess.run(words, **where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
