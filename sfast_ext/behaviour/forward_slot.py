"""The slot of a module's forward, and the object that we put there."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from sfast_ext import torch_state
from sfast_ext.behaviour.foreign_code import describe
from sfast_ext.behaviour.holder import HELD_ONCE, TORCHS, ClassForward, called_on, has_copies

_compiles = torch_state.compiles
_OF_METHODS = frozenset({"__self__", "__func__"})
"""What tells that a forward is the class's own."""


class SlotOwner(Protocol):
    """What a slot needs of an accelerator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the forward."""

    def run_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a module that may share parameters with the owner's."""

    def before_saving(self) -> None:
        """Called before the module's parameters are saved. Raises nothing."""

    def before_forward(self) -> None:
        """Called before any forward of the module, after `watch`. Raises nothing."""


class AcceleratedForward:
    """The object in the slot. It calls its owner, and looks like the forward that it replaces.

    Attributes:
        previous: the forward of the instance before; None for that of the class.
    """

    # not in __dict__: functools.update_wrapper, as accelerate calls it, copies that, and deepcopy would follow
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

    def __getattr__(self, name: str) -> Any:
        # torch.export and torch.jit.script read the code and the marks of a module's forward
        if name in _OF_METHODS or "__wrapped__" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compiles():
            return _run(self.previous, self._module, args, kwargs)
        own = self._module
        if sys.getrefcount(self) != HELD_ONCE[bool(kwargs)] or vars(own).get("forward") is not self:
            frame = sys._getframe(1)
            if frame.f_globals is TORCHS and (module := called_on(frame, self, own)) is not own:
                return self.owner.run_forward(self.previous or functools.partial(_call_class, module), *args, **kwargs)
        if self.detached is not None:
            return self.detached(*args, **kwargs)
        return self.owner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # a copied module must run on its own weights, not on the plans of the original
        module = memo.get(id(self._module))
        if module is None:
            # the forward by itself, or that of a shallow copy
            return self.previous or ClassForward(self._module)
        if self.previous is None:
            # copied once for all modules that hold it
            alone = not has_copies(self, self._module)
            return types.MethodType(type(module).forward, module) if alone else ClassForward(module)
        return copy.deepcopy(self.previous, memo)

    def __reduce__(self) -> Any:
        # a loaded module runs the previous forward, like a copied one
        if self.previous is not None:
            return _as_it_is, (self.previous,)
        return (ClassForward if has_copies(self, self._module) else _class_forward), (self._module,)


class OwnHook:
    """A hook that changes nothing of what a forward returns: readings of behaviour leave it out. A copied or loaded
    module has none."""

    def __call__(self, *_: Any) -> None:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _no_hook

    def __reduce__(self) -> Any:
        return _hook_of_others, ()


class BeforeSaving(OwnHook):
    """A hook that runs before `state_dict()` of the module, or before it is copied or pickled."""

    def __init__(self, owner: SlotOwner) -> None:
        self._owner = owner

    def __call__(self, *_: Any) -> None:
        # also for a shallow copy of the module, which shares its hooks and may share its parameters
        self._owner.before_saving()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # the whole module is copied: its submodules are copied after hooks
        self._owner.before_saving()
        return _no_hook

    def __reduce__(self) -> Any:
        # the whole module is pickled: weights are pickled after hooks
        self._owner.before_saving()
        return _hook_of_others, ()


class BeforeForward(BeforeSaving):
    """A hook that runs before the forward of the module, whoever put that there."""

    def __call__(self, *_: Any) -> None:
        self._owner.before_forward()


def _no_hook(*_: Any) -> None:
    """Replaces the hook in a copied or loaded module."""


def _hook_of_others() -> Callable[..., None]:
    return _no_hook


def _as_it_is(function: Any) -> Any:
    return function


