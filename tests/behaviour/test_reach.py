"""What the code of a forward can look up, and that a change of it is seen at the next call."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.behaviour.reach import names_within


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# a package's module, with all that its code finds outside itself
PACKAGE = """
import torch

FACTOR = 1.0
STATE = {"factor": 1.0}
FACTORS = [1.0]
READ = ("gain", "bent")
OTHER = 1.0
LEAST = 1.0


def helper():
    return further()


def further():
    return FACTOR


class Options:
    most = 1.0

    def clamp(self, x):
        return x * LEAST * self.most


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
        self.options = Options()

    def __call__(self, attn, x):
        x = self.options.clamp(x)
        for name in READ:
            x = x * getattr(attn, name)
        return self.inner(x) * settings.LEVEL * helper() * STATE["factor"] * FACTORS[0] * self.rate

    def never_called(self):
        return OTHER


def scaled_by():
    state, times = {"k": 1.0}, 1.0

    def turn(k):
        nonlocal times
        times = k

    return lambda x: x * state["k"] * times, state, turn
"""


def package():
    scope = types.ModuleType("some_package.processors")
    scope.settings = types.ModuleType("some_package.settings")
    scope.settings.LEVEL = 1.0
    exec(compile(PACKAGE, "/site-packages/some_package/processors.py", "exec"), vars(scope))
    return scope


class Net(nn.Module):
    def __init__(self, scope):
        super().__init__()
        self.norm, self.linear, self.leak = nn.GroupNorm(2, 4), nn.Linear(3, 3), nn.LeakyReLU(0.5)
        self.processor = scope.Processor()
        # what its closure holds is held by nothing else of the model's
        self.act, scope.state, scope.turn = scope.scaled_by()
        self.gain = self.bent = self.tilt = self._cached = 1.0
        self.comment = 1.0

    @property
    def tilted(self):
        return self.tilt

    @functools.cached_property
    def once(self):
        return self._cached

    def forward(self, x, *, of="gain"):
        x = self.act(self.processor(self, self.leak(self.linear(self.norm(x)))))
        return torch.nn.functional.interpolate(x, scale_factor=2.0) * self.tilted * self.once


def made():
    torch.manual_seed(0)
    scope = package()
    return Net(scope).eval(), scope


CHANGES = {
    "a number in the module of a helper's helper": lambda net, scope, k: setattr(scope, "FACTOR", k),
    "a dictionary in the module of the processor's class": lambda net, scope, k: scope.STATE.update(factor=k),
    "a list there": lambda net, scope, k: scope.FACTORS.__setitem__(0, k),
    "a list put in its place": lambda net, scope, k: setattr(scope, "FACTORS", [k]),
    "a number in another module of the package": lambda net, scope, k: setattr(scope.settings, "LEVEL", k),
    "a number of its class": lambda net, scope, k: setattr(scope.Processor, "rate", k),
    "a number of what the processor calls": lambda net, scope, k: setattr(net.processor.inner, "strength", k),
    "a number of that one's class": lambda net, scope, k: setattr(scope.Inner, "scale", k),
    "the names of attributes": lambda net, scope, k: (setattr(net, "bent", k), setattr(scope, "READ", ("bent",) * 2)),
    "an attribute that is read by a name elsewhere": lambda net, scope, k: setattr(net, "bent", k),
    "an attribute that a property reads": lambda net, scope, k: setattr(net, "tilt", k),
    "what is in the closure of a function among the attributes": lambda net, scope, k: scope.state.update(k=k),
    "what the closure of that function holds": lambda net, scope, k: scope.turn(k),
    "a number that a method of its options reads": lambda net, scope, k: setattr(scope, "LEAST", k),
    "a number of the class of its options": lambda net, scope, k: setattr(scope.Options, "most", k),
    "a function of the module": lambda net, scope, k: setattr(scope, "further", lambda: k),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_seen_at_the_very_next_call(name):
    net, scope = made()
    twin, twins = made()
    acc = accelerate(net, Config(allow_cpu=True))
    acc.new_generation()
    xs = torch.randn(9, 2, 4, 3)
    for i, x in enumerate(xs):
        if i in (3, 6):
            for each in ((net, scope), (twin, twins)):
                CHANGES[name](*each, 1 + i / 3)
        torch.testing.assert_close(net(x), twin(x), rtol=1e-4, atol=1e-4)
    assert not acc.report.counter("errors") and acc.report.counter("eager_runs") >= 2
    fresh, _ = made()
    assert (fresh(xs[-1]) - twin(xs[-1])).abs().max() > 1e-2
    acc.release()


def unread(net, scope):
    net.comment = 2.0


def unread_in_the_module(net, scope):
    scope.OTHER = 2.0


def unread_of_torch(net, scope):
    torch.vdot = lambda *args: None


@pytest.mark.parametrize("change", [unread, unread_in_the_module, unread_of_torch])
def test_what_no_code_looks_up_is_no_matter_for_a_call(change, monkeypatch):
    net, scope = made()
    monkeypatch.setattr(torch, "vdot", torch.vdot)
    before = fingerprint(net)
    change(net, scope)
    assert before.unchanged_quick()


@pytest.mark.parametrize("change", [unread, unread_of_torch])
def test_once_a_generation_that_is_read_all_the_same(change, monkeypatch):
    net, scope = made()
    monkeypatch.setattr(torch, "vdot", torch.vdot)
    keys = BehaviourKeys(net, frozenset(), None, 8)
    keys.begin_generation()
    number, foreign = keys.read()
    assert keys.trusted and foreign is None
    change(net, scope)
    keys.begin_generation()
    assert keys.read()[0] != number


def test_a_method_of_a_processors_class_that_another_party_exchanged_is_a_patch():
    net, scope = made()
    before = fingerprint(net)
    assert before.patches == []
    source = "def louder(self, attn, x):\n    return x * state['k']\n"
    elsewhere = {"__name__": "a_script", "state": {"k": 2.0}}
    exec(compile(source, "/webui/scripts/a_script.py", "exec"), elsewhere)
    scope.Processor.__call__ = elsewhere["louder"]
    assert not before.unchanged_quick()
    (found,) = fingerprint(net).patches
    words = "processor has a foreign function in its class, a_script.louder in scripts/a_script.py"
    assert str(found.reason()).startswith(words)


KEPT = """
class Patches:
    pass

