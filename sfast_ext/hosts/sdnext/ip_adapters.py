"""IP-Adapters, which SD.Next loads for each image and removes after it.

Plans identify modules by object identity. Each image would therefore need new plans, at seconds each, and the old plans
would hold the weights of the image before; this concerns images without an adapter too, because removing one creates
new processors. Here the objects of the last image are put back in place of the new ones, with the new weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from sfast_ext.behaviour.structure import structure
from sfast_ext.weights.original_layout import set_data

SCALE = frozenset({"scale"})


class IPAdapterReuse:
    """Holds the attention processors and the projection that each UNet had last, with an adapter and without.

    Args:
        has_plans: whether a UNet has plans.
        guarded: runs a function whose exceptions must not reach the host.
    """

    def __init__(self, has_plans: Callable[[nn.Module], bool], guarded: Callable[[Callable[[], Any]], None]) -> None:
        self._has_plans, self._guarded = has_plans, guarded
        self._last: weakref.WeakKeyDictionary[nn.Module, dict[bool, Any]] = weakref.WeakKeyDictionary()

    def apply(self, original: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps SD.Next's function that loads the adapters of an image and returns whether there are any."""
        loaded = original(pipe, *args, **kwargs)
        unet = getattr(pipe, "unet", None)
        if isinstance(unet, nn.Module) and hasattr(unet, "attn_processors"):
            self._guarded(lambda: self._reuse(unet, bool(loaded)))
        return loaded

    def clear(self) -> None:
        """Drop everything that is held."""
        self._last.clear()

    def _reuse(self, unet: Any, loaded: bool) -> None:
        if not self._has_plans(unet):
            self._last.pop(unet, None)
            return
        last = self._last.setdefault(unet, {})
        had, projected = last.get(loaded, ({}, None))
        now, projection = unet.attn_processors, getattr(unet, "encoder_hid_proj", None)
        processors = {name: _reused(new, had.get(name)) for name, new in now.items()}
        projected = _reused(projection, projected)
        if projected is not projection:
            unet.encoder_hid_proj = projected
        if any(processors[name] is not new for name, new in now.items()):
            unet.set_attn_processor(dict(processors))
        last[loaded] = processors, projected


def _reused(now: Any, last: Any) -> Any:
    """`last` with the weights of `now`, if the two differ in nothing else; otherwise `now`."""
    if last is now or type(last) is not type(now) or not type(now).__module__.startswith("diffusers."):
        return now
    if not isinstance(now, nn.Module):
        return now if vars(now) or vars(last) else last
    old, new = (list(m.named_parameters()) + list(m.named_buffers()) for m in (last, now))
    shapes = ([(name, t.shape, t.dtype) for name, t in tensors] for tensors in (old, new))
    if next(shapes) != next(shapes) or structure(last, SCALE) != structure(now, SCALE):
        return now
    for (_, ours), (_, theirs) in zip(old, new):
        # the next call copies these weights to where plans read them, as after any change of weights
        set_data(ours, theirs.detach())
    if hasattr(now, "scale"):
        last.scale = now.scale
    return last