class ForwardSlot:
    """The forward of one module: `_old_forward` below accelerate's hook, otherwise `forward` of the instance.

    Args:
        owner: called in place of the forward.
        saving: whether the owner is notified before the module is saved.
    """

    def __init__(self, module: nn.Module, owner: SlotOwner, *, saving: bool) -> None:
        self._module = module
        self._owner = owner
        self._tells = saving
        self._forward: AcceleratedForward | None = None
        self._previous: Callable[..., Any] | None = None
        self._watching: Any = None
        self._saving: Any = None

    @property
    def original(self) -> Callable[..., Any]:
        """The original forward: an instance attribute, or the current one of the class."""
        if self._previous is not None:
            return self._previous
        # looked up for each call: hosts patch the class after we are installed
        return types.MethodType(type(self._module).forward, self._module)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original forward, in steps that Dynamo traces."""
        return _run(self._previous, self._module, args, kwargs)

    @property
    def previous(self) -> Callable[..., Any] | None:
        """The forward of the instance that we replaced. None for that of the class."""
        return self._previous

    def install(self) -> bool:
        """Put our object into the slot. A wrapper around it (accelerate's hook) stays.

        Returns:
            Whether the original forward differs from that of the last installation.
        """
        if self.installed():
            return False
        last = self._previous
        attributes = self._module.__dict__
        name = "_old_forward" if "_old_forward" in attributes else "forward"
        there: Any = attributes.get(name)
        while isinstance(there, AcceleratedForward):
            # not __wrapped__: that is the forward of the class at the time
            there = there.previous
        self._previous = None if there is None or is_own_forward(there, self._module) else there
        self._forward = AcceleratedForward(self._module, self._owner, self.original, self._previous)
        object.__setattr__(self._module, name, self._forward)
        if self._saving is None and self._tells:
            self._saving = self._module.register_state_dict_pre_hook(BeforeSaving(self._owner))
        return last is not self._previous

    def watch(self) -> None:
        """Tell the owner before each forward of the module, until `release`. The hook is on the root, and so around our
        forward."""
        if self._watching is None:
            self._watching = self._module.register_forward_pre_hook(BeforeForward(self._owner))

    def installed(self) -> bool:
        """Whether our object is in one of the slots."""
        attributes = self._module.__dict__
        ours = self._forward
        return ours is not None and (attributes.get("forward") is ours or attributes.get("_old_forward") is ours)

    def release(self) -> None:
        """Restore the previous forward. If a third party's wrapper holds our object, that calls the original now."""
        attributes = self._module.__dict__
        for name in ("forward", "_old_forward"):
            if self._forward is None or attributes.get(name) is not self._forward:
                continue
            if self._previous is not None:
                attributes[name] = self._previous
            elif name == "forward":
                del attributes[name]
            else:
                # must not be empty: accelerate calls it
                attributes[name] = self.original
        if self._forward is not None:
            # a wrapper may still call it, even below the next installation
            self._forward.detached = self._previous or functools.partial(_call_class, self._module)
        self._forward = None
        for handle in (self._saving, self._watching):
            if handle is not None:
                handle.remove()
        self._saving = self._watching = None


def owner_of(module: nn.Module) -> SlotOwner | None:
    """The owner of a module's slot, or None."""
    for name in ("forward", "_old_forward"):
        function = module.__dict__.get(name)
        if isinstance(function, AcceleratedForward):
            return function.owner
    return None


def foreign_forward(module: nn.Module) -> str | None:
    """A description of a foreign forward on this instance. None if there is only our own, or accelerate's hook."""
    function = forward_of(module)
    if function is None or owner_of(module) is not None or is_own_forward(function, module):
        return None
    return describe(function)


def forward_of(module: nn.Module) -> Any:
    """The contents of the slot that an accelerator would use. None if the class's forward is in effect."""
    return vars(module).get("_old_forward" if "_old_forward" in vars(module) else "forward")


def is_own_forward(function: Any, module: nn.Module) -> bool:
    """Whether a function is the class's own forward. Accelerate leaves that on an instance when it removes its hook."""
    cls: Any = type(module)
    if isinstance(function, ClassForward):
        return True
    return getattr(function, "__self__", None) is module and getattr(function, "__func__", None) is cls.forward


def _run(previous: Callable[..., Any] | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return previous(*args, **kwargs) if previous is not None else type(module).forward(module, *args, **kwargs)


def _call_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # the current forward of the class
    return type(module).forward(module, *args, **kwargs)


def _class_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)
