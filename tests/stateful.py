"""Networks and processors that keep state between calls, and how they are compared with an untouched twin."""

from __future__ import annotations

import array
import collections
import dataclasses
import itertools
import random
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import Config, accelerate

CALLS = 5


class Part(nn.Module):
    """A module whose forward is a processor's."""

    def __init__(self, processor):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.processor = processor

    def forward(self, x):
        return self.processor(self, self.linear(x))


class Root(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Part(make()), Part(make())

    def forward(self, x):
        return self.second(self.first(x).relu())


class Kept:
    """What processors keep things in."""

    def __init__(self):
        self.items, self.count, self.last = [], 0, None
        self.map, self.deep = {}, {"a": {"b": [[]]}}
        self.deque, self.set = collections.deque(maxlen=3), set()
        self.counter, self.default = collections.Counter(), collections.defaultdict(list)
        self.array = np.zeros(4)
        self.objects = np.array([None, None], dtype=object)
        self.tensor = torch.zeros(4)
        self.scalar = torch.tensor(0.0)
        self.weak = weakref.WeakKeyDictionary()
        self.namespace = types.SimpleNamespace(n=0, seen=[])
        self.iterator = itertools.count()
        self.cycle = itertools.cycle([1.0, 2.0])
        self.generator = (i for i in range(1000))
        self.bytes, self.ints = bytearray(2), array.array("i", [0, 0])
        self.random = random.Random(0)
        self.inner = None
        self.local = threading.local()
        self.local.n = 0


class Slotted:
    __slots__ = ("value", "items")

    def __init__(self):
        self.value, self.items = 0, []


@dataclasses.dataclass
class Data:
    n: int = 0
    maps: list = dataclasses.field(default_factory=list)


class Linked:
    def __init__(self, depth):
        self.next = Linked(depth - 1) if depth else None
        self.n = 0


def deepest(link):
    while link.next is not None:
        link = link.next
    return link
GLOBAL_OBJECT = Kept()


def every_third(k, p, x):
    k.count += 1
    if k.count % 3 == 0:
        k.items.append(x)
    return x


def mixes(k, p, x):
    old, k.last = k.last, x.clone()
    return x if old is None else 0.5 * (x + old)


def through_a_bound_method(k, p, x):
    keep = k.items.append
    keep(x)
    return x


def thread_local(k, p, x):
    k.local.n += 1
    return x * k.local.n


def swaps(k, p, x):
    k.items = [*k.items, x]
    return x


CHANGES = {
    "maps in a list": lambda k, p, x: k.items.append(x) or x,
    "maps in a list that is replaced": swaps,
    "a counter": lambda k, p, x: setattr(k, "count", k.count + 1) or x * (1 if k.count < 5 else 2),
    "the last output": mixes,
    "a dict": lambda k, p, x: k.map.update({len(k.map): x}) or x,
    "a dict by name": lambda k, p, x: k.map.__setitem__("last", x) or x,
    "deep containers": lambda k, p, x: k.deep["a"]["b"][0].append(x) or x,
    "a deque": lambda k, p, x: k.deque.append(x) or x * len(k.deque),
    "a set": lambda k, p, x: k.set.add(len(k.set)) or x * len(k.set),
    "a Counter": lambda k, p, x: k.counter.update("a") or x * k.counter["a"],
    "a defaultdict": lambda k, p, x: k.default["x"].append(x) or x,
    "a NumPy array": lambda k, p, x: np.add(k.array, 1, out=k.array) is None or x * float(k.array[0]),
    "an array of objects": lambda k, p, x: k.objects.__setitem__(0, x) or x,
    "a tensor in place": lambda k, p, x: k.tensor.copy_(x[0]) is None or x,
    "a tensor that is added to": lambda k, p, x: k.tensor.add_(1) is None or x,
    "a scalar tensor": lambda k, p, x: k.scalar.add_(torch.tensor(1.0)) is None or x,
    "a weak dictionary": lambda k, p, x: k.weak.__setitem__(p, x) or x,
    "a namespace": lambda k, p, x: setattr(k.namespace, "n", k.namespace.n + 1) or x * k.namespace.n,
    "a list in a namespace": lambda k, p, x: k.namespace.seen.append(x) or x,
    "itertools.count": lambda k, p, x: x * (1 + next(k.iterator)),
    "itertools.cycle": lambda k, p, x: x * next(k.cycle),
    "a generator": lambda k, p, x: x * (1 + next(k.generator)),
    "a bytearray": lambda k, p, x: k.bytes.__setitem__(0, k.bytes[0] + 1) or x * k.bytes[0],
    "an array": lambda k, p, x: k.ints.__setitem__(1, k.ints[1] + 1) or x * k.ints[1],
    "random numbers": lambda k, p, x: x * k.random.random(),
    "a new attribute": lambda k, p, x: setattr(k, f"new{len(vars(k))}", x) or x,
    "a removed attribute": lambda k, p, x: x * 2 if vars(k).pop("inner", 1) is None else x,
    "every third call": every_third,
    "an attribute of the module": lambda k, p, x: setattr(p, "seen", x) or x,
    "a counter of the module": lambda k, p, x: setattr(p, "n", getattr(p, "n", 0) + 1) or x * p.n,
    "a list of the module": lambda k, p, x: p.__dict__.setdefault("maps", []).append(x) or x,
    "an attribute of a weight": lambda k, p, x: setattr(p.linear.weight, "n", x) or x,
    "a bound method": through_a_bound_method,
    "a thread's own": thread_local,
}


def summary(value, depth=0, seen=None):
    """A value without identities, to be compared between twins."""
    seen = set() if seen is None else seen
    assert not isinstance(value, FakeTensor), "a fake tensor was left"
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), round(float(value.double().sum()), 3))
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if id(value) in seen or isinstance(value, (nn.Module, random.Random, threading.local, types.FunctionType)):
        return type(value).__name__
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return summary(value.tolist(), depth, seen)
    if isinstance(value, dict):
        return [(summary(k, depth, seen), summary(v, depth, seen)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, collections.deque, bytearray, array.array)):
        return [summary(each, depth, seen) for each in value]
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, weakref.WeakKeyDictionary):
        return [summary(v, depth, seen) for v in value.values()]
    if hasattr(value, "__dict__"):
        return [(k, summary(v, depth, seen)) for k, v in vars(value).items()]
    return type(value).__name__


class Processor:
    def __init__(self, kept, change):
        self.kept, self.change = kept, change

    def __call__(self, part, x):
        return self.change(self.kept, part, x)


def run(model, calls=CALLS):
    torch.manual_seed(1)
    inputs = [torch.randn(2, 4) for _ in range(calls)]
    with torch.no_grad():
        return [model(x) for x in inputs]


def built(change, kept):
    return Root(lambda: Processor(kept, change)).eval()


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is torch.Tensor
        torch.testing.assert_close(mine, other)


def fast(model, **more):
    return accelerate(model, Config(allow_cpu=True, drop_slower=False, **more))
