"""States of torch around a call: which have the original run, which are part of a plan's key, which change nothing."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_states import (
    latent,
    no_gradients,  # noqa: F401
    pair,
    reasons,
    registered,
    runs,
)

from sfast_ext import Config, accelerate, torch_state
from sfast_ext.runtime import plan_finder


class Around(nn.Module):
    def __init__(self, net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 1.5 if function is F.linear else out


class Watches(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 1.001 if function is torch.ops.aten.convolution.default else out


def under(*modes):
    def use(net, x):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return net(x)

    return use


def dual(net, x):
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x + 1)))
        return torch.cat([primal, tangent])


def flops(net, x):
    with FlopCounterMode(display=False) as counter:
        out = net(x)
    assert counter.get_total_flops() > 0
    return torch.cat([out.flatten(), torch.tensor([float(counter.get_total_flops())])])


def fake(net, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = net(mode.from_tensor(x))
    assert type(out).__name__ == "FakeTensor"
    return torch.zeros(out.shape)


def made_fx(**options):
    def use(net, x):
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(lambda z: net(z), **options)(latent(5))(x)

    return use


def traced(net, x):
    return torch.jit.trace(Around(net), latent(5), check_trace=False)(x)


def symbolic(net, x):
    return torch.fx.symbolic_trace(Around(net))(x)


def symbolic_constant(net, x):
    """The network is called with a tensor, and the trace records its parameters all the same."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, y):
            return y + self.net(x)

    return torch.fx.symbolic_trace(Constant())(torch.zeros(()))


def functional(transform):
    def use(net, x):
        return transform(lambda z: net(z), x)

    return use


def library(operator, key, result):
    def use(net, x):
        with registered(operator, key, result):
            return net(x)

    return use


OBSTACLES = {
    "function mode": (under(Functions), "Functions (TorchFunctionMode)"),
    "function mode that watches": (under(Watches), "Watches (TorchFunctionMode)"),
    "function mode under a default device": (under(lambda: torch.device("cpu"), Functions), "Functions"),
    "two function modes": (under(Watches, Functions), "TorchFunctionMode"),
    "dispatch mode": (under(Operators), "Operators (TorchDispatchMode)"),
    "modes of both kinds": (under(Operators, Functions), "Functions"),
    "flop counter": (flops, "is active around the call"),
    "fake tensors": (fake, "FakeTensorMode"),
    "make_fx": (made_fx(), "is active around the call"),
    "make_fx on fake tensors": (made_fx(tracing_mode="fake", _allow_non_fake_inputs=True), "is active around the call"),
    "make_fx with symbolic shapes": (
        made_fx(tracing_mode="symbolic", _allow_non_fake_inputs=True), "is active around the call"
    ),
    "make_fx above autograd": (made_fx(pre_dispatch=True), "is active around the call"),
    "jit.trace": (traced, "torch.jit.trace"),
    "fx": (symbolic, "torch.fx records"),
    "fx with a constant": (symbolic_constant, "torch.fx records"),
    "dual tensors": (dual, "forward mode"),
    "vmap": (functional(lambda f, x: torch.vmap(f)(torch.stack([x, x + 1]))), "vmap"),
    "vmap in vmap": (functional(lambda f, x: torch.vmap(torch.vmap(f))(x.expand(2, 3, *x.shape))), "vmap"),
    "jvp": (functional(lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1]), "jvp"),
    "jacfwd": (functional(lambda f, x: torch.func.jacfwd(lambda z: f(z).sum(), randomness="same")(x)), "torch.func"),
    "functionalize": (functional(lambda f, x: torch.func.functionalize(f)(x)), "functionalize"),
    "torch function is off": (under(torch._C.DisableTorchFunction), "DisableTorchFunction"),
    "parametrisations are cached": (under(parametrize.cached), "parametrize.cached"),
    "another silu": (
        library("silu", "CPU", lambda x: x.sigmoid().mul(x).mul(1.001)), "torch.library replaces torch's own silu"
    ),
    "another linear": (
        library("linear", "CompositeImplicitAutograd", lambda x, w, b: x.matmul(w.t()) * 1.3 + b),
        "torch.library replaces torch's own linear",
    ),
}


