"""What a plan is made with changes: the host's attention, Triton, and kernels that fail."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from foreign import imported, takes_its_place
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fuzz.behaviour_events import written_elsewhere
from fuzz.fault_events import Injected
from fuzz.nets import Attention
from fuzz.world import Event, World
from sfast_ext import environment
from sfast_ext.kernels.backend import health
from sfast_ext.tools.lib import attentions

ATTENTION, OVERRIDE, XFORMERS = "attention", "attention of torch", "xformers"
TRITON, KERNELS = "Triton", "kernels that fail"
FUNCTION, HOOK = "function of torch", "hook on all modules"
FACTORS = (0.25, 0.5, 0.75)
"""Of scores, so that a plan of another attention shows. Sharper ones would make more of what bfloat16 rounds."""
SHARED_BY = 4
"""Kernels at most whose launches call one reference."""


class Host:
    """A host's attention, as a processor: one of `attentions`, its scores times a factor."""

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor = name, factor

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any) -> Any:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        heads = getattr(attn, "heads", 2)
        scale, dtype = self.factor * (q.shape[-1] // heads) ** -0.5, q.dtype
        if self.name in ("sdp", "xformers"):
            # they are asked for no scale of their own
            q = q * self.factor
        if self.name == "xformers" and dtype == torch.float64:
            q, k, v = q.float(), k.float(), v.float()  # it takes no other
        out = getattr(attentions, self.name)(q, k, v, heads, scale).to(dtype)
        return self.project(attn.to_out, out)

    @staticmethod
    def project(layers: Any, out: Tensor) -> Tensor:
        for layer in layers if isinstance(layers, nn.ModuleList) else [layers]:
            out = layer(out)
        return out


def _ways() -> list[str]:
    return ["sdp", "doggettx", "v1", "invokeai", "subquad"]


def attention_switched(w: World, rng: random.Random) -> None:
    """The host takes another attention: each module gets another processor, or the class another forward."""
    name, factor = rng.choice(_ways()), rng.choice(FACTORS)
    if w.kind == "small" and rng.random() < 0.4 and "class forward" not in w.patches:
        _off(w, ATTENTION)
        w.patches[ATTENTION] = _class_forward(Host(name, factor))
    else:
        # a processor that has another within it keeps that, until it goes

        def change(m: nn.Module) -> None:
            for module in m.modules():
                if hasattr(module, "processor") and not hasattr(module.processor, "inner"):
                    module.processor = Host(name, factor)  # type: ignore[assignment]

        w.both(change)
    w.behaves_otherwise()


def _class_forward(processor: Host) -> Callable[[], None]:
    before = Attention.forward

    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        return processor(self, hidden_states, encoder_hidden_states)

    Attention.forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        Attention.forward = before  # type: ignore[method-assign]

    return undo


def attention_of_torch_replaced(w: World, rng: random.Random) -> None:
    """Another function in the place of PyTorch's attention, as SD.Next's options put there; on and off."""
    factor = rng.choice(FACTORS)
    if _off(w, OVERRIDE):
        return
    real = nn.functional.scaled_dot_product_attention

    def sharper(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return real(query * factor, *args, **kwargs)

    w.patches[OVERRIDE] = _started(mock.patch.object(nn.functional, "scaled_dot_product_attention", sharper))
    w.behaves_otherwise()


FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (nn.functional, "group_norm"), (nn.functional, "layer_norm"), (nn.functional, "silu"), (nn.functional, "gelu"),
    (nn.functional, "linear"), (nn.functional, "conv2d"), (torch, "cat"), (torch.Tensor, "flatten"),
    (nn.Conv2d, "_conv_forward"), (nn.GroupNorm, "__call__"),
)  # fmt: skip


def function_of_torch_replaced(w: World, rng: random.Random) -> None:
    """Another function in the place of one of torch's, with a factor that changes; on and off."""
    (home, name), factor, late = rng.choice(FUNCTIONS), rng.uniform(0.8, 1.2), rng.random() < 0.4
    if FUNCTION in w.patches and late:
        w.factor = factor
        return
    if _off(w, FUNCTION):
        w.foreign.discard(FUNCTION)
        return
    real, w.factor = getattr(home, name), factor

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) * w.factor

    w.patches[FUNCTION] = _started(mock.patch.object(home, name, written_elsewhere(scaled)))
    w.foreign.add(FUNCTION)


