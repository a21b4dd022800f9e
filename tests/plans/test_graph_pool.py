from __future__ import annotations

import threading

import pytest
import torch

from sfast_ext import Config, accelerate
from sfast_ext.plans import graph_pool
from sfast_ext.plans.recapture import Recapture
from sfast_ext.report import Report

pytestmark = pytest.mark.gpu

# two roundings to fp16 of the same sums, in another order
HALF = 5e-3


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def pool():
    return graph_pool.GraphPool(torch.device("cuda", torch.cuda.current_device()))


def work(size):
    x = torch.ones(size, device="cuda")

    def run():
        return [(x * 2 + 1).cumsum(0)]

    run()
    return run


def capture(pool, run, gone=None, *, max_graphs=8, budget_mb=0):
    evicted = (lambda: None) if gone is None else (lambda: gone.append(run))
    return pool.capture(run, evicted, Report(), max_graphs=max_graphs, budget_mb=budget_mb)


def test_the_least_recently_used_goes_first(pool):
    gone: list = []
    runs = [work(100 + i) for i in range(3)]
    first = capture(pool, runs[0], gone, max_graphs=2)
    capture(pool, runs[1], gone, max_graphs=2)
    pool.touch(first)
    capture(pool, runs[2], gone, max_graphs=2)
    assert gone == [runs[1]] and len(pool) == 2
    first.graph.replay()
    torch.cuda.synchronize()
    assert first.outputs[0][-1] == 300


def test_over_the_budget_the_others_go_and_their_memory_returns(pool):
    gone: list = []
    mb = 1 << 20
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved()
    big = work(16 * mb)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    capture(pool, big, gone, budget_mb=400)
    held = torch.cuda.memory_reserved() - before
    assert held > 100 * mb
    bigger = work(40 * mb)
    capture(pool, bigger, gone, budget_mb=400)
    assert gone == [big] and len(pool) == 1
    with pytest.raises(graph_pool.NoGraph, match="budget"):
        capture(pool, bigger, gone, budget_mb=100)
    assert len(pool) == 0 and gone == [big, bigger]
    del big, bigger
    gone.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= start


def test_out_of_memory_while_capturing_evicts_and_then_gives_up(pool, monkeypatch):
    gone: list = []
    kept = work(10)
    capture(pool, kept, gone)
    honest, failures = pool._capture, [1]

    def short(*args):
        if failures:
            failures.pop()
            raise torch.cuda.OutOfMemoryError("injected")
        return honest(*args)

    monkeypatch.setattr(pool, "_capture", short)
    capture(pool, work(20), gone)
    assert gone == [kept] and len(pool) == 1
    failures += [1, 1]
    with pytest.raises(graph_pool.NoGraph, match="memory"):
        capture(pool, work(30), gone)


@pytest.mark.skipif(not hasattr(torch.Generator, "graphsafe_set_state"), reason="torch before 2.4: docs/features.md")
def test_another_thread_may_draw_random_numbers_while_a_graph_is_captured(pool):
    torch.cuda.manual_seed(1)
    expected = torch.randn(5, device="cuda")
    torch.cuda.manual_seed(1)
    drawn, plain = [], work(10)

    def draw():
        drawn.append(torch.randn(5, device="cuda"))

    def run():
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        return plain()

    capture(pool, run)
    torch.cuda.synchronize()
    assert drawn and torch.equal(drawn[0], expected)


def test_a_run_that_raises_while_captured_leaves_the_pool_usable(pool):
    def broken():
        torch.ones(3, device="cuda").add_(1)
        raise RuntimeError("injected")

    with pytest.raises(graph_pool.NoGraph, match="injected"):
        capture(pool, broken)
    captured = capture(pool, work(10))
    captured.graph.replay()
    assert captured.outputs[0][-1].item() == 30


def half(tiny_unet, name="sd15"):
    return tiny_unet(name).half().cuda()


