"""`Module.to` for modules whose parameters are on the right device already.

When a host moves a module, its weights have mostly been moved already, see `weights.host_copies`. torch's own `to` then
does nothing, but for each parameter it asks what it would give it, and whether that fits: a third of the time of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter)
_FILE = nn.Module.__init__.__code__.co_filename


def to(
    original: Callable[..., Any],
    module: nn.Module,
    modules: Collection[nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Move a module as `original(module, *args, **kwargs)` does. If all parameters are there already, only buffers are
    moved.

    Args:
        original: the `to` of the module's class.
        modules: the module and what is in it.

    Returns:
        What `original` returns: the module.
    """
    if len(args) != 1 or kwargs or not _is_torchs(original, modules):
        return original(module, *args, **kwargs)
    place: Any = args[0]
    if isinstance(place, (str, torch.device)) and _are_there(modules, _with_index(torch.device(place))):
        for each in modules:
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    each._buffers[name] = buffer.to(place)
        return module
    return original(module, *args, **kwargs)


def _is_torchs(original: Callable[..., Any], modules: Iterable[nn.Module]) -> bool:
    """Whether torch's own code moves these modules, by giving parameters other data."""
    settings = torch.__future__
    # torch before 2.3 knows no swapping
    swaps = getattr(settings, "get_swap_module_params_on_conversion", lambda: False)
    if swaps() or settings.get_overwrite_module_params_on_conversion():
        return False
    ours = nn.Module._apply
    if original is not nn.Module.to or any(f.__code__.co_filename != _FILE for f in (original, ours)):
        return False
    kinds: set[Any] = set(map(type, modules))
    plain = all(kind._apply is ours and not issubclass(kind, torch.jit.ScriptModule) for kind in kinds)
    return plain and not any("_apply" in vars(each) for each in modules)


def _with_index(device: torch.device) -> torch.device:
    """Where `Tensor.to` puts a tensor."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _are_there(modules: Iterable[nn.Module], place: torch.device) -> bool:
    """Whether all parameters are on a device, and buffers are ones that `Tensor.to` moves."""
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is not None:
                if type(parameter) not in _PLAIN or parameter.device != place:
                    return False
                if not parameter.is_leaf or parameter.grad is not None:
                    return False
        for buffer in each._buffers.values():
            if buffer is not None and (type(buffer) not in _PLAIN or buffer.is_meta):
                return False
    return True
