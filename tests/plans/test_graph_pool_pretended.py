"""The graph pool on a GPU that is only pretended: budget, order, streams, and what goes on during a capture."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faulty import Pair, PretendedGraph, pretend_a_gpu, stand_in_for_cuda
from fuzz.nets import SmallNet
from pretended_card import GPU, Card, CardGraph, pretended_card

from sfast_ext import Config, accelerate
from sfast_ext.plans import graph_pool
from sfast_ext.plans.graph_pool import MB, GraphPool, NoGraph
from sfast_ext.plans.plan import Plan
from sfast_ext.report import Report
from sfast_ext.runtime import verify

GRAPHS = Config(allow_cpu=True, triton=False)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with pretended_card(monkeypatch, 256 * MB) as found:
        yield found
        assert not found.faults


def work(megabytes: int, value: int = 1) -> Callable[[], list[torch.Tensor]]:
    """Needs so many megabytes but for some bytes, of which its result is one."""
    x = torch.full((megabytes * MB - 64,), value, dtype=torch.uint8, device="cuda")
    return lambda: [(x + 1)[:1].clone()]


def captured(pool: GraphPool, run: Any, gone: list[Any], **options: Any) -> graph_pool.CapturedGraph:
    options = {"max_graphs": 8, "budget_mb": 0, **options}
    return pool.capture(run, lambda: gone.append(run), Report(), **options)


def test_the_budget_is_kept_to_the_megabyte(card: Card) -> None:
    pool, gone = GraphPool(GPU), []
    runs = [work(5), work(3), work(1), work(9)]
    for run in runs[:2]:
        captured(pool, run, gone, budget_mb=8)
    assert not gone and len(pool) == 2 and 7 * MB < pool.size <= 8 * MB
    captured(pool, runs[2], gone, budget_mb=8)
    assert gone == runs[:2] and len(pool) == 1 and card.graph_bytes < MB
    with pytest.raises(NoGraph, match="the budget is 8 MB"):
        captured(pool, runs[3], gone, budget_mb=8)
    assert gone == runs[:3] and len(pool) == pool.size == card.graph_bytes == 0
    captured(pool, runs[3], gone)
    assert len(pool) == 1


def test_no_more_graphs_than_are_allowed_and_the_oldest_goes(card: Card) -> None:
    pool, gone = GraphPool(GPU), []
    runs = [work(1, value) for value in range(4)]
    first = captured(pool, runs[0], gone, max_graphs=2)
    captured(pool, runs[1], gone, max_graphs=2)
    pool.touch(first)
    captured(pool, runs[2], gone, max_graphs=2)
    assert gone == [runs[1]] and len(pool) == 2 and card.graph_bytes < 2 * MB
    first.graph.replay()
    assert first.outputs[0].tolist() == [1]
    # parts of a model count for one
    for _ in range(3):
        captured(pool, runs[3], gone, max_graphs=1, share=1 / 3)
    assert gone == [runs[1], runs[0], runs[2]] and len(pool) == 3


def test_no_destructor_runs_during_a_capture(card: Card) -> None:
    found, plain = [], work(1)

    class Others:
        def __init__(self) -> None:
            self.ring = self

        def __del__(self) -> None:
            found.append(CardGraph.capturing)

    def run() -> list[torch.Tensor]:
        # garbage, and as many objects as make a collector look for it, young or old
        Others()
        kept = [[i] for i in range(20_000)]
        assert kept
        return plain()

    def broken() -> list[torch.Tensor]:
        run()
        raise RuntimeError("injected")

    captured(GraphPool(GPU), run, [])
    with pytest.raises(NoGraph, match="injected"):
        captured(GraphPool(GPU), broken, [])
    assert not any(found) and gc.isenabled()
    gc.collect()
    assert found


class Event:
    """A place in the work of a stream."""

    mark: list[bool] | None = None

    def record(self, stream: Stream) -> None:
        self.mark = mark = [False]
        stream.work.append(lambda: mark.__setitem__(0, True))


class Stream:
    """Does its work later, and waits for others only if it was told to."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.work: list[Any] = []

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            # as it was recorded by now
            self.work.append(event.mark)

    @property
    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], list) or self.work[0][0])

    def step(self) -> None:
        do = self.work.pop(0)
        if not isinstance(do, list):
            do()


def finish(streams: list[Stream], rng: random.Random) -> None:
    """The work of all streams, in an order that nobody knows."""
    while ready := [stream for stream in streams if stream.ready]:
        rng.choice(ready).step()
    assert not any(stream.work for stream in streams)


