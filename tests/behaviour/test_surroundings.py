"""Functions of torch that somebody replaced, and hooks on all modules."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sfast_ext import Config, Hooks, accelerate
from sfast_ext.behaviour import surroundings
from sfast_ext.behaviour.fingerprint import fingerprint

CPU = Config(allow_cpu=True)
functional = nn.functional


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.SiLU()

    def forward(self, x):
        h = functional.interpolate(self.act(self.norm(self.conv(x))), scale_factor=2.0, mode="nearest")
        rows = torch.cat([h, h], dim=1).to(x.dtype).flatten(2)
        return functional.scaled_dot_product_attention(rows, rows, rows)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


def written_elsewhere(source, **scope):
    scope["__name__"] = "zz_script"
    exec(compile(source, "/webui/scripts/zz_script.py", "exec"), scope)
    return scope["f"]


SCALING = """
def make(before, state):
    def f(*args, **kwargs):
        return before(*args, **kwargs) * state["k"]
    return f

f = make(before, state)
"""


def scaling(before, factor=1.5):
    return written_elsewhere(SCALING, before=before, state={"k": factor})


REPLACED = {
    "torch.nn.functional.group_norm": (functional, "group_norm"),
    "torch.nn.functional.silu": (functional, "silu"),
    "torch.nn.functional.interpolate": (functional, "interpolate"),
    "torch.nn.functional.conv2d": (functional, "conv2d"),
    "torch.cat": (torch, "cat"),
    "torch.Tensor.to": (torch.Tensor, "to"),
    "torch.Tensor.flatten": (torch.Tensor, "flatten"),
    "torch.nn.functional.scaled_dot_product_attention": (functional, "scaled_dot_product_attention"),
    "conv has a foreign function in its class": (nn.Conv2d, "_conv_forward"),
    "act has a foreign function in its class": (nn.SiLU, "__call__"),
    "torch.nn.Module._call_impl": (nn.Module, "_call_impl"),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", REPLACED)
def test_while_a_function_is_replaced_the_original_runs_and_no_plan_is_made_or_lost(name, first, model, monkeypatch):
    acc = accelerate(model, CPU)
    x = torch.randn(1, 4, 8, 8)
    stock = Net.forward(model, x)
    if not first:
        model(x), model(x)
    home, function = REPLACED[name]
    with monkeypatch.context() as patched:
        patched.setattr(home, function, scaling(getattr(home, function)))
        patches = fingerprint(model).patches
        results = [model(x), model(x)]
        # not the module's own call, which the replaced function may be a part of
        expected = Net.forward(model, x)
        if name != "torch.nn.Module._call_impl":
            assert all(torch.equal(result, expected) for result in results)
    told = [str(p.reason()) for p in patches]
    assert any(name in each and "zz_script.make.<locals>.f in scripts/zz_script.py" in each for each in told)
    assert any(name in reason for reason in acc.report.as_dict()["reasons"])
    counter = acc.report.counter
    assert counter("captures") == (not first) and not counter("errors")
    for _ in range(2):
        torch.testing.assert_close(model(x), stock, rtol=1e-4, atol=1e-4)
    assert counter("captures") == 1 and counter("eager_runs") >= 1 + (not first)
    acc.release()


def test_one_of_torchs_own_functions_in_the_place_of_another(model, monkeypatch):
    before = fingerprint(model)
    assert before.unchanged() and before.patches == []
    with monkeypatch.context() as patched:
        patched.setattr(functional, "silu", functional.gelu)
        assert not before.unchanged() and not before.unchanged_quick() and fingerprint(model).key != before.key
        first = fingerprint(model).patches[0]
        assert str(first.reason()).startswith("torch.nn.functional.silu is replaced by")
        patched.delattr(functional, "silu")
        assert [str(p.reason()) for p in fingerprint(model).patches] == ["torch.nn.functional.silu is gone"]
    assert before.unchanged() and fingerprint(model).key == before.key


@pytest.mark.parametrize("name", ["load", "randn", "manual_seed"])
def test_functions_that_compute_nothing_do_not_count(name, model, monkeypatch):
    before = fingerprint(model)
    monkeypatch.setattr(torch, name, lambda *a, **k: None)
    torch.something_new = 1
    assert before.unchanged() and fingerprint(model).key == before.key
    del torch.something_new


def attention(source, **scope):
    return written_elsewhere(source, before=functional.scaled_dot_product_attention, **scope)


PLAIN = """
FACTOR = 2.0
def scaled(q):
    return q * FACTOR

