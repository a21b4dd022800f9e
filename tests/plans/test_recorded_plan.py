"""Plans without a CUDA graph repeat their launches if the CPU takes longer with them than the GPU, and wait with the
capture of one that was evicted."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from faulty import Pair, pretend_a_gpu
from torch import nn

from benchmarks import vaes
from sfast_ext import Config, accelerate
from sfast_ext.kernels.backend import graph_memory, nvrtc
from sfast_ext.plans import plan, recapture, register_machine
from sfast_ext.plans.graph_pool import GraphPool, NoGraph
from sfast_ext.plans.recapture import Recapture
from sfast_ext.plans.recorded_run import CannotRepeat, RecordedRun
from sfast_ext.runtime import verify
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.tools.lib import models

IS_DUE = Recapture.is_due
GRAPHS = Config(allow_cpu=True, triton=False)
WITHOUT = Config(allow_cpu=True, triton=False, cuda_graphs=False)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def only_plan(pair: Pair) -> Any:
    (found,) = pair.acc.plans.values()
    return found


def scaled(module: nn.Module) -> None:
    for p in module.parameters():
        p.mul_(1.01)


def replaced(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = 0.99 * p.data


def test_a_plan_repeats_its_launches_with_the_weights_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    pair = Pair(config=WITHOUT)
    pair.same(1)
    made = only_plan(pair)
    assert made._recorded and not made.has_graph
    runs: list[bool] = []
    real = RecordedRun.__call__

    def counted(self: RecordedRun, *inputs: torch.Tensor) -> list[torch.Tensor]:
        runs.append(self._as_recorded([*inputs, *self._program.tensors()]))
        return real(self, *inputs)

    monkeypatch.setattr(RecordedRun, "__call__", counted)
    pair.plan_runs_again(2)
    for change in (scaled, replaced):
        pair.both(change)
        pair.plan_runs_again(2)
    assert only_plan(pair) is made and len(runs) >= 6 and all(runs)
    pair.release()


def test_runs_for_a_host_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(Recapture, "ran", lambda self, with_graph, seconds: ran.append(with_graph))
    pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    pair.same(1)
    assert not ran
    pair.plan_runs_again(3)
    assert ran == [True, True, True] and only_plan(pair).has_graph
    only_plan(pair).drop_graph()
    monkeypatch.setattr(Recapture, "is_due", lambda self, with_ms: False)
    pair.plan_runs_again(2)
    assert ran[3:] == [False, False]
    pair.release()


def test_where_the_gpu_takes_longer_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: time.sleep(0.3))
    pair = Pair(config=WITHOUT)
    pair.same(3)
    made = only_plan(pair)
    assert not made._recorded and not made.records_now() and "launches" not in pair.words()
    pair.release()


def test_a_run_that_cannot_be_repeated_is_said_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)

    def refuse(*_: Any) -> Any:
        raise CannotRepeat("a tensor comes from elsewhere")

    monkeypatch.setattr(plan, "RecordedRun", refuse)
    pair = Pair(config=WITHOUT)
    pair.same(3)
    assert only_plan(pair)._recorded is False and pair.counter("eager_runs") == 2
    assert "they are not repeated: CannotRepeat: a tensor comes from elsewhere" in pair.words()
    pair.release()


def test_a_recording_that_is_made_is_used_as_one_whatever_happens_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    times = iter([(1.0, 1.0)])

    def clocked(*_: Any) -> tuple[float, float]:
        for each in times:
            return each
        raise torch.cuda.OutOfMemoryError("while it was timed")

    monkeypatch.setattr(plan, "clocked", clocked)
    pair = Pair(config=WITHOUT)
    pair.same(1)
    made = only_plan(pair)
    assert "they are not repeated: OutOfMemoryError: while it was timed" in pair.words()
    events: list[str] = []
    real = RecordedRun.__call__
    monkeypatch.setattr(RecordedRun, "__call__", lambda self, *inputs: (events.append("run"), real(self, *inputs))[1])
    # launches need the plan's GPU as the current one
    monkeypatch.setattr(nvrtc, "bind", lambda index: events.append("bind"))
    pair.plan_runs_again(2)
    assert events == ["bind", "run"] * 2 and made._recorded is True
    pair.release()


def test_a_plan_that_never_had_a_graph_is_recorded_after_a_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(PlanRunner, "record_launches", lambda *_: None)
        pair = Pair(config=WITHOUT)
        pair.same(1)
    made = only_plan(pair)
    pair.same(plan._EAGER_RUNS - 1 - made._eager_runs)
    assert made._recorded is None
    pair.same(1)
    assert made._recorded
    pair.plan_runs_again(3)
    pair.release()


def test_a_plan_that_gives_cached_memory_back_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr("sfast_ext.environment.is_small_card", lambda device=None: True)
    monkeypatch.setattr(graph_memory, "LARGE", 1)
    given_back: list[bool] = []
    monkeypatch.setattr(register_machine, "release_cached", lambda *_: given_back.append(True))
    pair = Pair(config=replace(WITHOUT, rare_calls=True, rare_gain=math.inf))
    pair.same(plan._EAGER_RUNS + 2)
    runs = pair.counter("eager_runs")
    assert only_plan(pair)._recorded is False and runs >= 3 and len(given_back) >= 2 * runs
    pair.release()


def test_a_plan_whose_graphs_are_switched_off_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    pair.same(3)
    made = only_plan(pair)
    assert made.has_graph and made._recorded is None
    pair.acc.configure(WITHOUT)
    pair.same(1)
    assert made._recorded and only_plan(pair) is made
    pair.plan_runs_again(3)
    pair.release()


def evicted(pair: Pair, pool: GraphPool, monkeypatch: pytest.MonkeyPatch, without_ms: float, capture_ms: float) -> Any:
    """The plan of a pair; a run with its graph takes 1 ms, its graph is gone."""
    # in a test runs follow each other faster than these times
    monkeypatch.setattr(Recapture, "ran", lambda self, with_graph, seconds: None)
    monkeypatch.setattr(Recapture, "is_due", IS_DUE)
    pair.same(3)
    made = only_plan(pair)
    assert made.has_graph and made.ms_after == 1.0
    monkeypatch.setattr(plan, "clocked", lambda *_: (without_ms / 1000, without_ms / 1000))
    made.recapture.capture.price = capture_ms
    pool.make_room(pair.acc.report)
    assert not made.has_graph
    return made


def test_an_evicted_graph_is_captured_again_when_runs_without_it_have_cost_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    made = evicted(pair, pool, monkeypatch, without_ms=2.0, capture_ms=3.5)
    for _ in range(4):
        pair.plan_runs_again(1)
        assert not made.has_graph and made._recorded
    runs = pair.counter("graph_captures")
    pair.plan_runs_again(1)
    assert made.has_graph and pair.counter("graph_captures") == runs + 1
    # the last stay was of two runs
    made.recapture.capture.price = 2.5
    pool.make_room(pair.acc.report)
    pair.plan_runs_again(3)
    assert not made.has_graph  # nothing was lost before
    pair.plan_runs_again(1)
    assert made.has_graph
    pair.release()


def test_a_graph_that_goes_with_each_image_comes_back_before_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    made = evicted(pair, pool, monkeypatch, without_ms=2.0, capture_ms=8.0)
    for image, at_once in enumerate((False, False, True, True)):
        # the first stay was of two runs
        captures, eager = pair.counter("graph_captures"), pair.counter("eager_runs")
        pair.plan_runs_again(20)
        assert made.has_graph and pair.counter("graph_captures") == captures + 1
        assert (pair.counter("eager_runs") - eager == 0) == at_once, image
        made.recapture.without_ms, made.recapture.capture.price = 2.0, 8.0
        pool.make_room(pair.acc.report)
    # a preview after each step
    captures = 0
    for step in range(8):
        made.recapture.without_ms, made.recapture.capture.price = 2.0, 100.0
        if step == 3:
            captures = pair.counter("graph_captures")
        pair.plan_runs_again(1)
        pool.make_room(pair.acc.report)
    assert pair.counter("graph_captures") == captures
    pair.release()


def test_a_graph_that_goes_with_each_image_is_captured_from_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    monkeypatch.setattr(recapture, "RECORDING", 3)
    made = evicted(pair, pool, monkeypatch, without_ms=2.0, capture_ms=8.0)
    # the GPU takes longer with a run than the CPU with its launches: 0.5 ms, repeated 0.1
    clocked = iter([(0.0005, 0.002), (0.0001, 0.002)])
    monkeypatch.setattr(plan, "clocked", lambda *_: next(clocked))
    saved: list[float] = []
    monkeypatch.setattr(Recapture, "recorded", lambda self, ms: saved.append(ms))
    repeated: list[bool] = []
    real, capture = RecordedRun.__call__, plan.Plan._run_captured
    monkeypatch.setattr(RecordedRun, "__call__", lambda self, *inputs: (repeated.append(True), real(self, *inputs))[1])

    def counted(self: Any) -> Any:
        before = len(repeated)
        outputs = capture(self)
        captured.append(len(repeated) > before)
        return outputs

    def takes_half_a_millisecond(*given: Any, **named: Any) -> Any:
        graph = on_a_graph(*given, **named)
        graph.launch_ms = 0.5
        return graph

    on_a_graph = GraphPool.capture
    monkeypatch.setattr(GraphPool, "capture", takes_half_a_millisecond)
    captured: list[bool] = []
    monkeypatch.setattr(plan.Plan, "_run_captured", counted)
    collecting: list[bool] = []
    record = RecordedRun.__init__
    monkeypatch.setattr(RecordedRun, "__init__", lambda *given: (collecting.append(gc.isenabled()), record(*given))[1])
    for image, recorded in enumerate((False, False, True, True)):
        pair.plan_runs_again(20)
        assert made.has_graph and bool(made._recorded) == recorded, image
        # the capture, and replays of a pretended graph
        assert set(captured) == {recorded}
        captured.clear()
        made.recapture.capture.price = 8.0
        pool.make_room(pair.acc.report)
    assert saved == [pytest.approx(0.4)] and collecting == [False] and gc.isenabled()
    pair.release()


def test_a_graph_is_captured_again_without_a_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    runs: list[int] = []
    real, capture = plan.Plan._warm_up, GraphPool.capture

    def counted(self: Any, pool: GraphPool) -> None:
        runs.append(threading.get_ident())
        real(self, pool)

    monkeypatch.setattr(plan.Plan, "_warm_up", counted)
    pair.same(2)
    made = only_plan(pair)
    assert made.has_graph and runs == [threading.get_ident()]

    def again() -> None:
        pool.make_room(pair.acc.report)
        assert not made.has_graph
        with torch.no_grad():
            pair.plan_runs_again(2)
        assert made.has_graph and made.no_graph_reason is None

    again()
    assert len(runs) == 1
    # libraries have what they prepared in one thread
    for _ in range(2):
        other = threading.Thread(target=again)
        other.start()
        other.join()
    assert made.has_graph and len(runs) == 3 and len({*runs}) >= 2
    again()
    assert len(runs) == 3
    # and may have let it go
    left = [NoGraph("operation not permitted when stream is capturing")]

    def once(self: GraphPool, *args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return capture(self, *args, **kwargs)

    monkeypatch.setattr(GraphPool, "capture", once)
    again()
    assert len(runs) == 4 and pair.counter("errors") == 0
    pair.release()


def test_an_evicted_graph_stays_away_if_it_would_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    made = evicted(pair, pool, monkeypatch, without_ms=0.9, capture_ms=0.1)
    pair.plan_runs_again(30)
    assert not made.has_graph and len(pool) == 0
    pair.release()


def test_without_a_measurement_an_evicted_graph_is_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    made = evicted(pair, pool, monkeypatch, without_ms=2.0, capture_ms=1e9)

    def refuse(*_: Any) -> Any:
        raise CannotRepeat("a tensor comes from elsewhere")

    monkeypatch.setattr(plan, "RecordedRun", refuse)
    pair.plan_runs_again(1)
    assert made.has_graph and "they are not repeated" in pair.words()
    pair.release()


@pytest.mark.parametrize(("ms", "wanted"), [(verify.LONG_MS - 1, True), (verify.LONG_MS, False)])
def test_a_rare_call_is_recorded_unless_it_is_long(ms: float, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    vae = vaes.random_vae("tiny-sd")
    accelerator = accelerate(
        vae.decoder, Config(allow_cpu=True, cuda_graphs=False, rare_calls=True, rare_gain=math.inf)
    )
    monkeypatch.setattr(plan.Plan, "record_launches", lambda *_: asked.append(True))
    monkeypatch.setattr("sfast_ext.timing.Stopwatch.milliseconds", lambda self: ms)
    for _ in range(3):
        vae.decoder(vaes.part_input("decoder", 64, 64))
    assert len(accelerator.plans) == 1 and asked == [True] * wanted


@pytest.mark.gpu
@pytest.mark.parametrize("triton", [True, False], ids=["triton", "without triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_the_bits_are_those_of_a_run_that_interpreter(
    triton: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton:
        monkeypatch.setattr("sfast_ext.kernels.backend.nvrtc.supported", lambda device: False)
    monkeypatch.setattr(plan, "_CPU_BOUND", 0.0)
    unet = models.random_unet("tiny-sdxl", dtype=dtype, device="cuda")
    accelerator = accelerate(unet, Config(cuda_graphs=False, drop_slower=False, triton=triton))
    args, kwargs = models.unet_inputs(unet, 128, 192, 2)
    unet(*args, **kwargs)
    (made,) = accelerator.plans.values()
    assert made._recorded, accelerator.report.as_dict()["events"]
    recorded, decides = made._function, made._served(plan.Interpreter(made._graph_module))
    results: list[Any] = []

    @torch.no_grad()
    def both() -> None:
        x = torch.sin(args[0] + len(results))
        for function in (recorded, decides):
            monkeypatch.setattr(made, "_function", function)
            results.append(unet(x, *args[1:], **kwargs)[0])

    both()
    scaled(unet)
    both()
    thread = threading.Thread(target=both)  # it has no context yet
    thread.start()
    thread.join()
    with torch.cuda.stream(torch.cuda.Stream()):
        both()
        torch.cuda.synchronize()
    assert len(results) == 8
    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(ours, theirs)
    accelerator.release()
