"""Patches, refused plans and numbers that change: which calls get a plan."""

from __future__ import annotations

import os

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
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import Hooks, accelerate
from sfast_ext.plans.payback import REJECTED_FOR


def test_a_foreign_patch_inside_means_the_original_and_is_named():
    module = net()
    acc = accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)
    original = module.conv.forward

    def louder(x):
        return original(x) * 2

    module.conv.forward = louder
    assert torch.equal(module(x, 1), Net.forward(module, x, 1))
    assert "conv has a foreign forward" in reasons(acc) and "louder" in reasons(acc)
    del module.conv.forward
    close(module(x, 1), Net.forward(module, x, 1))
    assert counters(acc) == {"captures": 1, "eager_runs": 2, "fallbacks": 1, "misspeculated": 1}


def test_a_class_patched_by_foreign_code_with_state_in_its_closure_means_the_original(monkeypatch):
    module = net()
    acc = accelerate(module, CPU)
    x, state = image(), {"k": 1.0}
    run_twice(module, x, 1)
    source = "def make(f, state):\n    return lambda self, x: f(self, x) * state['k']\n"
    exec(compile(source, "/webui/scripts/zz_scaler.py", "exec"), scope := {"__name__": "zz_scaler"})
    with monkeypatch.context() as patched:
        patched.setattr(nn.GroupNorm, "forward", scope["make"](nn.GroupNorm.forward, state))
        for state["k"] in (1.0, 2.0, 3.0):
            assert torch.equal(module(x, 1), Net.forward(module, x, 1))
    assert "zz_scaler.make.<locals>.<lambda> in scripts/zz_scaler.py" in reasons(acc)
    close(module(x, 1), Net.forward(module, x, 1))
    assert counters(acc) == {"captures": 1, "eager_runs": 2, "fallbacks": 3, "misspeculated": 1}


def test_a_host_can_vouch_for_a_patch():
    module = net()
    acc = accelerate(module, CPU, hooks=Hooks(recognised=lambda m, kind, f: kind == "forward"))
    original = module.conv.forward
    module.conv.forward = lambda x: original(x) * 2
    x = image()
    close(run_twice(module, x, 1), Net.forward(module, x, 1))
    assert counters(acc) == {"captures": 1, "eager_runs": 1}


@pytest.mark.parametrize("transparent", [False, True])
def test_a_plan_outlasts_the_exchange_of_transparent_forwards_alone(transparent):
    module = net()
    vouch = lambda m, kind, f: kind == "forward"
    acc = accelerate(module, CPU, hooks=Hooks(recognised=vouch, transparent=vouch if transparent else None))
    original, x = module.conv.forward, image()
    for factor in (1, 1) if transparent else (2, 3):
        module.conv.forward = lambda x, factor=factor: original(x) * factor
        close(run_twice(module, x, 1), Net.forward(module, x, 1))
    assert counters(acc)["captures"] == (1 if transparent else 2)


def test_reasons_are_those_of_the_last_generations():
    module = net()
    acc = accelerate(module, CPU)
    args = image(), torch.tensor([1, 2])
    module.conv.forward = lambda x: nn.Conv2d.forward(module.conv, x)
    for _ in range(2):
        acc.new_generation()
        run_twice(module, *args)
        assert "conv has a foreign forward" in reasons(acc)
    del module.conv.forward
    for _ in range(2):
        assert "conv has a foreign forward" in reasons(acc)
        acc.new_generation()
        run_twice(module, *args)
    assert reasons(acc) == ""


def test_a_forward_that_branches_on_a_number_gets_it_into_the_signature():
    class Branching(Net):
        def forward(self, x, t, scale: float = 1.0):
            return super().forward(x, t) if scale > 0.5 else x

    torch.manual_seed(0)
    module = Branching().eval()
    acc = accelerate(module, CPU)
    x = image()
    for scale in (1.0, 1.0, 0.1, 0.1, 1.0, 0.1):
        close(
            module(x, torch.tensor(1), scale=scale),
            Branching.forward(module, x, torch.tensor(1), scale=scale),
        )
    assert counters(acc)["captures"] == 2


def test_a_number_that_changes_at_every_call_ends_the_capturing():
    class Branching(Net):
        def forward(self, x, t, scale: float = 1.0):
            return super().forward(x, t) * scale if scale > 0.5 else x

    module = Branching().eval()
    acc = accelerate(module, CPU)
    x = image()
    for i in range(10):
        close(
            module(x, torch.tensor(1), scale=1.0 + i),
            Branching.forward(module, x, torch.tensor(1), scale=1.0 + i),
        )
    assert counters(acc)["captures"] < 4 and "an argument changes at each step" in reasons(acc)