@pytest.mark.parametrize("seed", range(5))
def test_replays_on_several_streams_do_not_meet(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, streams = random.Random(seed), [Stream(number) for number in range(3)]
    now = [streams[0]]
    stand_in_for_cuda(monkeypatch, Event=Event, current_stream=lambda device: now[0])
    monkeypatch.setattr(graph_pool, "current_stream", lambda index: now[0].cuda_stream)
    pool, shared, found = GraphPool(GPU), [None], []
    for i in range(40):
        now[0] = rng.choice(streams)
        with pool.lock:
            stream = pool.begin_use()
            # inputs, a kernel, outputs: all graphs have the same memory for them
            steps = [lambda i=i: shared.__setitem__(0, i), lambda: None, lambda i=i: found.append((i, shared[0]))]
            stream.work += steps
            pool.end_use(stream)
    finish(streams, rng)
    assert found == [(i, i) for i in range(40)]


def test_on_one_stream_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(0)
    stand_in_for_cuda(monkeypatch, Event=Event, current_stream=lambda device: stream)
    pool = GraphPool(GPU)
    for _ in range(3):
        pool.end_use(pool.begin_use())
    assert len(stream.work) == 3 and not any(isinstance(do, list) for do in stream.work)


def test_plans_on_two_streams_wait_for_each_other(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Told(Stream):
        def wait_event(self, event: Any) -> None:
            told.append(f"{self.cuda_stream} waits")

        def wait_stream(self, stream: Any) -> None: ...

    class Recorded(Event):
        def record(self, stream: Any) -> None:
            told.append(f"{stream.cuda_stream} is recorded")

    def noted(home: Any, name: str, word: str) -> None:
        honest = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args: (told.append(word), honest(*args))[1])

    streams = [Told(0), Told(1)]
    now = [streams[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(graph_pool, "current_stream", lambda index: now[0].cuda_stream)
    net = SmallNet().eval()
    twin = copy.deepcopy(net)
    net.to("cuda")
    net.table = net.table.to("cuda")
    acc = accelerate(net, Config(triton=False))

    def same() -> None:
        args = torch.randn(2, 4, 8, 8), torch.tensor([5, 7]), torch.randn(2, 7, 8)
        ours = net(*[x.to("cuda") for x in args])["sample"]
        torch.testing.assert_close(ours.cpu(), twin(*args)["sample"], rtol=1e-4, atol=1e-4)

    same()
    same()
    for home, name, word in (
        (Plan, "_copy_inputs", "in"),
        (CardGraph, "replay", "replay"),
        (Plan, "_copy_outputs", "out"),
    ):
        noted(home, name, word)
    told.clear()
    for number in (0, 1, 1, 0):
        now[0] = streams[number]
        same()
    once = ["in", "replay", "out"]
    expected = [*once, "0 is recorded", "1 waits", *once, "1 is recorded", *once, "1 is recorded"]
    assert told == [*expected, "0 waits", *once, "0 is recorded"], acc.report.as_dict()
    acc.release()


def test_graphs_that_are_switched_off_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pretend_a_gpu(monkeypatch)
    pair = Pair(config=GRAPHS)
    pair.same(3)
    assert len(pool) == 1 and pair.counter("replays") == 2
    pair.acc.configure(Config(allow_cpu=True, triton=False, cuda_graphs=False))
    assert len(pool) == 0 and not PretendedGraph.there
    pair.same(2)
    assert pair.counter("eager_runs") == 2 and pair.counter("captures") == 1
    pair.release()


@pytest.mark.parametrize(("ms", "wanted", "kept"), [(2.0, False, False), (2.0, True, True), (1.02, False, True)])
def test_a_plan_that_is_slower_is_dropped_unless_it_is_wanted_all_the_same(
    ms: float, wanted: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_a_gpu(monkeypatch)
    # the plan's and the original's, in turns
    times = [ms, 1.0] * 4
    for name in ("quickest", "milliseconds"):
        monkeypatch.setattr(verify, name, lambda run, device, times_=1: (run(), times.pop(0))[1])
    options = {"drop_slower": False} if wanted else {}
    pair = Pair(config=Config(allow_cpu=True, triton=False, **options))
    pair.same(3)
    assert (pair.runs == 2) == kept and len(pair.acc.plans) == kept
    assert ("slower than the original (2.0 ms against 1.0 ms)" in pair.words()) != kept
    pair.release()
