"""Weights in system memory that nothing needs there any more, and for which the GPU has no room.

Another program may have taken its memory since. The host's forward fails if the weights are on two devices, so our
forward stays in the module: it reads these weights from system memory, see `ModuleContext.run_forward`, until they have
come, or the host has moved the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sfast_ext.runtime import residency
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.weights.weight import WeightsInUse

_left: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModuleContext]] = weakref.WeakKeyDictionary()
"""Of modules that were released, and whose weights have not come. The forward of the module holds the context."""


def give_back(context: ModuleContext) -> None:
    """`residency.give_back`. Without room for the weights, each of our forwards tries to bring them again."""
    with context.own_shortages():
        try:
            residency.give_back(context)
        except (torch.cuda.OutOfMemoryError, WeightsInUse) as exc:
            if isinstance(exc, WeightsInUse) or not context.slot.installed():
                context.report.error("moving weights to the GPU", exc)
            else:
                context.tell_short()


def let_go(context: ModuleContext) -> None:
    """A module is released, and has no plans: its weights come back, and its forward is the host's."""
    if not context.is_part:
        with context.own_shortages():
            try:
                context.bring_back()
            except torch.cuda.OutOfMemoryError:
                context.tell_short()
            except Exception as exc:
                context.report.error("moving weights to the GPU", exc)
    _end(context)


def run(context: ModuleContext, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of a module that was released."""
    try:
        return forward(*args, **kwargs)
    finally:
        _end(context)


def install(context: ModuleContext) -> bool:
    """`ForwardSlot.install`. What the accelerator before left in the place of the module's forward goes."""
    left = _left.pop(context.module, None)
    before = None if left is None else left()
    if before is not None and before is not context:
        context.arena.resident.take_over(before.arena.resident)
        context.model.streams = before.model.streams
        before.slot.release()
    return context.slot.install()


def _end(context: ModuleContext) -> None:
    """The forward is the host's, unless weights are in system memory next to others on the GPU."""
    if context.is_part:
        context.slot.release()
    elif context.arena.resident.out(context.device()):
        # a wrapper in its place may call it
        _left[context.module] = weakref.ref(context)
    else:
        left = _left.get(context.module)
        # a later accelerator of the module may have left it so
        if left is not None and left() is context:
            del _left[context.module]
        context.slot.release()
        context.arena.resident.forget()
