"""If memory is short, the original forward gets what CUDA graphs hold, and the call ends with an image."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuzz.nets import SmallNet
from pretended_card import GPU, Card, pretended_card
from torch import fx, nn

from sfast_ext import Config, accelerate, environment
from sfast_ext.passes import layout_time
from sfast_ext.plans import graph_pool
from sfast_ext.plans.graph_pool import MB
from sfast_ext.plans.payback import REJECTED_FOR
from sfast_ext.plans.plan import Plan
from sfast_ext.runtime import residency, verify
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.plan_builder import PlanBuilder
from sfast_ext.runtime.plan_runner import out_of_memory

OOM = torch.cuda.OutOfMemoryError


class On:
    """A model under an accelerator on the card, and its twin on the CPU."""

    def __init__(self, card: Card) -> None:
        self.card, self.twin = card, SmallNet().eval()
        self.ours = copy.deepcopy(self.twin).to("cuda")
        self.ours.table = self.ours.table.to("cuda")
        self.accelerator = accelerate(self.ours, Config(triton=False))
        self.pool = graph_pool.pool_of(GPU)

    def same(self, side: int = 8) -> None:
        torch.manual_seed(side)
        given = torch.randn(2, 4, side, side), torch.tensor([7.0, 7.0]), torch.randn(2, 5, 8)
        found = self.ours(*(x.to("cuda") for x in given))["sample"].to("cpu")
        torch.testing.assert_close(found, self.twin(*given)["sample"], rtol=1e-3, atol=1e-4)

    def count(self, name: str) -> int:
        return self.accelerator.report.counter(name)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[On]:
    monkeypatch.setattr(verify, "milliseconds", lambda run, device, times=1: float(run() is None) + 1)
    with torch.no_grad(), pretended_card(monkeypatch, 256 * MB) as card:
        found = On(card)
        yield found
        assert not card.faults
        found.accelerator.release()


def test_no_plan_is_tried_without_room_for_it_and_one_is_made_when_there_is(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, read, state = residency.bytes_of(on.ours), [], PlanBuilder.state
    monkeypatch.setattr(PlanBuilder, "state", lambda builder: read.append(1) or state(builder))
    monkeypatch.setattr(residency, "room", lambda device: 0.29 * weights)
    on.same()
    on.same()
    # what a plan would be made of takes longer to read than some steps
    assert not on.count("captures") and not on.accelerator.plans and not read
    (row,) = on.accelerator.report.as_dict()["reasons_listed"]
    assert "too little memory left" in row["reason"] and row["code"] == "out-of-memory"
    monkeypatch.setattr(residency, "room", lambda device: 0.31 * weights)
    on.same()
    on.same()
    assert on.count("captures") == 1 and on.count("replays") >= 1 and read


def test_room_that_is_gone_after_the_original_ran(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = residency.bytes_of(on.ours)
    rooms = iter([weights, 0.29 * weights, weights, weights])
    monkeypatch.setattr(residency, "room", lambda device: next(rooms))
    on.same()
    assert not on.count("captures")
    on.same()
    assert on.count("captures") == 1


def test_room_is_what_is_free_and_what_graphs_hold(on: On) -> None:
    on.same()
    assert 0 < residency.room(GPU) <= 256 * MB


def hungry(monkeypatch: pytest.MonkeyPatch, on: On, kind: Callable[[str], Exception] = OOM) -> list[int]:
    """From now on the original forward has no room beside a CUDA graph; notes how many there were at each run."""
    honest, beside = ModuleContext.run_forward, []

    def original(context: ModuleContext, *args: Any, **kwargs: Any) -> Any:
        beside.append(len(on.pool))
        if beside[-1]:
            raise kind("CUDA error: out of memory")
        return honest(context, *args, **kwargs)

    monkeypatch.setattr(ModuleContext, "run_forward", original)
    return beside


@pytest.mark.parametrize("kind", [OOM, RuntimeError])
def test_a_new_size_gets_the_memory_of_the_others_graphs(on: On, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    on.same()
    on.same()
    assert len(on.pool) == 1 and on.count("replays") == 1
    beside = hungry(monkeypatch, on, kind)
    on.same(12)
    assert beside[:2] == [1, 0] and on.count("errors") == 0
    # its plan was checked and timed as well, with a graph whenever the original was not running
    on.same(12)
    on.same()
    assert on.count("replays") == 3 and on.count("captures") == 2 and len(on.pool) == 2


def test_a_bypassed_call_gets_it_too(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on.same()
    hungry(monkeypatch, on)
    with torch.enable_grad():
        on.same()
    assert len(on.pool) == 0 and on.count("out_of_memory") == 1


def test_a_comparison_gets_it_too(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on.same()
    on.accelerator.configure(Config(triton=False, check="always"))
    hungry(monkeypatch, on)
    on.same()
    on.same()
    assert on.count("errors") == 0 and len(on.accelerator.plans) == 1


def test_the_hosts_own_lack_of_memory_is_passed_on(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on.same()

    def original(*_: Any, **__: Any) -> Any:
        runs.append(len(on.pool))
        raise OOM("too large")

    runs: list[int] = []
    monkeypatch.setattr(ModuleContext, "run_forward", original)
    with pytest.raises(OOM, match="too large"):
        on.same(12)
    assert runs == [1, 0] and on.count("errors") == 0
    with pytest.raises(OOM, match="too large"):
        on.same(12)
    # nothing is left to give
    assert runs == [1, 0, 0]
    monkeypatch.undo()


def test_other_errors_of_the_host_free_nothing(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on.same()

    def original(*_: Any, **__: Any) -> Any:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(ModuleContext, "run_forward", original)
        with pytest.raises(ValueError, match="no"):
            on.same(12)
    assert len(on.pool) == 1


def test_a_graph_that_is_captured_again_costs_one_run_of_the_plan(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, ran = [], []
    honest, static = Plan.replay, Plan._run_static
    monkeypatch.setattr(Plan, "replay", lambda self, *args: (replayed.append(1), honest(self, *args))[1])
    monkeypatch.setattr(Plan, "_run_static", lambda self: (ran.append(1), static(self))[1])
    on.same()
    # of a new plan the replay is what is compared
    assert replayed
    on.same()
    on.pool.make_room(on.accelerator.report)
    replayed.clear(), ran.clear()
    on.same()
    # the capture computes nothing
    assert len(replayed) == len(ran) == 1 and len(on.pool) == 1 and on.count("graph_captures") == 2
    on.same()
    assert len(replayed) == 2 and len(ran) == 1


def test_a_plan_that_finds_no_memory_leaves_the_call_to_the_original(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise OOM("none")

    with monkeypatch.context() as patch:
        for name in ("_run_static", "run_eagerly"):
            patch.setattr(Plan, name, none)
        on.same()
        on.same()
    assert len(on.pool) == 0 and not on.accelerator.plans and on.card.graph_bytes == 0
    assert any("OutOfMemoryError" in reason for reason in on.accelerator.report.as_dict()["reasons"])
    for _ in range(REJECTED_FOR + 1):
        on.accelerator.new_generation()
    on.same()
    on.same()
    assert on.count("replays") == 1


@pytest.mark.long(but=[0, 2])
@pytest.mark.parametrize("room", [1.01, 1.1, 1.3, 2.0])
def test_no_call_runs_out_of_memory_that_the_original_has_room_for(on: On, room: float) -> None:
    """Not in the first call either, which has a result to compare with, a graph, and the original once more.

    A plan keeps some bytes of constants, so there is not quite the room of before.
    """
    peaks = []
    on.accelerator.configure(Config(triton=False, enabled=False))
    for side in (8, 24):
        on.card.peak = on.card.used
        on.same(side)
        peaks.append(on.card.peak - on.card.used)
    on.card.capacity = on.card.used + int(room * max(peaks))
    on.accelerator.configure(Config(triton=False))
    for _ in range(2):
        for side in (24, 24, 8, 24, 8):
            on.same(side)
        on.accelerator.new_generation()
    if room == 2.0:
        assert on.count("replays") > 0


def test_which_errors_say_that_memory_is_short() -> None:
    assert out_of_memory(OOM("CUDA out of memory"))
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory(ValueError("CUDA error: out of memory"))


@pytest.mark.parametrize(("gib", "budget"), [(None, 4096), (4, 1024), (6, 1536), (8, 2048), (12, 3072), (24, 4096)])
def test_the_budget_follows_the_card_if_nobody_chose(
    monkeypatch: pytest.MonkeyPatch, gib: float | None, budget: int
) -> None:
    asked = []

    def memory(device: torch.device | None = None) -> int | None:
        asked.append(device)
        return None if gib is None else int(gib * 2**30)

    monkeypatch.setattr(environment, "gpu_memory", memory)
    assert environment.graph_budget_mb() == budget
    asked.clear()
    budgets = []

    def capture(*_: Any, budget_mb: int, **__: Any) -> Any:
        budgets.append(budget_mb)
        raise graph_pool.NoGraph("not here")

    with torch.no_grad(), pretended_card(monkeypatch, 256 * MB) as card:
        monkeypatch.setattr(graph_pool.GraphPool, "capture", capture)
        on = On(card)
        on.same()
        # the card that the plan is on, which need not be the program's
        assert set(budgets) == {budget} and set(asked) == {GPU}
        on.accelerator.configure(Config(triton=False, graph_memory_mb=7))
        on.same()
        assert budgets[-1] == 7
        on.accelerator.release()


def test_a_layout_is_not_timed_if_there_is_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def milliseconds(*_: Any) -> float:
        raise OOM("none")

    monkeypatch.setattr(layout_time, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert layout_time.channels_last_pays(fx.symbolic_trace(nn.Identity()).graph, GPU) is False
