"""States of torch that a program enters around calls and leaves again, and transforms of a whole call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuzz.compare import Wrong
from fuzz.world import PRODUCTS, Event, World, result
from sfast_ext.call_signature import flatten_output

State = Callable[[float], contextlib.AbstractContextManager[Any]]


class _Functions(TorchFunctionMode):
    """Changes the results of a few functions, or only sees them."""

    def __init__(self, factor: float, changed: tuple[Any, ...]) -> None:
        super().__init__()
        self.factor, self.changed, self.seen = factor, changed, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.seen += 1
        return out * self.factor if function in self.changed else out


class _Operators(TorchDispatchMode):
    """Changes the results of a few operators, or only sees them."""

    def __init__(self, factor: float, changed: tuple[str, ...]) -> None:
        super().__init__()
        self.factor, self.changed, self.seen = factor, changed, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.seen += 1
        return out * self.factor if str(function).startswith(self.changed) else out


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _flops() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


F = nn.functional
STATES: dict[str, State] = {
    "a function mode on linear": lambda k: _Functions(k, (F.linear,)),
    "a function mode on convolutions": lambda k: _Functions(k, (torch.conv2d, F.conv2d)),
    "a function mode on SiLU": lambda k: _Functions(k, (F.silu,)),
    "a function mode that watches": lambda k: _Functions(k, ()),
    "a dispatch mode on convolutions": lambda k: _Operators(k, ("aten.convolution", "aten.conv2d")),
    PRODUCTS: lambda k: _Operators(k, ("aten.addmm", "aten.mm", "aten.linear")),
    "a dispatch mode on SiLU": lambda k: _Operators(k, ("aten.silu",)),
    "a dispatch mode that watches": lambda k: _Operators(k, ("nothing",)),
    "a counter of operations": lambda k: _flops(),
    "a range of a profiler": lambda k: torch.autograd.profiler.record_function("call"),
    "another default dtype": lambda k: _default_dtype(torch.float64),
    "the CPU as the default device": lambda k: torch.device("cpu"),
    "a level of forward AD": lambda k: forward_ad.dual_level(),
    "no inference mode": lambda k: torch.inference_mode(False),
    "hooks of saved tensors": lambda k: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "anomalies detected": lambda k: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic algorithms": lambda k: _deterministic(),
    "no overrides": lambda k: torch._C.DisableTorchFunction(),
    "cached parametrizations": lambda k: nn.utils.parametrize.cached(),
    "autocast off": lambda k: torch.autocast("cpu", enabled=False),
    "no gradients": lambda k: torch.no_grad(),
}


OF_THE_PROCESS = frozenset(("a level of forward AD", "another default dtype", "deterministic algorithms"))
"""States that are not of a thread: two threads that enter and leave them would do so in each other's."""


def state(w: World, rng: random.Random) -> None:
    """One is entered around all calls from now on, or one is left."""
    if w.states and rng.random() < 0.6:
        w.states.pop(rng.choice(list(w.states)))
        return
    name, k = rng.choice(list(STATES)), rng.uniform(0.8, 1.2)
    if len(w.states) < 2 and not (name == PRODUCTS and 4 in w.laid_out):
        w.states[name] = lambda: STATES[name](k)


def states_end(w: World, rng: random.Random) -> None:
    """All are left."""
    w.states.clear()


Call = Callable[[Any, Any, dict[str, Any]], Any]