def test_a_model_that_changes_is_named_if_its_calls_were_seen_before():
    class Scaled(Net):
        k = 1.0

        def forward(self, x, t, negative: bool = False):
            return super().forward(x, t) * (-self.k if negative else self.k)

    module = Scaled().eval()
    acc = accelerate(module, CPU)
    x = image()
    for i in range(8):
        module.k = 1.0 + i
        acc.new_generation()
        for negative in (True, False, True, False):
            args = x, torch.tensor(1), negative
            close(module(*args), Scaled.forward(module, *args))
    assert "what the model computes changes again and again" in reasons(acc)
    assert "an argument changes" not in reasons(acc)


def test_what_is_refused_is_not_tried_again():
    class Reading(Net):
        def forward(self, x, t, scale: float = 1.0):
            return x * x.sum().item()

    module = Reading().eval()
    acc = accelerate(module, CPU)
    x = image()
    for _ in range(4):
        assert torch.equal(module(x, torch.tensor(1)), Reading.forward(module, x, torch.tensor(1)))
    assert reasons(acc).count("reads a value") == 1 and "captures" not in counters(acc)
    assert counters(acc)["fallbacks"] == 3


@pytest.mark.parametrize("ticks", [False, True])
def test_what_was_refused_is_looked_at_again_when_the_behaviour_changes(ticks):
    class Moody(Net):
        def __init__(self):
            super().__init__()
            self.mode = 0

        def forward(self, x, t, scale: float = 1.0):
            return x * x.sum().item() if self.mode == 0 else super().forward(x, t, scale)

    torch.manual_seed(0)
    module = Moody().eval()
    acc = accelerate(module, CPU)
    x = image()
    for mode in (0, 1, 0, 1):
        module.mode = mode
        if ticks:
            acc.new_generation()
        for _ in range(2):
            close(module(x, torch.tensor(1)), Moody.forward(module, x, torch.tensor(1)))
    assert counters(acc)["captures"] == 1 and counters(acc)["eager_runs"] == 3


REGISTERED = {"activation": nn.functional.silu}
PATCHED = "SFAST_TEST_PATCHED"


def host_function(x):
    """A function that a method calls. The environment, which it reads, is not followed."""
    if PATCHED in os.environ:
        return x * (2 if isinstance(x, FakeTensor) else 3)
    return REGISTERED["activation"](x)


class Layered(Net):
    def forward(self, x, t, scale: float = 1.0):
        return super().forward(host_function(x), t, scale)


def test_a_plan_refused_under_a_patch_is_made_when_the_patch_is_gone(monkeypatch):
    torch.manual_seed(0)
    module = Layered().eval()
    acc = accelerate(module, CPU)
    args = image(), torch.tensor([1, 2])
    acc.new_generation()
    with monkeypatch.context() as laid:
        laid.setenv(PATCHED, "1")
        run_twice(module, *args)
    assert "differs from the original" in reasons(acc) and not acc.plans
    for _ in range(REJECTED_FOR - 1):
        acc.new_generation()
        close(run_twice(module, *args), Layered.forward(module, *args))
    assert counters(acc)["captures"] == 1
    acc.new_generation()
    close(run_twice(module, *args), Layered.forward(module, *args))
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == 1


def test_what_stays_refused_is_tried_ever_less_often(monkeypatch):
    monkeypatch.setitem(REGISTERED, "activation", lambda x: x * x.sum().item())
    module = Layered().eval()
    acc = accelerate(module, CPU)
    args = image(), torch.tensor([1, 2])
    tried = []
    for generation in range(4 * REJECTED_FOR):
        acc.new_generation()
        before = len(acc.report.as_dict()["events"])
        run_twice(module, *args)
        if any(event["stage"] == "refused" for event in acc.report.as_dict()["events"][before:]):
            tried.append(generation)
    assert tried == [0, REJECTED_FOR, 3 * REJECTED_FOR] and "reads a value" in reasons(acc)


def test_another_function_in_the_place_of_pytorchs_attention_is_captured_anew(monkeypatch):
    class Attentive(Net):
        def forward(self, x, t, scale: float = 1.0):
            rows = super().forward(x, t, scale).flatten(2)
            return nn.functional.scaled_dot_product_attention(rows, rows, rows)

    torch.manual_seed(0)
    module = Attentive().eval()
    acc = accelerate(module, CPU)
    x, stock = image(), nn.functional.scaled_dot_product_attention
    functions = {"stock": stock, "another": lambda q, k, v: 2 * stock(q, k, v, scale=1.0)}
    results = {}
    for name in ("stock", "another", "stock", "another"):
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", functions[name])
        results[name] = run_twice(module, x, torch.tensor(1))
        close(results[name], Attentive.forward(module, x, torch.tensor(1)))
    assert (results["another"] - results["stock"]).abs().max() > 0.1
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == 6
