"""Replays that are launched before the weights and the behaviour key are looked at.

Only CUDA graphs are; here what stands in for one computes what the plan does, on a CPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fuzz import ground, machine
from fuzz.nets import Request, SmallNet, arguments, make
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.call_signature import flatten_call
from sfast_ext.plans.graph_pool import CapturedGraph, GraphPool
from sfast_ext.plans.payback import SPECULATION_BACKOFF
from sfast_ext.plans.plan import Plan
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.runtime.verify import relative_error

CPU = Config(allow_cpu=True)


class Pool(GraphPool):
    """Without streams."""

    def begin_use(self):
        return None

    def end_use(self, stream, captured):
        pass

    def touch(self, captured):
        pass


def replayed(self: PlanRunner, plan: Plan, call):
    """`PlanRunner.outputs`, with graphs on a CPU."""
    if not self._context.config.cuda_graphs:
        return plan.run_eagerly(call.leaves)
    if plan.graph is None:
        with torch.inference_mode(False), torch.no_grad():
            plan._set_static_inputs([leaf.clone() for leaf in call.tensors(plan.device)])
            outputs = [output.clone() for output in plan._run_static()]

        def replay():
            for output, now in zip(outputs, plan._run_static()):
                output.copy_(now)

        plan.graph = CapturedGraph(SimpleNamespace(replay=replay), outputs, 0)  # type: ignore[arg-type]
        plan.pool = Pool(plan.device)
    return plan.replay(call.leaves)


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch):
    monkeypatch.setattr(PlanRunner, "outputs", replayed)
    with torch.no_grad():
        yield


class Pair:
    def __init__(self, config=CPU) -> None:
        self.rng = random.Random(0)
        self.ours, self.twin = make("small", 0), make("small", 0)
        self.acc = accelerate(self.ours, config)
        for _ in range(3):
            self.same()

    def both(self, change) -> None:
        change(self.ours)
        change(self.twin)

    def same(self) -> None:
        args, kwargs = arguments(Request(), self.rng, torch.float32, kind="small")
        ours, theirs = self.ours(*args, **kwargs)["sample"], self.twin(*args, **kwargs)["sample"]
        assert relative_error([ours], [theirs]) < 1e-4

    def count(self, name: str) -> int:
        return self.acc.report.counter(name)


def order(pair: Pair, monkeypatch) -> list[str]:
    """What one call does, in its order."""
    seen: list[str] = []

    def noting(home, name, word):
        inner = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **k: (seen.append(word), inner(*a, **k))[1])

    noting(pair.acc.arena, "sync", "weights")
    noting(pair.acc._finder.keys, "read", "key")
    noting(PlanRunner, "outputs", "replay")
    pair.same()
    monkeypatch.undo()
    monkeypatch.setattr(PlanRunner, "outputs", replayed)
    return seen


@pytest.fixture
def pair():
    return Pair()


def weight(net: SmallNet) -> nn.Linear:
    return net.blocks[0].self_attention.to_out


def replaced(net):
    weight(net).weight = nn.Parameter(weight(net).weight * 2)


def by_data(net):
    weight(net).weight.data = weight(net).weight.data * 2


def transposed(net):
    weight(net).weight.data = weight(net).weight.data.t()


def buffer(net):
    net.offset = net.offset * 2


def attribute(net):
    net.table = net.table * 2


def scalar(net):
    net.s1 = 2.0


def layer(net):
    net.blocks[0].self_attention.to_out = nn.Linear(8, 8).requires_grad_(False)
    nn.init.constant_(weight(net).weight, 0.1)
    nn.init.constant_(weight(net).bias, 0.1)


@pytest.mark.parametrize("change", [replaced, by_data, transposed, buffer, attribute, scalar, layer])
def test_a_change_before_any_call_is_in_its_result(pair, change):
    pair.both(change)
    for _ in range(3):
        pair.same()
    assert pair.count("misspeculated") == 1 and not pair.count("errors")
    assert pair.count("captures") == (2 if change in (scalar, layer) else 1)


@pytest.mark.parametrize("weights", [replaced, by_data])
@pytest.mark.parametrize("behaviour", [scalar, layer])
def test_both_change_at_once(pair, weights, behaviour):
    pair.both(weights)
    pair.both(behaviour)
    for _ in range(3):
        pair.same()
    pair.both(lambda net: setattr(net, "s1", 1.0))
    for _ in range(3):
        pair.same()


def test_a_plan_for_weights_of_another_shape_has_the_key_of_its_own_behaviour(pair):
    """The key changes, and the weights in such a way that all plans go: none may be built for the old key."""

    def widen(net):
        net.s1 = 2.0
        net.blocks[0].ff.weight = nn.Parameter(net.blocks[0].ff.weight.double().float()[:8].repeat(2, 1))
        net.conv_out.weight = nn.Parameter(net.conv_out.weight.to(memory_format=torch.channels_last) * 2)
        net.offset = net.offset.double()

    pair.both(widen)
    for _ in range(3):
        pair.same()
    pair.both(lambda net: setattr(net, "s1", 1.0))
    for _ in range(3):
        pair.same()


def test_the_replay_goes_first_within_a_generation_and_if_none_are_told(pair, monkeypatch):
    assert order(pair, monkeypatch) == ["replay", "key", "weights"]
    pair.acc.new_generation()
    assert order(pair, monkeypatch) == ["weights", "replay", "key"]
    assert order(pair, monkeypatch) == ["replay", "weights"]


def test_after_a_replay_in_vain_the_weights_go_first_for_a_while(pair, monkeypatch):
    pair.acc.new_generation()
    pair.same()
    pair.both(replaced)
    assert order(pair, monkeypatch) == ["replay", "weights", "weights", "replay"]
    pair.both(replaced)
    assert order(pair, monkeypatch) == ["weights", "replay"]
    for _ in range(SPECULATION_BACKOFF):
        pair.same()
    assert order(pair, monkeypatch) == ["replay", "weights"]
    assert pair.count("misspeculated") == 1


def test_weights_that_are_away_cost_one_replay_in_vain(pair):
    held = weight(pair.ours).weight
    weight(pair.ours)._parameters["weight"] = nn.Parameter(torch.empty_like(held, device="meta"), False)
    original = pair.acc._server.run_original

    def fetching(*args, **kwargs):
        away, weight(pair.ours)._parameters["weight"] = weight(pair.ours)._parameters["weight"], held
        try:
            return original(*args, **kwargs)
        finally:
            weight(pair.ours)._parameters["weight"] = away

    pair.acc._server.run_original = fetching
    replays = pair.count("replays")
    for _ in range(3):
        pair.same()
        waits = pair.acc._finder.speculation.weights
        assert waits.price == SPECULATION_BACKOFF and waits.paid <= 2
    assert pair.count("fallbacks") == 3 and pair.count("replays") == replays


@pytest.mark.parametrize("check", ["always", "first"])
def test_a_plan_that_is_compared_is_not_run_on_old_weights(check, monkeypatch):
    pair = Pair(Config(allow_cpu=True, check=check))
    (plan,) = pair.acc.plans.values()
    if check == "first":
        plan.error = None
    pair.both(replaced)
    assert order(pair, monkeypatch)[:3] == ["key", "weights", "replay"]
    assert not any("differs" in reason for reason in pair.acc.report.as_dict()["reasons"])
    assert plan in pair.acc.plans.values()


def test_an_error_while_the_weights_are_looked_at_is_not_the_plans(pair, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(pair.acc.arena._tracked, "detector", None)
        pair.same()
    assert pair.count("errors") == 1
    before = pair.count("replays")
    pair.same()
    assert pair.count("replays") == before + 1


def test_random_events():
    on = ground.CPU
    w = machine.run("small", 0, machine.sequence(0, 120, on), on)
    assert w.counter("replays") > 50 and w.counter("misspeculated") > 0


@pytest.mark.parametrize("graphs", [True, False])
def test_a_plan_is_not_compared_with_what_behaves_otherwise(graphs):
    pair = Pair(replace(CPU, check="always", drop_slower=False, cuda_graphs=graphs))
    for scale in (1.0, 0.5, 0.5, 1.0, 1.0):
        pair.both(lambda net, scale=scale: setattr(net, "s1", scale))
        pair.same()
        pair.same()
    assert not pair.acc.report.as_dict()["reasons"] and len(pair.acc.plans) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_result_of_a_replay_is_an_inference_tensor_only_in_inference_mode(pair, mode):
    args, kwargs = arguments(Request(), pair.rng, torch.float32, kind="small")
    before = pair.count("replays")
    with mode():
        result = pair.ours(*args, **kwargs)["sample"]
    assert pair.count("replays") == before + 1
    assert result.is_inference() == (mode is torch.inference_mode) and not result.requires_grad
    pair.same()


def test_the_inputs_of_a_graph_take_no_gradients(pair):
    (plan,) = pair.acc.plans.values()
    args, kwargs = arguments(Request(), pair.rng, torch.float32, kind="small")
    call = flatten_call((args[0].requires_grad_(), *args[1:]), kwargs, plan.device)
    with torch.enable_grad():
        outputs = plan.replay(call.leaves)
    assert not any(tensor.requires_grad for tensor in (*plan._inputs, *outputs))