def hook_on_all(w: World, rng: random.Random) -> None:
    """A hook on all modules that changes what those of one class give; on and off."""
    kind, factor, pre = rng.choice((nn.GroupNorm, nn.Linear, nn.Conv2d)), rng.uniform(0.8, 1.2), rng.random() < 0.5
    if _off(w, HOOK):
        w.foreign.discard(HOOK)
        return

    def before(module: nn.Module, args: Any) -> Any:
        return (args[0] * factor, *args[1:]) if isinstance(module, kind) and args else None

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        return result * factor if isinstance(module, kind) else None

    w.patches[HOOK] = (register_module_forward_pre_hook(before) if pre else register_module_forward_hook(after)).remove
    w.foreign.add(HOOK)


def xformers_switched(w: World, rng: random.Random) -> None:
    """Attention by xformers, whose operators a capture knows nothing of; on and off."""
    factor = rng.choice(FACTORS)
    if _off(w, XFORMERS) or w.ground.gpu or not takes_its_place("xformers"):
        # the stand-in computes on a CPU
        return
    stack = contextlib.ExitStack()
    stack.enter_context(imported("xformers", "ops"))
    before = [(m, m.processor) for root in (w.subject, w.twin) for m in root.modules() if hasattr(m, "processor")]
    for module, processor in before:
        if not hasattr(processor, "inner"):
            module.processor = Host("xformers", factor)  # type: ignore[assignment]
    placed = [m.processor for m, _ in before if isinstance(m.processor, Host)]

    @stack.callback
    def undo() -> None:
        for module, processor in before:
            if isinstance(module.processor, Host) and module.processor.name == "xformers":
                module.processor = processor
        for host in placed:
            if host.name == "xformers":
                # within a processor that was laid over it meanwhile
                host.name = "sdp"

    w.patches[XFORMERS] = stack.close
    w.behaves_otherwise()


def triton_switched(w: World, rng: random.Random) -> None:
    """There is Triton, or there is none any more: plans that are made from then on are made accordingly."""
    if TRITON not in w.patches:
        there = not w.ground.gpu
        w.patches[TRITON] = _started(mock.patch.object(environment, "triton_runs_on", lambda device: there))
    else:
        w.patches.pop(TRITON)()
    if rng.random() < 0.6:
        w.drop_plans()


# those whose launches fall back on their references on a CPU
FAILING = (
    "group_norm.group_norm", "pointwise.layer_norm", "pointwise.geglu", "attention.attention", "pointwise.bias_add",
    "conv.upsample", "pointwise.timestep_embedding",
)  # fmt: skip


def kernel_fails(w: World, rng: random.Random) -> None:
    """A kernel raises from now on, or after some calls, for ever: plans do without it."""
    module = importlib.import_module(f"sfast_ext.kernels.{rng.choice(FAILING)}")
    spared, raised, real = rng.choice((0, 0, 3, 20)), 0, module.reference

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal spared, raised
        if spared > 0:
            spared -= 1
            return real(*args, **kwargs)
        raised += 1
        if raised > SHARED_BY:
            # raised here it would be taken for a failure of the kernel
            w.wrongs.append(f"{module.__name__} is launched again and again, though it fails")
        raise Injected(module.__name__)

    if not hasattr(real, "failing"):
        failing.failing = True  # type: ignore[attr-defined]
        earlier = w.patches.pop(KERNELS, None)
        undo = [_started(mock.patch.object(home, "reference", failing)) for home in (module, module.launch)]
        w.patches[KERNELS] = _repaired(lambda: [each() for each in undo], earlier)
    w.drop_plans()


def _repaired(undo: Callable[[], Any], earlier: Callable[[], None] | None) -> Callable[[], None]:
    def end() -> None:
        undo()
        if earlier is not None:
            earlier()
        health.clear()

    return end


def _off(w: World, name: str) -> bool:
    undo = w.patches.pop(name, None)
    if undo is not None:
        undo()
        w.behaves_otherwise()
    return undo is not None


def _started(patch: Any) -> Callable[[], None]:
    patch.start()
    return lambda: patch.stop() and None


EVENTS: dict[Event, int] = {
    attention_switched: 6, attention_of_torch_replaced: 3, xformers_switched: 3, triton_switched: 6,
    function_of_torch_replaced: 3, hook_on_all: 2,
}  # fmt: skip
# On a GPU launches call no references.
CPU_EVENTS: dict[Event, int] = {kernel_fails: 5}
