"""A host's blocks note in the defaults of their parameters where they are: see `Hooks.ignored`."""

from __future__ import annotations

import pytest
import torch
from test_state_changes import assert_same
from torch import nn

from sfast_ext import Config, Hooks, accelerate


def note(options, index):
    if isinstance(options, dict):
        options["block_index"] = index
    elif isinstance(options, list):
        options[:] = [index]
    else:
        options.add(index)


class InADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, options={}):  # noqa: B006
        note(options, 1)
        return self.linear(x)


class InAList(InADict):
    def forward(self, x, options=[]):  # noqa: B006
        note(options, 1)
        return self.linear(x)


class InASet(InADict):
    def forward(self, x, options=set()):  # noqa: B006
        note(options, 1)
        return self.linear(x)


class ByKeyword(InADict):
    def forward(self, x, *, options={}):  # noqa: B006
        note(options, 1)
        return self.linear(x)


class AfterOthers(InADict):
    def forward(self, x, context=None, scale=2.0, options={}):  # noqa: B006
        note(options, 1)
        return self.linear(x) * scale


class BeforeOthers(InADict):
    def forward(self, x, options={}, scale=2.0):  # noqa: B006
        note(options, 1)
        return self.linear(x) * scale


class NotEmpty(InADict):
    def forward(self, x, options={"block_index": 0, "block": "input"}):  # noqa: B006
        note(options, 1)
        return self.linear(x)


class InAMethod(InADict):
    def forward(self, x):
        return self._forward(x)

    def _forward(self, x, options={}):  # noqa: B006
        note(options, 1)
        return self.linear(x)


class HandedOn(InAMethod):
    def forward(self, x, options={}):  # noqa: B006
        return self._forward(x, options)


def noting(linear, x, options={}):  # noqa: B006
    note(options, 1)
    return linear(x)


class InAFunction(InADict):
    def forward(self, x):
        return noting(self.linear, x)


KINDS = (
    InADict, InAList, InASet, ByKeyword, AfterOthers, BeforeOthers, NotEmpty, InAMethod, HandedOn, InAFunction,
)  # fmt: skip


class Root(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.block = kind()

    def forward(self, x):
        return self.block(x).relu()


@pytest.fixture(autouse=True)
def _as_at_the_start():
    functions = [value for kind in KINDS for value in vars(kind).values() if hasattr(value, "__defaults__")]
    for function in (*functions, noting):
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(value, (dict, list, set)):
                value.clear()
    NotEmpty.forward.__defaults__[0].update(block_index=0, block="input")


def called(kind, ignored):
    model = Root(kind).eval()
    hooks = Hooks(ignored=frozenset(ignored))
    accelerator = accelerate(model, Config(allow_cpu=True, drop_slower=False), hooks=hooks)
    torch.manual_seed(1)
    with torch.no_grad():
        x = torch.randn(2, 4)
        return accelerator, [model(x), model(x)], [Root(kind).eval()(x)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_call_gets_its_plan(kind):
    accelerator, found, expected = called(kind, ["options"])
    assert_same(found, expected)
    assert accelerator.plans and accelerator.report.as_dict()["reasons"] == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ignored", [[], ["x", "scale", "block_index"]], ids=["none", "others"])
def test_a_default_that_the_host_does_not_name_is_state(kind, ignored):
    accelerator, found, expected = called(kind, ignored)
    assert_same(found, expected)
    assert any("keeps state between calls" in reason for reason in accelerator.report.as_dict()["reasons"])
