"""Plans that differ from the original, and exceptions: the original goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_net import (
    CPU,
    Net,
    close,
    counters,
    image,
    net,
    no_gradients,  # noqa: F401
    reasons,
    run_twice,
)

from sfast_ext import Config, Hooks, accelerate
from sfast_ext.behaviour import key
from sfast_ext.plans.plan import DROPPED
from sfast_ext.runtime import plan_builder, plan_finder, plan_maker, verify


def test_a_plan_that_differs_is_discarded_and_the_original_goes_on(monkeypatch):
    def spoil(gm, ctx):
        node = next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(torch.mul, (node, 1.5))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        gm.recompile()
        return {"spoil": 1}

    monkeypatch.setattr(plan_maker, "run_passes", spoil)
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    for _ in range(3):
        assert torch.equal(module(x, 1), plain(x, 1))
    assert "differs from the original" in reasons(acc) and not acc.plans
    assert counters(acc) == {"captures": 1, "fallbacks": 2}


def test_a_plan_whose_known_error_is_over_a_new_tolerance_is_used_no_more():
    module = net()
    acc = accelerate(module, CPU)
    args = image(), torch.tensor([1, 2])
    run_twice(module, *args)
    (plan,) = acc.plans.values()
    plan.error = 0.01
    run = counters(acc)["eager_runs"]
    acc.configure(replace(CPU, tolerance=0.01, max_graphs=3))
    module(*args)
    assert counters(acc)["eager_runs"] == run + 1 and plan.state != DROPPED
    # who trusts every plan is not asked
    for config in (replace(CPU, check="never", tolerance=0.001), replace(CPU, tolerance=0.001)):
        acc.configure(config)
        assert (plan.state == DROPPED) == (config.check != "never")
        close(module(*args), Net.forward(module, *args))
    assert counters(acc)["eager_runs"] == run + 2 and "0.01, more than the tolerance of 0.001" in reasons(acc)
    # what it would be under a larger one is found out anew
    acc.configure(CPU)
    run_twice(module, *args)
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == run + 3


def test_always_checking_catches_a_plan_gone_wrong_later():
    module, plain = net(), net()
    acc = accelerate(module, Config(allow_cpu=True, check="always"))
    x = image()
    run_twice(module, x, 1)
    (plan,) = acc.plans.values()
    run = plan._function
    plan._function = lambda *a: [o * 2 for o in run(*a)]
    close(module(x, 1), plain(x, 1))
    close(module(x, 1), plain(x, 1))
    assert "differs from the original" in reasons(acc)
    assert plan.state == DROPPED


@pytest.mark.parametrize(
    ("room", "stage"),
    [
        (plan_builder, "capture"),
        (key, "fingerprint"),
        (plan_finder, "flatten_call"),
        (plan_maker, "run_passes"),
        (verify, "relative_errors"),
        (verify, "milliseconds"),
    ],
)
def test_an_exception_of_ours_never_ends_a_generation(room, stage, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError(f"injected in {stage}")

    module, plain = net(), net()
    monkeypatch.setattr(room, stage, broken)
    acc = accelerate(module, CPU)
    x = image()
    for _ in range(3):
        close(module(x, 1), plain(x, 1))
    assert "injected" in str(acc.report.as_dict()["last_error"]["message"])
    monkeypatch.undo()
    acc.configure(Config(allow_cpu=True, triton=False))
    close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["eager_runs"] == 1


def test_an_exception_in_a_replay_goes_to_the_original(monkeypatch):
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)
    (plan,) = acc.plans.values()

    def broken(*args):
        raise RuntimeError("injected")

    plan._function = broken
    for _ in range(2):
        close(module(x, 1), plain(x, 1))
    assert "injected" in reasons(acc)


def test_the_originals_own_exception_is_the_hosts():
    module = net()
    accelerate(module, CPU)
    with pytest.raises(RuntimeError, match="channels"):
        module(torch.randn(1, 3, 8, 8), 1)


@pytest.mark.parametrize("fails", ["both", "the host's hook", "another way"])
def test_what_the_hosts_own_forward_raises_too_is_no_error_of_ours(fails):
    class Failing(Net):
        def forward(self, x, t, scale: float = 1.0):
            if broken and fails != "the host's hook":
                raise RuntimeError("no backup bias found") if fails == "both" else KeyError("x")
            return super().forward(x, t, scale)

    def prepare():
        if broken:
            raise RuntimeError("no backup bias found")

    torch.manual_seed(0)
    module, broken = Failing().eval(), False
    acc = accelerate(module, CPU, hooks=Hooks(prepare=prepare))
    args = image(), torch.tensor([1, 2])
    run_twice(module, *args)
    broken = True
    if fails == "the host's hook":
        close(module(*args), Net.forward(module, *args))
    else:
        with pytest.raises(RuntimeError if fails == "both" else KeyError):
            module(*args)
    broken = False
    close(module(*args), Net.forward(module, *args))
    error = acc.report.as_dict()["last_error"]
    assert error is None if fails == "both" else error["stage"] == "prepare of the host"
    assert counters(acc).get("errors", 0) == (fails != "both") and counters(acc)["eager_runs"] == 2