originals = Patches()
kept = [None]

def network_forward(self, x):
    return originals.forward(self, x)

def forward_in_a_list(self, x):
    return kept[0](self, x)
"""


@pytest.mark.parametrize("name", ["network_forward", "forward_in_a_list"])
@pytest.mark.parametrize("function", ["group_norm", "leaky_relu"])
def test_what_torchs_own_forward_calls_is_seen_if_a_host_keeps_that_in_an_object(name, function, monkeypatch):
    net, _ = made()
    scope = {"__name__": "extensions_builtin.lora.networks"}
    exec(compile(KEPT, "/webui/extensions-builtin/Lora/networks.py", "exec"), scope)
    kind, home = (nn.GroupNorm, torch) if function == "group_norm" else (nn.LeakyReLU, nn.functional)
    scope["originals"].forward = scope["kept"][0] = kind.forward
    monkeypatch.setattr(kind, "forward", scope[name])
    before = fingerprint(net)
    assert before.unchanged_quick()
    original = getattr(home, function)
    monkeypatch.setattr(home, function, lambda *args, **kwargs: 2 * original(*args, **kwargs))
    assert not before.unchanged_quick()


def test_a_method_of_torchs_class_that_another_calls_is_seen_at_each_call(monkeypatch):
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    before = fingerprint(model)
    original = nn.Conv2d._conv_forward
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda *args: 2 * original(*args))
    assert not before.unchanged_quick()


def test_a_processor_that_calls_the_one_before_it_is_named_and_not_that(monkeypatch):
    # the model's package is this module's
    class Own:
        def __call__(self, attn, x):
            return x

    scope = {"__name__": "a_script", "original": Own()}
    source = """
def louder(original):
    class Louder:
        def __call__(self, *args):
            return original(*args) * 2
    return Louder()
"""
    exec(compile(source, "/webui/scripts/a_script.py", "exec"), scope)
    net, _ = made()
    net.processor = scope["louder"](Own())
    words = [str(patch.reason()) for patch in fingerprint(net).patches]
    assert words and all("a_script.louder.<locals>.Louder.__call__" in each for each in words), words


IN_TORCH = {
    "by torch's own function": (torch, "group_norm"),
    "by a function of torch's in C++": (torch._C._nn, "linear"),
    "by a function that torch's function calls": (torch._C._nn, "upsample_nearest1d"),
    "by the module": (nn.functional, "interpolate"),
    "by an operator": (torch.Tensor, "__rpow__"),
    "by an operator that tensors inherit": (torch.Tensor, "__mul__"),
    "by a call of one class": (nn.GroupNorm, "__call__"),
    "by the call of every module": (nn.Module, "__call__"),
}


@pytest.mark.parametrize("name", IN_TORCH)
def test_what_torchs_code_reaches_is_seen_at_each_call(name, monkeypatch):
    home, function = IN_TORCH[name]
    net, _ = made()
    before = fingerprint(net)
    assert before.unchanged_quick()
    original = getattr(home, function)
    monkeypatch.setattr(home, function, lambda *args, **kwargs: original(*args, **kwargs))
    assert not before.unchanged_quick()
    monkeypatch.undo()
    assert before.unchanged_quick()


def test_what_changes_while_it_is_read_is_not_taken_for_what_was_read(monkeypatch):
    from sfast_ext.behaviour import surroundings

    net, _ = made()
    around = surroundings.look()
    original = nn.functional.interpolate
    monkeypatch.setattr(nn.functional, "interpolate", lambda *args, **kwargs: original(*args, **kwargs))
    assert not surroundings.TorchQuickCheck(frozenset({"interpolate"}), [type(net)], around).unchanged()


def test_what_says_nothing_in_torch_is_looked_at_once(monkeypatch):
    net, _ = made()
    before = fingerprint(net)
    monkeypatch.setattr(torch.Tensor, "somebodys_own", 1, raising=False)
    assert not before.unchanged_quick()
    assert before.unchanged() and before.unchanged_quick()


def test_names_are_those_of_code_that_runs():
    _, scope = made()
    names = names_within([Net, scope.Processor, scope.Inner], [])
    assert {"gain", "bent", "tilt", "_cached", "rate", "FACTOR", "scale", "strength", "helper"} <= names
    assert not {"comment", "OTHER", "never_called"} & names


def test_code_that_a_hook_or_a_function_brings_counts():
    def hook(module, args, result):
        return result * module.comment

    assert "comment" in names_within([Net], [hook]) and "comment" in names_within([Net], [functools.partial(hook)])
