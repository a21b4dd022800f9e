"""Changes in the middle of a generation: the host tells its beginning, and nothing after it."""

from __future__ import annotations

import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

from sfast_ext import Config, Hooks, accelerate
from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.key import BehaviourKeys


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="module")
def captured_once():
    """The first capture of a process imports a part of torch, for seconds that later captures would have to earn."""
    acc = accelerate(nn.Sequential(nn.Linear(8, 8)), Config(allow_cpu=True))
    with torch.no_grad():
        acc.module(torch.randn(2, 8))
    acc.release()


class Processor:
    def __init__(self, strength):
        self.strength = [strength]
        self.options = types.SimpleNamespace(gain=1.0)

    def __call__(self, attn, x):
        return attn.attend(x) * self.strength[0] * self.options.gain


class LearnedProcessor(nn.Module):
    def __init__(self, strength):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([strength]))

    def forward(self, attn, x):
        return attn.attend(x) * self.gain


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.scale = 2, 0.5
        self.to_q, self.to_out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.processor = Processor(1.0)
        self.learned = LearnedProcessor(1.0)

    def attend(self, x):
        assert getattr(self, "odd", None) is None or getattr(self, "even", None) is None
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, q, q) * self.scale
        return self.to_out(out.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.processor(self, x) + self.learned(self, x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.ff = nn.LayerNorm(8), Attention(), nn.Linear(8, 8)

    def forward(self, x):
        return self.ff(x + self.attn(self.norm(x)))


def net(seed=0):
    torch.manual_seed(seed)
    return Net().eval()


def laid(attn, factor):
    own = types.MethodType(Attention.forward, attn)
    attn.forward = lambda x: own(x) * factor


def hooked(norm, factor):
    norm._forward_hooks = OrderedDict()
    norm.register_forward_hook(lambda module, args, result: result * factor)


# what is done with a number, at one step and again, with another, at a later one
CHANGES = {
    "scale": lambda m, k: setattr(m.attn, "scale", k),
    "heads": lambda m, k: setattr(m.attn, "heads", 2 ** int(k)),
    "a submodule's submodule": lambda m, k: setattr(m.attn, "to_q", net(int(2 * k)).attn.to_q),
    "a submodule": lambda m, k: setattr(m, "ff", net(int(2 * k)).ff),
    "epsilon of a layer": lambda m, k: setattr(m.norm, "eps", k),
    "a bias": lambda m, k: setattr(m.attn.to_q, "bias", nn.Parameter(torch.full((8,), k))),
    "a processor": lambda m, k: setattr(m.attn, "processor", Processor(k)),
    "a processor that is a module": lambda m, k: setattr(m.attn, "learned", LearnedProcessor(k)),
    "in a list": lambda m, k: m.attn.processor.strength.__setitem__(0, k),
    "in an object": lambda m, k: setattr(m.attn.processor.options, "gain", k),
    "a forward": lambda m, k: laid(m.attn, k),
    "a hook in a container of its own": lambda m, k: hooked(m.norm, k),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_seen_at_the_very_next_call(name):
    module, twin = net(), net()
    acc = accelerate(module, Config(allow_cpu=True))
    steps = torch.randn(9, 2, 4, 8)
    acc.new_generation()
    results = []
    for i, x in enumerate(steps):
        if i in (3, 6):
            for each in (module, twin):
                CHANGES[name](each, 1 + i / 3)
        results.append(module(x))
        torch.testing.assert_close(results[-1], twin(x), rtol=1e-4, atol=1e-4)
    assert acc.report.counter("eager_runs") >= 2 and not acc.report.counter("errors")
    assert (Net.forward(net(), steps[3]) - results[3]).abs().max() > 1e-3
    acc.release()


def test_a_forward_put_back_by_assignment_and_laid_again():
    module, twin = net(), net()
    acc = accelerate(module, Config(allow_cpu=True))
    own = [each.attn.forward for each in (module, twin)]
    acc.new_generation()
    for i, x in enumerate(torch.randn(12, 2, 4, 8)):
        for each, forward in zip((module, twin), own):
            if i in (2, 6, 9):
                laid(each.attn, i)
            elif i in (4, 8, 11):
                # it stays in the module's dictionary
                each.attn.forward = forward
        torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-4)
    assert acc.report.counter("captures") == 1 and acc.report.counter("eager_runs") == 5
    assert "attn has a foreign forward" in next(iter(acc.report.as_dict()["reasons"]))
    acc.release()


def test_another_forward_over_one_that_the_host_vouches_for():
    module = net()
    acc = accelerate(module, Config(allow_cpu=True), hooks=Hooks(recognised=lambda m, kind, f: f is passing))
    own = module.attn.forward

    def passing(x):
        return own(x)

    def louder(x):
        return passing(x) * 3

    module.attn.forward = passing
    acc.new_generation()
    for forward in (passing, passing, louder, passing, louder):
        module.attn.forward = forward
        x = torch.randn(2, 4, 8)
        torch.testing.assert_close(module(x), Net.forward(module, x), rtol=1e-4, atol=1e-4)
    assert acc.report.counter("captures") == 1 and "louder" in next(iter(acc.report.as_dict()["reasons"]))
    acc.release()


def test_what_says_nothing_is_no_reason_to_read_again(monkeypatch):
    module = net()
    module.attn.bookkeeping = 0
    keys = BehaviourKeys(module, frozenset({"bookkeeping"}), None, 8)
    keys.begin_generation()
    first = keys.read()
    monkeypatch.setattr("sfast_ext.behaviour.fingerprint.fingerprint", None)
    module.attn.bookkeeping = 1
    # equal is as good as the same
    module.attn.scale = float("0.5")
    module.attn.processor.strength = [1.0]
    assert keys.trusted and keys.current() == first
    module.attn.processor.strength[0] = 2.0
    assert not keys.trusted


def test_an_attribute_that_cannot_be_compared_is_looked_at_again():
    class Odd:
        def __eq__(self, other):
            raise ValueError("neither true nor false")

        __hash__ = None

    module = net()
    module.attn.odd = Odd()
    before = fingerprint(module)
    assert before.unchanged_quick()
    module.attn.odd = Odd()
    assert not before.unchanged_quick()
    del module.attn.odd
    module.attn.even = 1
    assert not before.unchanged_quick()
