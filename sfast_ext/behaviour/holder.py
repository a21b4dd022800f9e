"""Which module a forward in an instance's dictionary was called on.

A shallow copy of a module (`copy.copy`, `nn.DataParallel`, a dictionary that is passed on) shares that forward, and has
separate parameters and submodules. `nn.Module` calls the forward without naming the module.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

from torch import nn
from torch.nn.modules import module as _torchs

TORCHS = vars(_torchs)
"""The globals of `nn.Module.__call__`."""
# a copy shares them, unless it was made by a method of the class; a module that was made by itself does not
_SHARED = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks")


class _Probe:
    def __call__(self, *args: Any, **kwargs: Any) -> int:
        return sys.getrefcount(self)


def _held_once() -> tuple[int, int]:
    module, forward = nn.Module(), _Probe()
    vars(module)["forward"] = forward
    return module(None), module(None, named=None)


HELD_ONCE = _held_once()
"""The reference counts of a forward within a call by `nn.Module.__call__`, if one module and one other object hold it:
without and with named arguments. They are asked first, as it takes longer to look into frames."""


def called_on(frame: types.FrameType, forward: Any, own: nn.Module) -> nn.Module:
    """The module whose call made this frame: `own`, or a copy of it that holds the same `forward`."""
    called = frame.f_locals.get("self")
    return called if called is not own and _is_copy(called, forward, own) else own


def _is_copy(module: Any, forward: Any, own: nn.Module) -> bool:
    if type(module) is not type(own):
        return False
    here, there = vars(module), vars(own)
    # another module may have been given this forward, as that of `own`
    return here.get("forward") is forward and any(here.get(name) is there.get(name) for name in _SHARED)


def has_copies(forward: Any, own: nn.Module) -> bool:
    """Whether a copy of a module holds its forward. Takes as long as a garbage collection."""
    # CPython may keep the attributes of an object without a dictionary
    held = (vars(each) if isinstance(each, nn.Module) else each for each in gc.get_referrers(forward))
    modules = (each for each in held if isinstance(each, dict) and "_modules" in each and each is not vars(own))
    return any(each.get("forward") is forward for each in modules)


class ClassForward:
    """The class's forward of the module that holds this object, which was copied or loaded from a copy of another.

    Args:
        module: the module on which it runs if others than `nn.Module.__call__` call it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        module = self._module
        called = frame.f_locals.get("self") if frame.f_globals is TORCHS else None
        if type(called) is type(module) and vars(called).get("forward") is self:
            module = called
        return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassForward:
        return ClassForward(memo.get(id(self._module), self._module))