def on_gpu(inputs):
    if isinstance(inputs, torch.Tensor):
        return inputs.cuda().half() if inputs.is_floating_point() else inputs.cuda()
    if isinstance(inputs, dict):
        return {k: on_gpu(v) for k, v in inputs.items()}
    return type(inputs)(on_gpu(v) for v in inputs) if isinstance(inputs, (tuple, list)) else inputs


def relative(ours, theirs):
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def config(**changes):
    # tiny models may well be slower than the overhead of a graph
    return Config(drop_slower=False, **changes)


@pytest.mark.parametrize("name", ["sd15", "sd15-inpaint", "sd21", "sdxl", "sdxl-refiner"])
def test_a_unet_in_half_precision_replays_its_graph(name, tiny_unet, unet_inputs):
    unet = half(tiny_unet, name)
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    for i in range(4):
        args = (args[0] * (1 + i), *args[1:])
        ours = unet(*args, **kwargs)[0]
        assert relative(ours, acc.run_original(*args, **kwargs)[0]) < HALF
    (plan,) = acc.status()["plans"]
    assert plan["state"] == "replaying" and plan["replays"] == 3, (plan, acc.report.as_dict()["events"])
    acc.release()


def test_under_autocast_as_a_webui_runs_it(tiny_unet, unet_inputs):
    unet = half(tiny_unet)
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    with torch.autocast("cuda", torch.float16):
        expected = unet(*args, **kwargs)[0]
        ours = unet(*args, **kwargs)[0]
    assert ours.dtype == expected.dtype and relative(ours, expected) < HALF
    assert acc.status()["plans"][0]["state"] == "replaying"
    acc.release()


def test_a_timestep_on_the_cpu_is_carried_over(tiny_unet, unet_inputs):
    unet = half(tiny_unet)
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    for t in (5, torch.tensor(7), torch.tensor(9.0)):
        for step in (1, 2):
            ours = unet(args[0], t * step, *args[2:], **kwargs)[0]
            assert relative(ours, acc.run_original(args[0], t * step, *args[2:], **kwargs)[0]) < HALF
    assert acc.report.counter("replays") == 3
    acc.release()


def test_swapped_out_and_back_with_other_weights_keeps_the_graph(tiny_unet, unet_inputs):
    unet, other = half(tiny_unet), tiny_unet("sd15", seed=9).half()
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    unet(*args, **kwargs), unet(*args, **kwargs)
    unet.cpu()
    unet.load_state_dict(other.state_dict())
    unet.cuda()
    ours = unet(*args, **kwargs)[0]
    assert relative(ours, other.cuda()(*args, **kwargs)[0]) < HALF
    assert acc.report.counter("graph_captures") == 1 and acc.report.counter("replays") == 2
    acc.release()


def test_outputs_survive_the_next_replay(tiny_unet, unet_inputs):
    unet = half(tiny_unet)
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    unet(*args, **kwargs)
    first = unet(*args, **kwargs)[0]
    kept = first.clone()
    unet(args[0] * 3, *args[1:], **kwargs)
    assert torch.equal(first, kept)
    acc.release()


@pytest.fixture
def captured_at_once(monkeypatch):
    """A graph that was evicted is captured again at the next call."""
    monkeypatch.setattr(Recapture, "is_due", lambda self, with_ms: True)


def three_sizes_with_two_graphs(unet, unet_inputs, times):
    """The accelerator, after calls of three sizes in turns, so many of each."""
    acc = accelerate(unet, config(max_graphs=2))
    for size in (64, 128, 192, 64, 128, 192):
        args, kwargs = on_gpu(unet_inputs(unet, width=size, height=64))
        for _ in range(times):
            assert relative(unet(*args, **kwargs)[0], acc.run_original(*args, **kwargs)[0]) < HALF
    assert acc.report.counter("captures") == 3
    return acc


