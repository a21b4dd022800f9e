"""Numbers and other constants among the arguments that change from call to call."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.argument_roles import MAX_INPUTS
from sfast_ext.call_signature import first_difference, flatten_call, open_numbers, tensors_alone
from sfast_ext.plans.payback import REJECTED_CALLS
from sfast_ext.reasons import given

CPU = torch.device("cpu")
STEPS = 24
CHANGES = "an argument changes at each step"


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Options:
    scale: float
    names: tuple = ()


Pair = namedtuple("Pair", "left right")


class Kind(enum.Enum):
    ONE, TWO = 1, 2


class Net(nn.Module):
    """Calls `use(out, value)` with the argument `given`."""

    def __init__(self, use) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.use = use

    def forward(self, x, given=None, t=None):
        out = self.use(self.layer(x), given)
        return out if t is None else out + t


def accelerated(use):
    torch.manual_seed(0)
    net = Net(use).eval().requires_grad_(False)
    return net, accelerate(net, Config(allow_cpu=True, drop_slower=False))


def steps(net, values, *, t=None):
    """Each result is that of the original forward."""
    for i, value in enumerate(values):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(i))
        more = {} if t is None else {"t": t(i)}
        expected = Net.forward(net, x, value, **more)
        torch.testing.assert_close(net(x, given=value, **more), expected, rtol=1e-5, atol=1e-5)


def counts(accelerator):
    return accelerator.report.counter("captures"), accelerator.report.counter("eager_runs")


def fraction(i):
    return 1 - i / 50


NUMBERS = {
    "dict": (lambda o, g: o * g["scale"], lambda i: {"scale": fraction(i)}),
    "list": (lambda o, g: o * g[0] + g[1], lambda i: [0.5, fraction(i)]),
    "tuple": (lambda o, g: o * g[1], lambda i: ("a", fraction(i))),
    "named tuple": (lambda o, g: o * g.right, lambda i: Pair(1, fraction(i))),
    "dataclass": (lambda o, g: o * g.scale, lambda i: Options(fraction(i))),
    "dict in dict": (lambda o, g: o * g["a"]["b"], lambda i: {"a": {"b": fraction(i), "c": True}}),
    "list of dicts": (lambda o, g: o * g[1]["s"], lambda i: [{"s": 1.0}, {"s": fraction(i)}]),
    "ordered dict": (lambda o, g: o + g["s"], lambda i: OrderedDict(s=fraction(i))),
    "integer": (lambda o, g: o * g["step"], lambda i: {"step": i}),
    "two numbers": (lambda o, g: o * g[0] + g[1], lambda i: [fraction(i), i]),
    "next to a tensor": (lambda o, g: o + g["x"] * g["s"], lambda i: {"x": torch.full((4,), 2.0), "s": fraction(i)}),
    "next to a string": (lambda o, g: o * g["s"] if g["m"] == "mul" else o, lambda i: {"m": "mul", "s": fraction(i)}),
    "into a tensor": (lambda o, g: o + torch.full_like(o, 1.0) * g["s"], lambda i: {"s": fraction(i)}),
    "negative and large": (lambda o, g: o * g["s"], lambda i: {"s": (-1.0) ** i * 1e6 * i}),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_that_changes_becomes_an_input(kind):
    use, value = NUMBERS[kind]
    net, accelerator = accelerated(use)
    steps(net, [value(i) for i in range(STEPS)])
    captures, ran = counts(accelerator)
    assert captures == 2 and ran == STEPS - 2, accelerator.report.as_dict()
    assert not accelerator.report.as_dict()["reasons"]


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_that_stays_is_a_constant_of_one_plan(kind):
    use, value = NUMBERS[kind]
    net, accelerator = accelerated(use)
    steps(net, [value(3)] * 6)
    assert counts(accelerator) == (1, 5)
    (plan,) = accelerator.plans.values()
    assert plan.built_for is None


BRANCHES: dict[str, Any] = {
    "comparison": (lambda o, g: o if g["s"] == 1.0 else o * g["s"], lambda i: {"s": fraction(i)}),
    "conversion": (lambda o, g: o * float(g["s"]), lambda i: {"s": fraction(i)}),
    "size": (lambda o, g: o[:, : g["n"]].repeat(1, 4)[:, :4], lambda i: {"n": 1 + i % 4}),
    "shape": (lambda o, g: o + torch.ones(g[0], 4).sum(), lambda i: [i + 1]),
    "range": (lambda o, g: o + sum(range(g["n"])), lambda i: {"n": i}),
    "key of a table": (lambda o, g: o * {k: k + 0.5 for k in range(99)}[g["n"]], lambda i: {"n": i}),
    "kind": (lambda o, g: o * g["s"] if isinstance(g["s"], float) else o * 7.0, lambda i: {"s": fraction(i)}),
    "method": (lambda o, g: o * g["s"].as_integer_ratio()[0], lambda i: {"s": float(i)}),
    "text": (lambda o, g: o * len(f"{g['s']:.3f}") * g["s"], lambda i: {"s": fraction(i)}),
    "truth": (lambda o, g: o * 2 if g[0] else o, lambda i: [i % 2]),
}


@pytest.mark.parametrize("kind", BRANCHES)
def test_a_forward_that_cannot_take_it_as_an_input_is_right_and_not_captured_for_ever(kind):
    use, value = BRANCHES[kind]
    net, accelerator = accelerated(use)
    values = [value(i) for i in range(STEPS)]
    steps(net, values)
    captures, _ = counts(accelerator)
    assert captures <= 4, accelerator.report.as_dict()
    status = accelerator.report.as_dict()
    assert status["last_error"] is None
    if len({str(v) for v in values}) == STEPS:
        assert any(r.startswith(CHANGES) and "given" in r for r in status["reasons"]), status["reasons"]
    # and one that stays gets its plan
    before = accelerator.report.counter("eager_runs")
    steps(net, [values[5]] * 12)
    assert accelerator.report.counter("eager_runs") > before + 3


@pytest.mark.parametrize("kind", BRANCHES)
def test_a_number_of_its_own_stays_an_input_next_to_one_that_is_branched_on(kind):
    use, value = BRANCHES[kind]
    net, accelerator = accelerated(use)
    steps(net, [value(2)] * STEPS, t=lambda i: 981 - 20 * i)
    assert counts(accelerator) == (1, STEPS - 1), accelerator.report.as_dict()


CONSTANTS: dict[str, Any] = {
    "string": lambda i: f"step {i}",
    "string in a dict": lambda i: {"name": f"step {i}"},
    "sizes": lambda i: tuple(range(i)),
    "tuple of strings": lambda i: (str(i), "a"),
    "bytes": lambda i: bytes([i]),
    "keys": lambda i: {f"block {i}": True},
    "integer keys": lambda i: {i: True},
    "many numbers": lambda i: [i + n for n in range(40)],
    "device": lambda i: torch.device("cuda", i),
    "flags": lambda i: [bool(i >> n & 1) for n in range(6)],
    "length of a list": lambda i: [None] * i,
    "dataclass": lambda i: Options(0.5, ("x",) * i),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_another_constant_that_changes_at_each_call_is_seen_by_the_back_off(kind):
    net, accelerator = accelerated(lambda o, g: o + len(str(g)))
    steps(net, [CONSTANTS[kind](i) for i in range(STEPS)])
    captures, _ = counts(accelerator)
    status = accelerator.report.as_dict()
    assert captures <= 2, status
    (reason,) = status["reasons"]
    assert reason.startswith(CHANGES) and ": given" in reason
    assert status["reasons"][reason] >= STEPS - 3


ALTERNATING: dict[str, Any] = {
    "bool": (True, False),
    "none": (None, "on"),
    "enum": (Kind.ONE, Kind.TWO),
    "strings": ("cond", "uncond"),
    "dtype": (torch.float16, torch.float32),
    "three": ("a", "b", "c"),
    "none or a tensor": (None, torch.ones(4)),
    "flag in a dict": ({"guess": True}, {"guess": False}),
}


@pytest.mark.parametrize("kind", ALTERNATING)
def test_a_few_constants_in_turn_have_a_plan_each(kind):
    several = ALTERNATING[kind]
    net, accelerator = accelerated(lambda o, g: o + g if isinstance(g, torch.Tensor) else o * len(str(g)))
    steps(net, [several[i % len(several)] for i in range(STEPS)])
    captures, ran = counts(accelerator)
    assert captures == len(several) and ran >= STEPS - 2 * len(several) - 3, accelerator.report.as_dict()


def test_a_plan_with_a_number_as_input_is_compared_again_at_its_next_value():
    """A forward may use a number in a way that a comparison at one value does not tell."""
    net, accelerator = accelerated(lambda o, g: o * g["s"] if isinstance(g["s"], float) else o * 0.999)
    # within the tolerance at the value of the capture, not at the next
    steps(net, [{"s": 1.0}])
    for value in (0.999, 0.5, 0.4, 0.3, 0.2):
        x = torch.randn(2, 4)
        expected = Net.forward(net, x, {"s": value})
        torch.testing.assert_close(net(x, given={"s": value}), expected, rtol=1e-5, atol=1e-5)
    assert accelerator.report.as_dict()["last_error"] is None


def test_the_scale_of_every_generation_is_served_by_one_plan_from_the_second_on():
    net, accelerator = accelerated(lambda o, g: o * g["scale"])
    for scale in (0.8, 1.0, 0.5, 0.7):
        accelerator.new_generation()
        steps(net, [{"scale": scale}] * 5)
    assert accelerator.report.counter("captures") == 2 and accelerator.report.counter("eager_runs") == 18


def test_a_refused_key_is_tried_again_if_no_generations_are_announced(monkeypatch):
    net, accelerator = accelerated(lambda o, g: o)
    steps(net, [None] * 3)
    (plan,) = accelerator.plans.values()
    monkeypatch.setattr(plan, "_function", lambda *args: 1 / 0)
    steps(net, [None] * (REJECTED_CALLS + 1))
    assert not accelerator.plans and accelerator.report.counter("captures") == 1
    before = accelerator.report.counter("eager_runs")
    steps(net, [None] * 3)
    assert len(accelerator.plans) == 1 and accelerator.report.counter("eager_runs") == before + 2


def test_each_refusal_lasts_twice_as_long(monkeypatch):
    monkeypatch.setattr("sfast_ext.plans.payback.REJECTED_CALLS", 4)
    _, accelerator = accelerated(lambda o, g: o)
    lasted = []
    for _ in range(4):
        accelerator._cache.reject("key", given("a reason"))
        calls = 0
        while accelerator._cache.rejection("key") is not None:
            calls += 1
        lasted.append(calls)
    assert lasted == [4, 8, 16, 32]
    accelerator.new_generation()
    accelerator._cache.reject("key", given("a reason"))
    assert all(accelerator._cache.rejection("key") for _ in range(200))


def test_a_number_that_stays_is_a_constant_next_to_one_that_changes():
    """A forward may branch on it."""
    net, accelerator = accelerated(lambda o, g: o * g["s"] if g["mode"] == 1 else o)
    steps(net, [{"mode": 1, "s": fraction(i)} for i in range(STEPS)])
    assert counts(accelerator) == (2, STEPS - 2), accelerator.report.as_dict()


def test_many_numbers_that_change_stay_constants():
    """Each input is copied by itself."""
    net, accelerator = accelerated(lambda o, g: o * sum(g))
    steps(net, [[float(i + n) for n in range(MAX_INPUTS)] for i in range(STEPS)])
    assert counts(accelerator) == (2, STEPS - 2)
    net, accelerator = accelerated(lambda o, g: o * sum(g))
    steps(net, [[float(i + n) for n in range(MAX_INPUTS + 1)] for i in range(STEPS)])
    assert counts(accelerator) == (2, 0)


def call(*args, **kwargs):
    return flatten_call(args, kwargs, CPU)


def test_signatures_without_numbers_and_without_constants():
    x = torch.zeros(2, 3)
    one, other = call(x, 3, a={"b": [1, 0.5, "x", True]}), call(x, 7, a={"b": [2, 0.25, "x", True]})
    assert one.signature != other.signature and one.nested == [1, 0.5] and not one.inputs
    assert open_numbers(one.signature) == open_numbers(other.signature)
    assert open_numbers(one.signature) != open_numbers(call(x, 7, a={"b": [2, 0.25, "y", True]}).signature)
    assert open_numbers(one.signature) != open_numbers(call(x, 7, a={"b": [2, 0.25, "x", False]}).signature)
    assert open_numbers(one.signature) != open_numbers(call(x, 7, a={"b": [2.0, 0.25, "x", True]}).signature)
    assert tensors_alone(one.signature) == tensors_alone(call(x).signature)
    assert tensors_alone(one.signature) != tensors_alone(call(x.t()).signature)
    opened = flatten_call((x, 3), {"a": {"b": [1, 0.5, "x", True]}}, CPU, inputs=frozenset({1}))
    assert [leaf for leaf in opened.leaves if not isinstance(leaf, torch.Tensor)] == [3, 0.5]
    assert open_numbers(opened.signature) == open_numbers(one.signature)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        (call("a"), call("b"), "argument 0"),
        (call(a={"b": [1, 2]}), call(a={"b": [1, 3]}), "a['b'][1]"),
        (call(a=Options(1.0)), call(a=Options(2.0)), "a.scale"),
        (call(a=[1]), call(a=[1, 2]), "a"),
        (call(a={"x": 1}), call(a={"y": 1}), "a"),
        (call(a=None), call(a="x"), "a"),
        (call(a=1), call(b=1), "the arguments"),
        (call(torch.zeros(2)), call(torch.ones(2)), None),
    ],
)
def test_the_first_difference_is_named(one, other, place):
    assert first_difference(one.signature, other.signature) == place
