"""Fake tensors that a forward hid where its state is not looked for."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import gc_pause
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture import capture as capture_module
from sfast_ext.capture.capture import CaptureRefused, capture
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")
X = torch.randn(2, 4)
EMPTY = {"list": [1], "dict": {}, "set": set(), "deep": {"a": [{}]}}
HIDDEN = {}
# reached by a number alone, which no walk follows
ADDRESSES = {}


@pytest.fixture(autouse=True)
def not_frozen():
    """Holders that are newer than what was frozen."""
    HIDDEN.update(copy.deepcopy(EMPTY))
    ADDRESSES.update({name: id(holder) for name, holder in HIDDEN.items()})


def hidden(name):
    return ctypes.cast(ADDRESSES[name], ctypes.py_object).value


class Root(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


HIDES = {
    "list": lambda x: hidden("list").append(x) or x,
    "dict": lambda x: hidden("dict").update(last=x) or x,
    "set": lambda x: hidden("set").add(x) or x,
    "deep": lambda x: hidden("deep")["a"][0].update(last=x) or x,
}


def captured(function):
    module = Root(function).eval()
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad():
        return capture(module.forward, call, call.tensors(CPU), WeightArena(module))


def fakes():
    return [each for each in gc.get_objects() if type(each) is FakeTensor]


@pytest.mark.parametrize("then", ["goes on", "raises"])
@pytest.mark.parametrize("name", HIDES)
def test_a_fake_tensor_in_a_hidden_place_is_taken_out_and_the_forward_refused(name, then):
    def forward(x):
        x = HIDES[name](x)
        if then == "raises":
            raise KeyError("after it was kept")
        return x * 2

    words = "keeps state between calls, in a (list|dict|set)" if then == "goes on" else "KeyError"
    with pytest.raises(CaptureRefused, match=words) as refused:
        captured(forward)
    assert refused.value.__cause__ is None or then == "raises"
    del refused
    gc.collect()
    assert HIDDEN == EMPTY
    assert not fakes()


def cyclic(x):
    cycle = [x]
    cycle.append(cycle)
    return x * 2


def in_an_object(x):
    class Local:
        pass

    local = Local()
    local.x, local.me = x, local
    return local.x * 2


def weak(x):
    reference = weakref.ref(x)
    return reference() * 2


@pytest.mark.parametrize("forward", [cyclic, in_an_object, weak, lambda x: x])
def test_what_only_garbage_refers_to_is_no_state(forward):
    found = captured(forward)
    assert found.graph_module is not None


@pytest.mark.parametrize("loaded", [False, True])
def test_what_was_frozen_is_frozen_again_unless_a_network_was_loaded(loaded, monkeypatch):
    monkeypatch.setattr(gc_pause, "LARGE", 0 if loaded else 1 << 60)
    gc.freeze()
    with pytest.raises(CaptureRefused, match="keeps state between calls, in a list"):
        captured(HIDES["list"])
    assert HIDDEN == EMPTY
    assert gc_pause.some_are_frozen() != loaded
    # as the other tests have it
    gc.freeze()


def test_what_is_newer_is_found_without_thawing(monkeypatch):
    monkeypatch.setattr(gc_pause, "thaw", lambda: pytest.fail("all objects were thawed"))
    with pytest.raises(CaptureRefused, match="keeps state between calls, in a list"):
        captured(HIDES["list"])
    assert HIDDEN == EMPTY


def test_a_usual_capture_collects_no_garbage(monkeypatch):
    monkeypatch.setattr(capture_module.leftovers.gc, "collect", lambda: pytest.fail("garbage was collected"))
    captured(lambda x: torch.cat([x.relu(), x.sigmoid()]).chunk(2)[0] * 2)