def _plain(module: Any, kwargs: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The call as a function of its tensors that are positional."""
    return lambda *args: flatten_output(module(*args, **kwargs))[1][0]


def _vmapped(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    stacked = torch.stack([args[0], args[0] * 0.5])
    return torch.vmap(lambda x: _plain(module, kwargs)(x, *args[1:]))(stacked)


def _dual(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with forward_ad.dual_level():
        out = _plain(module, kwargs)(forward_ad.make_dual(args[0], args[0] * 0.5), *args[1:])
        primal, tangent = forward_ad.unpack_dual(out)
        return (primal, out.new_zeros(1) if tangent is None else tangent)


def _jvp(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return torch.func.jvp(lambda x: _plain(module, kwargs)(x, *args[1:]), (args[0],), (args[0] * 0.5,))


def _grad(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return torch.func.grad(lambda x: _plain(module, kwargs)(x, *args[1:]).sum())(args[0])


def _functional_call(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    weights = {name: p.detach() * 1.1 for name, p in list(module.named_parameters())[::3]}
    return torch.func.functional_call(module, weights, args, kwargs)


def _jit_trace(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    traced = torch.jit.trace(_plain(module, kwargs), args, check_trace=False)
    return traced(args[0] * 0.5, *args[1:])


def _make_fx(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return make_fx(_plain(module, kwargs))(*args)(args[0] * 0.5, *args[1:])


def _export(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        return torch.export.export(module, args, kwargs).module()(args[0] * 0.5, *args[1:], **kwargs)
    finally:
        # torch 2.11 leaves one if it raises, which then refuses the buffers of the module
        for key in hooks.keys() - before:
            del hooks[key]


def _compiled(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    try:
        return torch.compile(_plain(module, kwargs), backend="eager")(*args)
    finally:
        torch._dynamo.reset()


def _subclass(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    out = _plain(module, kwargs)(args[0].as_subclass(_Doubling), *args[1:])
    return out.as_subclass(torch.Tensor)


class _Doubling(torch.Tensor):
    """A tensor whose convolutions are twice as strong."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out * 2 if function in (torch.conv2d, F.conv2d) else out


TRANSFORMS: dict[str, tuple[Call, int]] = {
    "vmap": (_vmapped, 4), "a dual tensor": (_dual, 4), "jvp": (_jvp, 3), "grad": (_grad, 3),
    "functional_call": (_functional_call, 4), "jit.trace": (_jit_trace, 3), "make_fx": (_make_fx, 3),
    "export": (_export, 1), "compile": (_compiled, 1), "a subclass of Tensor": (_subclass, 3),
}  # fmt: skip
"""What is done with a call, and how often of so many times."""
_FORWARD_AD = ("a dual tensor", "jvp")
_LEAVES = ("export", "a subclass of Tensor")
_DISPATCHES = frozenset(name for name in STATES if "dispatch mode" in name or name == "a counter of operations")


def transformed(w: World, rng: random.Random) -> None:
    """One call is traced, exported, mapped or derived."""
    name = rng.choice([name for name, (_, times) in TRANSFORMS.items() for _ in range(times)])
    if name in _FORWARD_AD and _DISPATCHES & w.states.keys():
        # torch 2.13 reads at address 0 there: the derivative of `baddbmm` by a `beta` other than 1, without us as well
        return
    if name in _LEAVES and any("keeps" in patch for patch in w.patches):
        # fake tensors, or those of the class, stay in what a processor keeps, without us as well
        return
    transform(w, name)


def transform(w: World, name: str) -> None:
    """The same for the model and for its twin, once.

    Raises:
        Wrong: it comes to something else.
    """
    call, args_kwargs = TRANSFORMS[name][0], w.draw()
    args, kwargs = _positional(*args_kwargs)
    if not all(isinstance(a, torch.Tensor) for a in args) or w.more:
        # a number is a constant of what is recorded
        return
    found = []
    for module in (w.subject, w.twin):
        with w.calling(), torch.no_grad():
            found.append(result(lambda module=module: call(module, args, kwargs), (), {}))
    ours, theirs = found
    if isinstance(theirs, Exception):
        # transforms refuse some layouts; which one the host chose is not known if the arena had chosen the same before
        if not isinstance(ours, Exception) and not w.laid_out:
            raise Wrong(f"under {name} the original raises {theirs!r}, accelerated nothing")
        return
    if isinstance(ours, Exception):
        raise Wrong(f"under {name} a call failed that would not have without us") from ours
    mine, others = flatten_output(ours)[1], flatten_output(theirs)[1]
    if any(type(a) is not type(b) for a, b in zip(mine, others)):
        raise Wrong(f"under {name} the result is {[type(a) for a in mine]}, not {[type(b) for b in others]}")
    w.compare(ours, theirs)


def _positional(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    names = ("sample", "timestep", "encoder_hidden_states")
    return (*args, *(kwargs[n] for n in names if n in kwargs)), {k: v for k, v in kwargs.items() if k not in names}


EVENTS: dict[Event, int] = {state: 4, states_end: 3, transformed: 2}