def f(q, k, v, **options):
    return before(scaled(q), k, v, **options)
"""
CLOSED = """
def make():
    factor = 2.0

    def f(q, k, v, **options):
        return before(q * factor, k, v, **options)

    def turn(value):
        nonlocal factor
        factor = value

    f.turn = turn
    return f

f = make()
"""
KEEPS = {
    "a dictionary": PLAIN.replace("= 2.0", "= {1: 2.0}").replace("* FACTOR", "* FACTOR[1]"),
    "an object": PLAIN.replace("* FACTOR", "* state.factor"),
    "a module": PLAIN.replace("* FACTOR", "* shared.factor"),
}


def test_an_attention_that_keeps_plain_values_alone_is_captured_with_them(model, monkeypatch):
    acc = accelerate(model, CPU)
    x = torch.randn(1, 4, 8, 8)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention(PLAIN))
    for factor in (2.0, 3.0, 2.0):
        functional.scaled_dot_product_attention.__globals__["FACTOR"] = factor
        model(x)
        torch.testing.assert_close(model(x), Net.forward(model, x), rtol=1e-4, atol=1e-4)
    assert acc.report.counter("captures") == 2 and acc.report.counter("eager_runs") == 4
    acc.release()


def test_an_attention_that_keeps_a_number_in_its_closure_is_captured_with_it(model, monkeypatch):
    acc = accelerate(model, CPU)
    x = torch.randn(1, 4, 8, 8)
    closed = attention(CLOSED)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", closed)
    for factor in (2.0, 3.0, 2.0):
        closed.turn(factor)
        model(x)
        torch.testing.assert_close(model(x), Net.forward(model, x), rtol=1e-4, atol=1e-4)
    assert acc.report.counter("captures") == 2 and acc.report.counter("eager_runs") == 4
    acc.release()


@pytest.mark.parametrize("what", KEEPS)
def test_an_attention_that_keeps_more_goes_to_the_original(what, model, monkeypatch):
    kept = types.SimpleNamespace(factor=2.0)
    module = types.ModuleType("shared")
    module.factor = 2.0
    function = attention(KEEPS[what], state=kept, shared=module)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", function)
    (patch,) = fingerprint(model).patches
    assert patch.path == "torch.nn.functional.scaled_dot_product_attention"


def test_a_host_vouches_for_what_it_replaced_itself(model, monkeypatch):
    acc = accelerate(model, CPU, hooks=Hooks(recognised=lambda module, kind, function: kind == "replaced"))
    x = torch.randn(1, 4, 8, 8)
    for factor in (1.0, 2.0):
        monkeypatch.setattr(nn.functional, "pad", scaling(functional.pad, factor))
        model(x), model(x)
    assert acc.report.counter("captures") == 2 and acc.report.counter("eager_runs") == 2
    acc.release()


def test_what_a_tracer_of_torch_exchanges_while_it_traces_is_no_patch(model):
    found = []

    def traced(x):
        found.append((before.unchanged(), surroundings.look().replaced, fingerprint(model).patches))
        return x + 1

    before = fingerprint(model)
    torch.fx.symbolic_trace(traced)
    assert found == [(True, (), [])]


@pytest.mark.parametrize("pre", [False, True])
def test_under_a_hook_on_all_modules_the_original_runs_and_is_named(pre, model):
    acc = accelerate(model, CPU)
    x = torch.randn(1, 4, 8, 8)
    model(x), model(x)
    factor = 1.5

    def louder(module, args, result=None):
        if isinstance(module, nn.GroupNorm):
            return (args[0] * factor,) if result is None else result * factor
        return None

    handle = register_module_forward_pre_hook(louder) if pre else register_module_forward_hook(louder)
    try:
        for factor in (1.5, 2.5):  # noqa: B007 - the hook reads it
            assert torch.equal(model(x), Net.forward(model, x))
        (reason,) = acc.report.as_dict()["reasons"]
        assert "hook on all modules" in reason and "louder in behaviour/test_surroundings.py" in reason
    finally:
        handle.remove()
    torch.testing.assert_close(model(x), Net.forward(model, x), rtol=1e-4, atol=1e-4)
    assert acc.report.counter("captures") == 1 and acc.report.counter("eager_runs") == 2
    acc.release()
