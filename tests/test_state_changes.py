"""A forward that changes what it can reach runs once for each call, and what it keeps is what it keeps without us."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import dataclasses
import functools
import gc
import itertools
import random
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import Config, accelerate
from sfast_ext.capture import capture

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


def plain(part, x):
    return x


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


GLOBAL_LIST: list = []
GLOBAL_COUNT = 0
GLOBAL_DEEP = {"banks": [{"maps": []}]}
GLOBAL_OBJECT = Kept()
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
elsewhere = types.ModuleType("elsewhere_for_state")
elsewhere.seen = 0
elsewhere.maps = []
sys.modules["elsewhere_for_state"] = elsewhere


class OnClass:
    count = 0
    maps: list = []
    by_name: dict = {}


class Inherits(OnClass):
    pass


class WithProperty:
    def __init__(self):
        self._n = 0

    @property
    def n(self):
        self._n += 1
        return self._n


@functools.lru_cache(maxsize=None)
def bank():
    return []


def global_count(k, p, x):
    global GLOBAL_COUNT
    GLOBAL_COUNT += 1
    return x * (1 + GLOBAL_COUNT / 10)


def new_global(k, p, x):
    globals()["GLOBAL_NEW"] = globals().get("GLOBAL_NEW", 0) + 1
    return x


def context(k, p, x):
    VARIABLE.set(VARIABLE.get() + 1)
    return x * VARIABLE.get()


def lists_of_a_default(k, p, x, seen=[]):  # noqa: B006
    seen.append(x)
    return x + len(seen)


def attribute_of_a_function(k, p, x):
    attribute_of_a_function.n = getattr(attribute_of_a_function, "n", 0) + 1
    return x * attribute_of_a_function.n


def every_third(k, p, x):
    k.count += 1
    if k.count % 3 == 0:
        k.items.append(x)
    return x


def in_a_module(k, p, x):
    import elsewhere_for_state

    elsewhere_for_state.seen += 1
    elsewhere_for_state.maps.append(x)
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
ELSEWHERE = {
    "a global list": (lambda k, p, x: GLOBAL_LIST.append(x) or x, lambda: len(GLOBAL_LIST)),
    "a global number": (global_count, lambda: GLOBAL_COUNT),
    "a new global": (new_global, lambda: globals().get("GLOBAL_NEW", 0)),
    "deep in a global": (
        lambda k, p, x: GLOBAL_DEEP["banks"][0]["maps"].append(x) or x, lambda: len(GLOBAL_DEEP["banks"][0]["maps"])
    ),
    "a global object": (
        lambda k, p, x: setattr(GLOBAL_OBJECT, "count", GLOBAL_OBJECT.count + 1) or x, lambda: GLOBAL_OBJECT.count
    ),
    "a context variable": (context, lambda: VARIABLE.get()),
    "an attribute of a class": (
        lambda k, p, x: setattr(OnClass, "count", OnClass.count + 1) or x * OnClass.count, lambda: OnClass.count
    ),
    "a list of a class": (lambda k, p, x: Inherits.maps.append(x) or x, lambda: len(OnClass.maps)),
    "a dict of a class": (
        lambda k, p, x: OnClass.by_name.__setitem__(len(OnClass.by_name), x) or x, lambda: len(OnClass.by_name)
    ),
    "an attribute of another module": (in_a_module, lambda: (elsewhere.seen, len(elsewhere.maps))),
    "a default argument": (lists_of_a_default, lambda: len(lists_of_a_default.__defaults__[0])),
    "an attribute of a function": (attribute_of_a_function, lambda: getattr(attribute_of_a_function, "n", 0)),
}  # fmt: skip


def fakes(*things):
    """FakeTensors among all that is alive."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is FakeTensor and any(each is thing for thing in things)]


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