def test_sizes_beyond_the_number_of_graphs_come_back(tiny_unet, unet_inputs, captured_at_once):
    acc = three_sizes_with_two_graphs(half(tiny_unet), unet_inputs, 2)
    assert acc.report.counter("evictions") >= 3
    acc.release()


def test_sizes_beyond_the_number_of_graphs_run_without_one_for_a_while(tiny_unet, unet_inputs):
    acc = three_sizes_with_two_graphs(half(tiny_unet), unet_inputs, 3)
    assert acc.report.counter("eager_runs") > 0
    acc.release()


def test_release_gives_the_memory_back(tiny_unet, unet_inputs):
    unet = half(tiny_unet)
    args, kwargs = on_gpu(unet_inputs(unet))
    unet(*args, **kwargs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        acc = accelerate(unet, config())
        unet(*args, **kwargs), unet(*args, **kwargs)
        acc.release()
        del acc
    torch.cuda.empty_cache()
    # allocations are rounded to blocks of 512 bytes, and a workspace of the libraries may stay
    assert torch.cuda.memory_allocated() - before < 40 << 20


def test_a_preview_in_another_thread_does_not_break_a_capture(tiny_unet, unet_inputs):
    unet = half(tiny_unet)
    decoder = torch.nn.Conv2d(4, 3, 3).cuda().half()
    latent = torch.randn(1, 4, 64, 64).cuda().half()
    stop, failed = threading.Event(), []

    def preview():
        with torch.no_grad():
            while not stop.is_set():
                try:
                    decoder(latent).float().cpu()
                except Exception as exc:
                    failed.append(exc)
                    return

    thread = threading.Thread(target=preview)
    thread.start()
    acc = accelerate(unet, config())
    try:
        for size in (64, 128, 192):
            args, kwargs = on_gpu(unet_inputs(unet, width=size, height=64))
            for _ in range(3):
                assert relative(unet(*args, **kwargs)[0], acc.run_original(*args, **kwargs)[0]) < HALF
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
    states = [p["state"] for p in acc.status()["plans"]]
    assert states == ["replaying"] * 3, acc.report.as_dict()["events"]
    acc.release()


def test_replays_on_two_streams_do_not_meet(tiny_unet, unet_inputs):
    unet = half(tiny_unet)
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    unet(*args, **kwargs)
    expected = [acc.run_original(args[0] * (1 + i), *args[1:], **kwargs)[0] for i in range(6)]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(6):
        with torch.cuda.stream(streams[i % 2]):
            found.append(unet(args[0] * (1 + i), *args[1:], **kwargs)[0])
    torch.cuda.synchronize()
    assert all(relative(f, e) < HALF for f, e in zip(found, expected))
    acc.release()


def test_out_of_memory_in_a_replay_makes_room_and_the_plan_comes_back(
    tiny_unet, unet_inputs, monkeypatch, captured_at_once
):
    unet = half(tiny_unet)
    args, kwargs = on_gpu(unet_inputs(unet))
    acc = accelerate(unet, config())
    unet(*args, **kwargs)
    (plan,) = acc.plans.values()
    honest = plan._copy_outputs

    def short(outputs):
        monkeypatch.setattr(plan, "_copy_outputs", honest)
        raise torch.cuda.OutOfMemoryError("injected")

    for _ in range(2):
        monkeypatch.setattr(plan, "_copy_outputs", short)
        assert relative(unet(*args, **kwargs)[0], acc.run_original(*args, **kwargs)[0]) < HALF
        assert relative(unet(*args, **kwargs)[0], acc.run_original(*args, **kwargs)[0]) < HALF
    assert acc.report.counter("out_of_memory") == 2 and acc.report.counter("graph_captures") == 3
    monkeypatch.setattr(plan, "_copy_outputs", short)
    assert relative(unet(*args, **kwargs)[0], acc.run_original(*args, **kwargs)[0]) < HALF
    assert not acc.plans and any("injected" in str(each.reason) for each in acc._cache.rejected.values())
    acc.release()
