"""The place of a module's forward, and the object that sits in it."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from sfast_ext.behaviour.foreign_code import describe


class SlotOwner(Protocol):
    """What a slot needs of an accelerator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the module."""

    def before_saving(self) -> None:
        """The module's parameters are about to be saved. Raises nothing."""


class AcceleratedForward:
    """What sits in the slot: calls its owner, looks like the forward it stands for."""

    # functools.update_wrapper, as accelerate calls it, copies what is in __dict__ to the wrapper, and deepcopy goes on
    __slots__ = ("owner", "detached", "_module", "previous", "__dict__")

    def __init__(
        self, module: nn.Module, owner: SlotOwner, original: Callable[..., Any], previous: Callable | None
    ) -> None:
        self.owner = owner
        self._module = module
        self.previous = previous
        self.detached: Callable[..., Any] | None = None
        self.__wrapped__ = original
        self.__name__ = "forward"
        self.__qualname__ = f"{type(module).__qualname__}.forward"
        self.__module__ = type(module).__module__
        self.__doc__ = original.__doc__
        try:
            self.__signature__ = inspect.signature(original)
        except (TypeError, ValueError):
            pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.detached is not None:
            return self.detached(*args, **kwargs)
        return self.owner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # a copied module must run its own weights, not the plans of the one it was copied from
        module = memo.get(id(self._module))
        if module is None:
            return self.__wrapped__
        if self.previous is None:
            return types.MethodType(type(module).forward, module)
        return copy.deepcopy(self.previous, memo)

    def __reduce__(self) -> Any:
        # a loaded module runs what was there before, as a copied one does
        return (_class_forward, (self._module,)) if self.previous is None else (_as_it_is, (self.previous,))


class BeforeSaving:
    """A hook that runs before the module's `state_dict()`: its parameters are laid out as the host knows them, since
    savers refuse other strides."""

    def __init__(self, module: nn.Module, owner: SlotOwner) -> None:
        self._module = module
        self._owner = owner

    def __call__(self, module: nn.Module, *_: Any) -> None:
        # a shallow copy of the module shares its hooks
        if module is self._module:
            self._owner.before_saving()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _no_hook

    def __reduce__(self) -> Any:
        # the whole module is being saved: its parts, with the weights, come after its hooks
        self._owner.before_saving()
        return _hook_of_others, ()


def _no_hook(*_: Any) -> None:
    """What a copied or loaded module has in place of the hook."""


def _hook_of_others() -> Callable[..., None]:
    return _no_hook


def _as_it_is(function: Any) -> Any:
    return function


class ForwardSlot:
    """The forward of one module: `_old_forward` under accelerate's hook, else the instance's `forward`.

    Args:
        owner: called in the forward's place.
        saving: whether the owner is told before the module is saved.
    """

    def __init__(self, module: nn.Module, owner: SlotOwner, *, saving: bool) -> None:
        self._module = module
        self._owner = owner
        self._tells = saving
        self._forward: AcceleratedForward | None = None
        self._previous: Callable[..., Any] | None = None
        self._saving: Any = None

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that was there: an instance attribute, or the class's as it is now."""
        if self._previous is not None:
            return self._previous
        # looked up at each call: hosts patch the class after we are installed
        return types.MethodType(type(self._module).forward, self._module)

    def install(self) -> bool:
        """Take the slot. What lies over it (accelerate's hook) stays over it.

        Returns:
            Whether the original forward is another than it was when the slot was last taken.
        """
        if self.installed():
            return False
        last = self._previous
        attributes = self._module.__dict__
        name = "_old_forward" if "_old_forward" in attributes else "forward"
        there: Any = attributes.get(name)
        while isinstance(there, AcceleratedForward):
            # not what it wraps: that is the class's forward as it was when it was made
            there = there.previous
        self._previous = None if there is None or is_own_forward(there, self._module) else there
        self._forward = AcceleratedForward(self._module, self._owner, self.original, self._previous)
        object.__setattr__(self._module, name, self._forward)
        if self._saving is None and self._tells:
            self._saving = self._module.register_state_dict_pre_hook(BeforeSaving(self._module, self._owner))
        return last is not self._previous

    def installed(self) -> bool:
        """Whether our object is in one of the slots, at the top or under another's wrapper."""
        attributes = self._module.__dict__
        ours = self._forward
        return ours is not None and (attributes.get("forward") is ours or attributes.get("_old_forward") is ours)

    def release(self) -> None:
        """Put back what was there. Where another's wrapper holds our object, it goes on to the original through it."""
        attributes = self._module.__dict__
        for name in ("forward", "_old_forward"):
            if self._forward is None or attributes.get(name) is not self._forward:
                continue
            if self._previous is not None:
                attributes[name] = self._previous
            elif name == "forward":
                del attributes[name]
            else:
                # accelerate calls what it finds here, so it cannot be empty
                attributes[name] = self.original
        if self._forward is not None:
            # whoever wrapped it may call it still, also from under the next one that is installed
            self._forward.detached = self._previous or functools.partial(_call_class, self._module)
        self._forward = None
        if self._saving is not None:
            self._saving.remove()
            self._saving = None


def owner_of(module: nn.Module) -> SlotOwner | None:
    """Who is called in the place of a module's forward, or None."""
    for name in ("forward", "_old_forward"):
        function = module.__dict__.get(name)
        if isinstance(function, AcceleratedForward):
            return function.owner
    return None


def foreign_forward(module: nn.Module) -> str | None:
    """Who replaced the forward of this very object; None where nobody did, or only accelerate's hook, or we."""
    function = forward_of(module)
    if function is None or owner_of(module) is not None or is_own_forward(function, module):
        return None
    return describe(function)


def forward_of(module: nn.Module) -> Any:
    """What lies in the place that an accelerator would take; None where it is the class's forward."""
    return vars(module).get("_old_forward" if "_old_forward" in vars(module) else "forward")


def is_own_forward(function: Any, module: nn.Module) -> bool:
    """The class's own forward, that accelerate leaves on an instance when it takes its hook away."""
    cls: Any = type(module)
    return getattr(function, "__self__", None) is module and getattr(function, "__func__", None) is cls.forward


def _call_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # the class's forward as it is now
    return type(module).forward(module, *args, **kwargs)


def _class_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)