@pytest.mark.parametrize("generations", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_processor_keeps_is_what_it_keeps_without_us(name, generations):
    mine, theirs = Kept(), Kept()
    ours, twin = built(CHANGES[name], mine), built(CHANGES[name], theirs)
    accelerator = fast(ours)
    if generations:
        accelerator.new_generation()
    assert_same(run(ours), run(twin))
    assert summary(mine) == summary(theirs)
    for a, b in ((ours.first, twin.first), (ours.second, twin.second)):
        assert summary({k: v for k, v in vars(a).items() if k in ("seen", "n", "maps")}) == summary(
            {k: v for k, v in vars(b).items() if k in ("seen", "n", "maps")}
        )
    assert not accelerator.plans or name == "a removed attribute"
    accelerator.release()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_kept_elsewhere_is_what_is_kept_without_us(name):
    change, read = ELSEWHERE[name]
    before = copy.deepcopy(read())
    ours, twin = built(change, Kept()), built(change, Kept())
    accelerator = fast(ours)
    expected_calls = 2 * CALLS
    run(ours)
    mine = read()
    run(twin)
    theirs = read()

    def grown(a, b):
        return [y - x for x, y in zip(a, b)] if isinstance(a, tuple) else b - a

    assert grown(before, mine) == grown(mine, theirs)
    assert grown(before, mine) in (expected_calls, [expected_calls] * 2)
    assert not accelerator.plans
    accelerator.release()


def test_the_reason_names_what_is_changed_from_the_first_call_on():
    kept = Kept()
    model = built(CHANGES["maps in a list"], kept)
    accelerator = fast(model)
    run(model, 1)
    (row,) = accelerator.report.as_dict()["reasons_listed"]
    assert row["reason"] == "its forward keeps state between calls, in first.processor.kept.items"
    run(model, 4)
    assert len(kept.items) == 10


WRAPPERS = {}


def wrapper(cls):
    WRAPPERS[cls.__name__] = cls
    return cls


@wrapper
class EverySecond:
    def __init__(self, inner):
        self.inner, self.n, self.last = inner, 0, None

    def __call__(self, x):
        self.n += 1
        if self.n % 2:
            self.last = self.inner(x)
        return self.last * 1.0


@wrapper
class WithCache:
    """As DeepCache keeps features, in a dict of dicts."""

    def __init__(self, inner):
        self.inner, self.cache = inner, {"step": 0, "features": {}}

    def __call__(self, x):
        self.cache["step"] += 1
        if self.cache["step"] % 3 == 1:
            self.cache["features"]["out"] = self.inner(x)
        return self.cache["features"]["out"] + x * 0.1


def closed_over(inner):
    n, last = 0, None

    def forward(x):
        nonlocal n, last
        n += 1
        if n % 2:
            last = inner(x)
        return last + 0

    return forward


def in_a_partial(inner):
    def step(state, x):
        state.append(x)
        return inner(x) * len(state)

    return functools.partial(step, [])


WRAPPERS["closed_over"] = closed_over
WRAPPERS["in_a_partial"] = in_a_partial


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_of_the_forward_that_counts_stays_in_phase(name):
    ours, twin = Root(lambda: plain).eval(), Root(lambda: plain).eval()
    ours.forward, twin.forward = WRAPPERS[name](ours.forward), WRAPPERS[name](twin.forward)
    accelerator = fast(ours)
    assert_same(run(ours, 7), run(twin, 7))
    assert not accelerator.plans
    reasons = accelerator.report.as_dict()["reasons"]
    assert any("keeps state between calls" in reason for reason in reasons), reasons
    accelerator.release()


def filled_once(k, p, x):
    if k.last is None:
        k.last = 2.0
    return x * k.last


def by_shape(k, p, x):
    if x.shape not in k.map:
        k.map[x.shape] = float(x.shape[0])
    return x * k.map[x.shape]


class Makers(collections.OrderedDict):
    """Makes an object for each look, as the table of activations of transformers does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


MAKERS = Makers(number=functools.partial(float, 2), thing=object)

NO_CHANGE = {
    "what is filled once": filled_once,
    "what is filled by shape": by_shape,
    "an equal value": lambda k, p, x: setattr(k, "count", int("0")) or x,
    "an equal list": lambda k, p, x: setattr(k, "shape", [2, 4]) or x,
    "the shape": lambda k, p, x: setattr(k, "last", tuple(x.shape)) or x,
    "a local list": lambda k, p, x: [x].pop(),
    "a cache of numbers": lambda k, p, x: x * doubled(2),
    "what is put and taken": lambda k, p, x: (k.items.append(x), k.items.pop())[1],
    "a flag that is set and put back": lambda k, p, x: (setattr(k, "count", 5), setattr(k, "count", 0)) and x,
    "a look at a table that makes its entries": lambda k, p, x: x * MAKERS["number"],
    "a read": lambda k, p, x: x * (k.count + 1) + len(k.items),
}


@functools.lru_cache(maxsize=None)
def doubled(n):
    return 2 * n


@pytest.mark.parametrize("name", NO_CHANGE)
def test_what_changes_nothing_is_accelerated(name):
    mine, theirs = Kept(), Kept()
    ours, twin = built(NO_CHANGE[name], mine), built(NO_CHANGE[name], theirs)
    accelerator = fast(ours)
    assert_same(run(ours), run(twin))
    (plan,) = accelerator.plans.values()
    assert plan.replays >= 2
    assert summary(mine) == summary(theirs)
    accelerator.release()


def test_state_that_is_no_longer_changed_is_no_obstacle():
    kept = Kept()
    model = built(CHANGES["maps in a list"], kept)
    accelerator = fast(model)
    run(model)
    assert not accelerator.plans
    model.first.processor.change = model.second.processor.change = NO_CHANGE["a read"]
    run(model, 8)
    assert accelerator.plans and len(kept.items) == 2 * CALLS
    accelerator.release()


def test_a_run_that_is_recorded_and_fails_is_repeated_from_where_it_began(monkeypatch):
    from sfast_ext.capture.live_trace import SUPPORTED, LiveTrace

    if not SUPPORTED:
        pytest.skip("this torch records no run on real tensors")
    def counts_where_it_is_asked_to(k, p, x):
        if x.shape[0] == 3 and type(x) is torch.Tensor and torch.overrides._len_torch_function_stack():
            k.count += 1
            raise RuntimeError("only under a mode")
        return x * (1 + k.count)

    kept = Kept()
    model = built(counts_where_it_is_asked_to, kept)
    accelerator = fast(model)
    run(model, 2)
    assert len(accelerator.plans) == 1
    recorded = []
    begin = LiveTrace._begin
    monkeypatch.setattr(LiveTrace, "_begin", lambda self, call: recorded.append(1) or begin(self, call))
    with torch.no_grad():
        result = model(torch.ones(3, 4))
    assert recorded and kept.count == 0
    torch.testing.assert_close(result, accelerator.run_original(torch.ones(3, 4)).detach())
    accelerator.release()


def test_another_thread_may_write_to_what_the_program_holds_while_a_plan_is_made(monkeypatch):
    written = threading.Event()

    def forward(k, p, x):
        if isinstance(x, FakeTensor) and not written.is_set():
            # as a thread of a page, in the middle of the capture
            thread = threading.Thread(target=lambda: setattr(GLOBAL_OBJECT, "last", "interrupted"))
            thread.start(), thread.join(), written.set()
        return x * (2 if GLOBAL_OBJECT.inner is None else 3)

    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait, daemon=True)
    other.start()
    GLOBAL_OBJECT.last = None
    model = built(forward, Kept())
    accelerator = fast(model)
    run(model, 1)
    assert GLOBAL_OBJECT.last == "interrupted" and not accelerator.plans
    run(model, 3)
    assert len(accelerator.plans) == 1
    waiting.set()
    accelerator.release()
    GLOBAL_OBJECT.last = None


class Host:
    """An object of a program, of which code of the forward names one attribute."""

    scale = 2.0

    def __init__(self):
        self.progress = types.SimpleNamespace(text="")


HOST = Host()


def reads_the_host(part, x):
    return x * HOST.scale


def test_what_no_code_of_the_forward_names_may_change_while_a_plan_is_made(monkeypatch):
    record = capture.record

    def recorded(*args, **kwargs):
        # a program shows what is going on
        HOST.progress.text = f"recording {time.time()}"
        return record(*args, **kwargs)

    monkeypatch.setattr(capture, "record", recorded)
    ours = Root(lambda: reads_the_host)
    accelerator = fast(ours)
    run(ours)
    (plan,) = accelerator.plans.values()
    assert plan.replays >= 2 and "recording" in HOST.progress.text
    accelerator.release()