@pytest.mark.parametrize("state", OBSTACLES)
def test_the_original_runs_after_a_plan_was_made(state):
    use, words = OBSTACLES[state]
    ours, accelerator, twin = pair()
    for seed in range(3):
        ours(latent(seed))
    before = runs(accelerator)
    assert before and not reasons(accelerator)
    for seed in (7, 8):
        torch.testing.assert_close(use(ours, latent(seed)), use(twin, latent(seed)), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == before and words in reasons(accelerator), accelerator.report.as_dict()
    assert len(accelerator.plans) == 1 and accelerator.report.counter("errors") == 0
    # and plans run again at once
    for seed in (9, 10):
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == before + 2


@pytest.mark.parametrize("state", OBSTACLES)
def test_no_plan_is_made(state):
    use, words = OBSTACLES[state]
    ours, accelerator, twin = pair()
    for seed in range(2):
        torch.testing.assert_close(use(ours, latent(seed)), use(twin, latent(seed)), rtol=1e-5, atol=1e-5)
    assert not accelerator.plans and accelerator.report.counter("captures") == 0 and words in reasons(accelerator)
    for seed in range(3):
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert len(accelerator.plans) == 1 and runs(accelerator) == 2


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda z: f(z).sum())(x),
        lambda f, x: torch.func.vjp(f, x)[1](f(x) * 0 + 1)[0],
        lambda f, x: torch.func.jacrev(lambda z: f(z).sum())(x),
        lambda f, x: torch.func.hessian(lambda z: f(z).square().sum())(x[:1, :, :2, :2]),
    ],
    ids=["grad", "vjp", "jacrev", "hessian"],
)
def test_derivatives_with_a_plan(transform):
    ours, accelerator, twin = pair()
    for seed in range(3):
        ours(latent(seed))
    with torch.enable_grad():
        expected = transform(twin, latent())
        torch.testing.assert_close(transform(ours, latent()), expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() > 0 and "torch.func transforms the call" in reasons(accelerator)


@pytest.mark.parametrize(
    "state", ["dual tensors", "vmap", "vmap in vmap", "jvp", "jacfwd", "functionalize", "jit.trace"]
)
def test_weights_have_their_own_strides_under_a_transform(state):
    """What computes a derivative or a batch may read them, and raise."""
    ours, accelerator, twin = pair()
    ours(latent())
    assert ours.conv.weight.is_contiguous(memory_format=torch.channels_last)
    seen = []
    handle = ours.conv.register_forward_pre_hook(lambda module, _: seen.append(module.weight.stride()))
    try:
        OBSTACLES[state][0](ours, latent())
    finally:
        handle.remove()
    assert set(seen) == {twin.conv.weight.stride()}
    torch.testing.assert_close(ours(latent(2)), twin(latent(2)), rtol=1e-5, atol=1e-5)


def test_later_traces_are_not_disturbed():
    ours, accelerator, twin = pair()
    ours(latent())
    for net in (ours, twin, ours, twin):
        torch.testing.assert_close(traced(net, latent(3)), twin(latent(3)), rtol=1e-5, atol=1e-5)
    # of a shape that has no plan
    for net in (ours, twin):
        small = torch.jit.trace(Around(net), latent()[:1, :, :2, :2], check_trace=False)
        torch.testing.assert_close(small(latent()[:1, :, :2, :2]), twin(latent()[:1, :, :2, :2]))


def test_an_exported_trace_keeps_its_values_when_plans_follow():
    ours, accelerator, twin = pair()
    kept = torch.jit.trace(Around(ours), latent(), check_trace=False)
    for seed in range(4):
        ours(latent(seed))
    torch.testing.assert_close(kept(latent(4)), twin(latent(4)), rtol=1e-5, atol=1e-5)
    accelerator.release()
    torch.testing.assert_close(kept(latent(4)), twin(latent(4)), rtol=1e-5, atol=1e-5)


def test_parts_ask_as_well():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.first(x))

    torch.manual_seed(0)
    whole = Whole().eval().requires_grad_(False)
    accelerator = accelerate(whole, Config(allow_cpu=True, drop_slower=False))
    accelerator.accelerate_parts([("first", whole.first), ("second", whole.second)])
    x = torch.randn(3, 8)
    expected = whole.second(whole.first(x))
    for _ in range(3):
        whole.second(whole.first(x))
    part = accelerator.parts[0]
    assert len(part.plans) == 1
    plain = F.linear(F.linear(x, whole.first.weight, whole.first.bias) * 1.5, whole.second.weight, whole.second.bias)
    with Functions():
        torch.testing.assert_close(whole.second(whole.first(x)), plain * 1.5)
    torch.testing.assert_close(torch.vmap(whole.first)(x), F.linear(x, whole.first.weight, whole.first.bias))
    torch.testing.assert_close(whole.second(whole.first(x)), expected)
    assert "Functions" in reasons(accelerator) and "vmap" in reasons(accelerator) and len(part.plans) == 1


def test_a_trace_in_another_thread_is_not_ours(monkeypatch):
    """The flag of torch.fx is set for all threads."""
    begun, done = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            begun.set()
            done.wait(30)
            return x

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(Slow()))
    thread.start()
    try:
        assert begun.wait(30) and torch.fx._symbolic_trace._is_fx_tracing_flag
        assert torch_state.obstacle() is None
    finally:
        done.set()
        thread.join()


def test_weights_of_a_functional_call_are_used_and_given_back():
    ours, accelerator, twin = pair()
    for seed in range(2):
        ours(latent(seed))
    own = dict(ours.named_parameters())
    other = {name: p.detach() * 1.5 for name, p in twin.named_parameters()}
    values = {name: p.clone() for name, p in other.items()}
    for seed in range(3):
        found = torch.func.functional_call(ours, other, (latent(seed),))
        expected = torch.func.functional_call(twin, values, (latent(seed),))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(other[name], value) for name, value in values.items())
    assert all(dict(ours.named_parameters())[name] is p for name, p in own.items())


def test_an_error_of_the_original_under_a_state_is_its_own():
    ours, accelerator, twin = pair()
    ours(latent())
    with pytest.raises(RuntimeError, match="size|shape|channels"), Watches():
        ours(torch.randn(2, 3, 6, 6))
    assert accelerator.report.counter("errors") == 0
    ours(latent())
    assert runs(accelerator) == 1


def test_nothing_around_a_call_is_no_obstacle():
    assert torch_state.obstacle() is None
    assert torch_state.default_device() is None
    assert not torch_state.compiles() and not torch_state.transforms()
    assert not plan_finder.records_graph(torch.device("cpu"))
