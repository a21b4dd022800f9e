"""The order of weights in memory while other threads, modes and traces are about."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext import Config, accelerate
from sfast_ext.weights import host_order
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.weight import WeightsChanged, WeightsInUse
from weights.ordered import (
    X,
    alike,
    counting,
    disabled,
    flat,
    made,
    maps,
    planned_pair,  # noqa: F401
)


def laid():
    """A net and its arena, in which a plan reads the first weight in channels-last memory."""
    net = made()
    arena = WeightArena(net)
    arena.index()
    weight = arena.locate(net.first.weight)
    assert arena.channels_last(weight)
    arena.bind([weight])
    return net, arena


def test_another_thread_that_runs_the_original_keeps_the_hosts_order():
    net, arena = laid()
    inside, leave, found = threading.Event(), threading.Event(), []

    def other():
        with arena.order.host():
            inside.set()
            leave.wait(5)
            found.append(net.first.weight.is_contiguous())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(5)
    with pytest.raises(WeightsInUse):
        arena.order.plan()
    with pytest.raises(WeightsInUse):
        arena.sync()
    leave.set()
    thread.join()
    assert found == [True] and not arena.order.is_plans()
    assert arena.order.plan() and arena.order.is_plans()


@counting
def test_an_order_that_changes_while_another_thread_asks_for_it_is_noticed(monkeypatch):
    net, arena = laid()
    asked = []

    def while_it_changes(*args):
        thread = threading.Thread(target=lambda: asked.append(arena.order.is_plans()))
        thread.start()
        thread.join(5)
        return fills_memory(*args)

    fills_memory = host_order._fills_memory
    for _ in range(2):
        monkeypatch.setattr(host_order, "_fills_memory", while_it_changes)
        with arena.order.host():
            assert net.first.weight.is_contiguous()
        assert asked and not arena.order.is_plans()
        monkeypatch.undo()
        assert arena.order.plan() and not net.first.weight.is_contiguous()


@counting
def test_memory_that_others_took_in_the_hosts_order_is_not_rewritten():
    net, arena = laid()
    with arena.order.host():
        kept = net.first.weight.data
    before = kept.clone()
    with pytest.raises(WeightsChanged):
        arena.order.plan()
    assert torch.equal(kept, before) and torch.equal(net.first.weight, before)
    del kept
    assert arena.order.plan() and torch.equal(net.first.weight, before) and not net.first.weight.is_contiguous()


def test_copies_by_other_threads_have_the_values():
    net, wanted = made(), made().state_dict()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    stop, wrong = threading.Event(), []

    def copies():
        while not stop.is_set():
            try:
                other = copy.deepcopy(net)
                wrong.extend(k for k, v in other.named_parameters() if not torch.equal(v, wanted[k]))
            except Exception as exc:
                wrong.append(exc)

    thread = threading.Thread(target=copies)
    with torch.no_grad():
        for _ in range(3):
            net(X)
        thread.start()
        for _ in range(20):
            maps(net)
            net(X)
    stop.set()
    thread.join()
    accelerator.release()
    assert not wrong


class Noisy(TorchDispatchMode):
    """Changes what every operation computes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        changes = isinstance(result, torch.Tensor) and result.is_floating_point() and "copy" in str(function)
        return result.add_(1) if changes else result


class NoisyFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.add_(1) if "copy_" in str(function) else result


@pytest.mark.parametrize(
    "mode", [Noisy, NoisyFunctions, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_modes_around_a_call_change_no_weight(pair, mode):
    net, twin, _ = pair
    # on another device the original may raise
    with mode(), contextlib.suppress(RuntimeError):
        disabled(net)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))
    alike(flat(net(X)), flat(twin(X)))
    alike(maps(net), maps(twin))


def test_a_trace_of_the_original_records_nothing_that_is_done_to_weights(pair):
    net, twin, _ = pair
    original = vars(net)["forward"].owner.run_original

    class Traced(nn.Module):
        def forward(self, x):
            return tuple(flat(original(x)))

    traced = torch.jit.trace(Traced(), (X,), check_trace=False, strict=False)
    assert not any("as_strided" in str(node) or "copy_" in str(node) for node in traced.graph.nodes())
    alike(flat(net(X)), flat(twin(X)))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))
