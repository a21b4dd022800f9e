"""A forward that can reach its accelerator, or an object that belongs to it, is accelerated: these change with each
call, and no result depends on them."""

from __future__ import annotations

import copy
import functools
import pickle
import types

import pytest
import torch

from sfast_ext import Config, accelerate
from sfast_ext.behaviour import surroundings
from sfast_ext.behaviour.fingerprint import Reader, fingerprint
from sfast_ext.behaviour.forward_slot import OwnHook
from sfast_ext.behaviour.value_types import MECHANICS


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


SOURCE = """
from torch import nn

found = None
many = []
space = types.SimpleNamespace(accelerator=None)
kept = 1.0


class Processor:
    shared = None

    def __call__(self, x):
        self.held, self.shared, found, many, space
        return x * kept


def default(x, accelerator=[]):
    return x * kept


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.processor, self.step = nn.Linear(3, 3), Processor(), default
        self.processor.held = self.accelerator = None

    def forward(self, x):
        self.accelerator
        return self.step(self.processor(self.linear(x)))
"""


def made():
    torch.manual_seed(0)
    scope = types.ModuleType("some_script")
    scope.types = types
    exec(compile(SOURCE, "/home/somebody/some_script.py", "exec"), vars(scope))
    return scope.Net().eval(), scope


def closed_over(net, scope, value):
    def step(x):
        assert value is not None
        return x * scope.kept

    net.step = step


PLACES = {
    "an attribute of the model": lambda net, scope, value: setattr(net, "accelerator", value),
    "an attribute of a layer": lambda net, scope, value: setattr(net.linear, "accelerator", value),
    "an attribute of a processor": lambda net, scope, value: setattr(net.processor, "held", value),
    "a list of its class": lambda net, scope, value: setattr(scope.Processor, "shared", [value]),
    "a global": lambda net, scope, value: setattr(scope, "found", value),
    "a list": lambda net, scope, value: scope.many.append(value),
    "a dictionary in a list": lambda net, scope, value: scope.many.append({"accelerator": value}),
    "a namespace": lambda net, scope, value: setattr(scope.space, "accelerator", value),
    "a default": lambda net, scope, value: scope.default.__defaults__[0].append(value),
    "a partial": lambda net, scope, value: setattr(net, "step", functools.partial(scope.default, accelerator=value)),
    "a closure": closed_over,
}
WHAT = {
    "the accelerator": lambda acc: acc,
    "its report": lambda acc: acc.report,
    "its weights": lambda acc: acc.arena,
}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("place", PLACES)
def test_it_is_no_matter(place, what):
    net, scope = made()
    acc = accelerate(net, Config(allow_cpu=True))
    PLACES[place](net, scope, WHAT[what](acc))
    xs = torch.randn(9, 2, 3)
    for i, x in enumerate(xs):
        if i == 6:
            scope.kept = 2.0
        torch.testing.assert_close(net(x), net.linear(x) * scope.kept**2, rtol=1e-4, atol=1e-4)
    status = acc.report.as_dict()
    assert not status["reasons"] and status["last_error"] is None, status
    assert acc.report.counter("captures") == 2 and acc.report.counter("eager_runs") >= 6
    acc.release()


def accelerates(make):
    """As scripts have it that accelerate each model as it is made."""

    def init(self):
        make(self)
        self.accelerated = accelerate(self, Config(allow_cpu=True))

    return init


@pytest.mark.parametrize(
    "patch",
    [
        lambda net: setattr(net, "__init__", accelerates(net.__init__)),
        lambda net: setattr(net, "again", accelerates(net.__init__)),
        lambda net: setattr(net, "again", staticmethod(lambda: accelerate)),
        lambda net: setattr(net, "kind", type(accelerate(net().eval(), Config(allow_cpu=True)))),
    ],
    ids=["its constructor", "a method", "a lambda", "the accelerator's class"],
)
def test_the_code_of_this_package_is_not_followed(patch):
    _, scope = made()
    patch(scope.Net)
    net = scope.Net().eval()
    net.names = "again", "kind", net.__init__
    followed = [f for f in read_functions(net) if f.__module__.partition(".")[0] == "sfast_ext"]
    assert not followed, [f.__qualname__ for f in followed][:5]


def read_functions(net):
    """The functions that a reading of a model follows."""
    reader = Reader(MECHANICS, net)
    reader.surroundings(surroundings.look(), net)
    reader.read_all(net)
    return [f for f in (*reader.functions.values(), *reader.values.functions.values()) if hasattr(f, "__code__")]


class Noted(OwnHook):
    def __init__(self):
        self.owner = accelerate(torch.nn.Linear(3, 3), Config(allow_cpu=True))

    def __call__(self, *given):
        assert len(given) == 2


def test_our_hooks_are_no_behaviour_and_no_patches():
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), torch.randn(2, 3)
    before = fingerprint(net)
    handle = net[1].register_forward_pre_hook(Noted())
    found = fingerprint(net)
    assert found.patches == [] and found.key == before.key
    acc = accelerate(net, Config(allow_cpu=True))
    assert all(torch.equal(net(x), acc.run_original(x)) for _ in range(3))
    assert acc.report.counter("replays") + acc.report.counter("eager_runs") and acc.report.counter("bypasses") == 0
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
        assert not any(isinstance(h, Noted) for h in other[1]._forward_pre_hooks.values())
    handle.remove()
    assert fingerprint(net).patches == []
