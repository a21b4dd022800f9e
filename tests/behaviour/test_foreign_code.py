"""Classes that another party patched: whose code it is, and what it keeps in its closure."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from sfast_ext.behaviour.fingerprint import fingerprint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


@pytest.fixture
def model():
    return nn.Sequential(Block(), Block())


def key(model):
    return fingerprint(model).key


STATEFUL = """
import functools
import torch

def make(original, state):
    @functools.wraps(original)
    def scaled(self, *args):
        return original(self, *args) * state["k"]

    return scaled, torch.no_grad()(scaled), functools.partialmethod(scaled)
"""


@pytest.mark.parametrize("how", range(3))
@pytest.mark.parametrize("kind", [Block, nn.Linear])
@pytest.mark.parametrize("file", ["scripts/zz_scaler.py", "venv/lib/site-packages/scaler/patch.py"])
def test_a_class_patched_by_code_from_anywhere_is_a_patch_and_says_whose(file, kind, how, model, monkeypatch):
    scope = {"__name__": "zz_scaler"}
    exec(compile(STATEFUL, f"/home/somebody/webui/{file}", "exec"), scope)
    monkeypatch.setattr(kind, "forward", scope["make"](kind.forward, {"k": 2.0})[how])
    found = fingerprint(model).patches
    assert {p.kind for p in found} == {"class"} and all(type(p.module) is kind for p in found)
    assert f"zz_scaler.scaled in {'/'.join(file.split('/')[-2:])}" in str(found[0].reason())
    assert "somebody" not in str(found[0].reason())


def test_state_in_the_closure_of_a_class_patched_by_its_own_package_is_in_the_key(model, monkeypatch):
    state, number, original = {"k": [1.0]}, 1.0, Block.forward

    def scaled(self, x):
        return original(self, x) * state["k"][0] * number

    monkeypatch.setattr(Block, "forward", torch.no_grad()(scaled))
    before = fingerprint(model)
    assert before.patches == [] and before.unchanged()
    state["k"][0] = 2.0
    middle = fingerprint(model)
    number = 2.0
    assert not before.unchanged() and not middle.unchanged() and len({before.key, middle.key, key(model)}) == 3


def test_what_decorators_of_libraries_put_around_a_method_is_no_patch(model, monkeypatch):
    scope = {"__name__": "a_library.decorators"}
    exec(compile(STATEFUL, "/venv/lib/site-packages/a_library/decorators.py", "exec"), scope)
    Block.from_afar = scope["make"](Block.forward, {"k": 1.0})[0]
    try:
        assert [p.kind for p in fingerprint(model).patches] == ["function", "function"]
        # whoever wrote the class took the decorator from there
        monkeypatch.setitem(globals(), "a_library", types.ModuleType("a_library"))
        assert fingerprint(model).patches == []
    finally:
        del Block.from_afar
