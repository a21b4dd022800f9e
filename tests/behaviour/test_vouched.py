"""What a host's wrapper around a layer reads, if the host vouches for it, and what is looked up under a name that is
composed at run time."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from sfast_ext import Config, Hooks, accelerate


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


WRAPPERS = """
FACTOR = 1.0
STATE = {"factor": 1.0}
FACTORS = [1.0]
NAMES = {"factor": "one"}


def helper():
    return further()


def further():
    return FACTOR


def around(original):
    def forward(x):
        return original(x) * helper() * STATE["factor"] * FACTORS[0] * settings.LEVEL * settings.LEVELS["most"]
    return forward
"""


def wrappers():
    scope = types.ModuleType("some_host.wrappers")
    scope.settings = types.ModuleType("some_host.settings")
    scope.settings.LEVEL, scope.settings.LEVELS = 1.0, {"most": 1.0}
    exec(compile(WRAPPERS, "/host/some_host/wrappers.py", "exec"), vars(scope))
    return scope


class Inner:
    scale = 1.0

    def __init__(self):
        self.strength = 1.0

    def __call__(self, x):
        return x * self.scale * self.strength


class Processor:
    rate = 1.0

    def __init__(self):
        self.inner = Inner()

    def __call__(self, x):
        return self.inner(x) * self.rate


class Net(nn.Module):
    def __init__(self, which):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        # no constant of its code is a part of the name
        self.which = which
        self.processor_first = Processor()

    def forward(self, x):
        return getattr(self, self.which)(self.linear(x))


def made():
    torch.manual_seed(0)
    return Net("processor_first").eval(), wrappers()


OF_THE_WRAPPER = {
    "a number in the module of a helper's helper": lambda scope, k: setattr(scope, "FACTOR", k),
    "a dictionary in its module": lambda scope, k: scope.STATE.update(factor=k),
    "a dictionary put in its place": lambda scope, k: setattr(scope, "STATE", {"factor": k}),
    "a list in its module": lambda scope, k: scope.FACTORS.__setitem__(0, k),
    "a number in another module of the package": lambda scope, k: setattr(scope.settings, "LEVEL", k),
    "a dictionary there": lambda scope, k: scope.settings.LEVELS.update(most=k),
    "a function that it calls": lambda scope, k: setattr(scope, "helper", lambda: k),
    "a function that this one calls": lambda scope, k: setattr(scope, "further", lambda: k),
}


def played(change, wrapped):
    net, scope = made()
    twin, twins = made()
    if wrapped:
        for each, there in ((net, scope), (twin, twins)):
            each.linear.forward = there.around(each.linear.forward)
    acc = accelerate(net, Config(allow_cpu=True), hooks=Hooks(recognised=lambda *_: True))
    acc.new_generation()
    for i, x in enumerate(torch.randn(9, 2, 3)):
        if i in (3, 6):
            for each in ((net, scope), (twin, twins)):
                change(*each, 1 + i / 3)
        torch.testing.assert_close(net(x), twin(x), rtol=1e-4, atol=1e-4)
    assert not acc.report.counter("errors") and acc.report.counter("eager_runs") >= 2, acc.report.as_dict()
    acc.release()


@pytest.mark.parametrize("name", OF_THE_WRAPPER)
def test_what_a_wrapper_reads_is_seen_at_the_next_call(name):
    played(lambda net, scope, k: OF_THE_WRAPPER[name](scope, k), wrapped=True)


OF_THE_PROCESSOR = {
    "a number of its class": lambda processor, k: setattr(Processor, "rate", k),
    "a number of what it calls": lambda processor, k: setattr(processor.inner, "strength", k),
    "a number of that one's class": lambda processor, k: setattr(Inner, "scale", k),
}


@pytest.mark.parametrize("name", OF_THE_PROCESSOR)
def test_an_attribute_under_a_composed_name_is_read(name, monkeypatch):
    for kind, number in ((Processor, "rate"), (Inner, "scale")):
        monkeypatch.setattr(kind, number, 1.0)
    played(lambda net, scope, k: OF_THE_PROCESSOR[name](net.processor_first, k), wrapped=False)


class Deep:
    kinds = {"plain": 1.0}

    def __init__(self):
        self.levels, self.table = [1.0], {"a": {"b": 1.0}}
        self.inner = types.SimpleNamespace(levels=[1.0], table={"a": {"b": 1.0}}, number=1.0)

    def __call__(self, x):
        inner = self.inner
        return x * self.levels[0] * self.table["a"]["b"] * inner.levels[0] * inner.table["a"]["b"] * inner.number


def _by_sum(net, x):
    return getattr(net, "processor_" + net.suffix)(x)


def _by_format(net, x):
    return getattr(net, f"processor_{net.suffix}")(x)


def _by_percent(net, x):
    return getattr(net, "processor_%s" % net.suffix)(x)  # noqa: UP031


def _by_the_end(net, x):
    return getattr(net, f"{net.prefix}_first")(x)


def _by_its_dictionary(net, x):
    return net.__dict__["processor_{}".format(net.suffix)](x)  # noqa: UP032


class Calling(torch.nn.Module):
    def __init__(self, look_up):
        super().__init__()
        self.linear, self.look_up = torch.nn.Linear(3, 3), look_up
        self.prefix, self.suffix, self.processor_first = "processor", "first", Deep()

    def forward(self, x):
        return self.look_up(self, self.linear(x))


WITHIN = {
    "a list": lambda p, k: p.levels.__setitem__(0, k),
    "a dictionary in a dictionary": lambda p, k: p.table["a"].update(b=k),
    "a list of an object": lambda p, k: p.inner.levels.__setitem__(0, k),
    "a dictionary of an object": lambda p, k: p.inner.table["a"].update(b=k),
    "a number of an object": lambda p, k: setattr(p.inner, "number", k),
    "another object": lambda p, k: setattr(p, "inner", types.SimpleNamespace(**{**vars(p.inner), "number": k})),
}


@pytest.mark.parametrize("announced", [False, True], ids=["no generations", "a generation"])
@pytest.mark.parametrize("look_up", [_by_sum, _by_format, _by_percent, _by_the_end, _by_its_dictionary])
@pytest.mark.parametrize("within", WITHIN)
def test_what_lies_deep_under_a_composed_name_is_seen_at_the_next_call(within, look_up, announced):
    net, twin = Calling(look_up), Calling(look_up)
    twin.load_state_dict(net.state_dict())
    acc = accelerate(net, Config(allow_cpu=True))
    if announced:
        acc.new_generation()
    for i, x in enumerate(torch.randn(9, 2, 3)):
        if i in (3, 6):
            for each in (net, twin):
                WITHIN[within](each.processor_first, 1 + i / 3)
        torch.testing.assert_close(net(x), twin(x), rtol=1e-4, atol=1e-4)
    assert not acc.report.counter("errors") and acc.report.counter("eager_runs") >= 2, acc.report.as_dict()
    acc.release()


def test_what_no_name_of_the_code_may_lead_to_is_not_read():
    net = Calling(_by_sum)
    # it cannot be compared
    net.another_first = types.SimpleNamespace(values=iter([1]))
    acc = accelerate(net, Config(allow_cpu=True))
    for x in torch.randn(3, 2, 3):
        net(x)
    assert acc.report.counter("eager_runs") == 2
    net.processor_second = types.SimpleNamespace(values=iter([1]))
    net(x)
    assert acc.report.counter("eager_runs") == 2 and "processor_second" in str(acc.report.as_dict()["reasons"])
    acc.release()


class Composed:
    rate = 1.0

    def __init__(self, name="te"):
        self.name = name

    def __call__(self, x):
        return x * getattr(self, "ra" + self.name)


def test_a_number_of_a_class_under_a_composed_name_is_seen_at_the_next_call(monkeypatch):
    net, x = made()[0], torch.randn(2, 3)
    net.processor_first = Composed()
    acc = accelerate(net, Config(allow_cpu=True))
    acc.new_generation()
    for rate in (1.0, 2.0, 3.0):
        monkeypatch.setattr(Composed, "rate", rate)
        for _ in range(3):
            torch.testing.assert_close(net(x), net.linear(x) * rate, rtol=1e-4, atol=1e-4)
    assert not acc.report.counter("errors") and acc.report.counter("captures") == 3
    acc.release()


class ByValue:
    rate = 1.0

    def __init__(self, which):
        self.which = which

    def __call__(self, x):
        return x * getattr(self, self.which)


def test_a_number_of_a_class_under_a_name_that_is_a_value_is_read_once_a_generation(monkeypatch):
    net, x = made()[0], torch.randn(2, 3)
    net.processor_first = ByValue("rate")
    acc = accelerate(net, Config(allow_cpu=True))
    for rate in (1.0, 2.0, 3.0):
        monkeypatch.setattr(ByValue, "rate", rate)
        acc.new_generation()
        for _ in range(3):
            torch.testing.assert_close(net(x), net.linear(x) * rate, rtol=1e-4, atol=1e-4)
    assert not acc.report.counter("errors") and acc.report.counter("captures") == 3
    acc.release()
