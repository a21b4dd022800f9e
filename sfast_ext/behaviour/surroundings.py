"""Global changes of torch: replaced functions, and global module hooks.

The original functions are recorded when this module is imported. A function that was replaced before that is recognised
as foreign by its code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _modules

from sfast_ext.behaviour.foreign_code import CALLS, foreign_layers, layers, names_in, package
from sfast_ext.weights.streamed_by_layer import is_hook

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_HOOKS: tuple[dict[int, Any], ...] = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
# not tracked: a forward that draws random numbers gets no plan anyway
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson")
_OF_TENSORS = frozenset(
    {
        "__deepcopy__", "__reduce_ex__", "__repr__", "__setstate__", "__str__", "backward", "cpu", "cuda", "numpy",
        "register_hook", "share_memory_", "storage", "untyped_storage",
    }
)  # fmt: skip
"""Methods of tensors without influence on results."""

_OFTEN = frozenset(
    {
        "avg_pool2d", "cat", "conv2d", "dropout", "embedding", "gelu", "group_norm", "interpolate", "layer_norm",
        "linear", "pad", "scaled_dot_product_attention", "silu", "softmax",
    }
)  # fmt: skip
"""Functions that a UNet calls. Always checked: a host may keep a forward where no name leads to it."""

_Functions = Mapping[str, Any]


def _spaces() -> dict[str, tuple[_Functions, frozenset[str]]]:
    """The namespaces with functions that forwards call, by name, and the names of those functions."""
    of_torch = frozenset(dir(torch._C._VariableFunctions)) | frozenset(torch.functional.__all__)
    of_tensors = frozenset(dir(torch.Tensor)) - _OF_TENSORS
    functional = frozenset(name for name, f in vars(nn.functional).items() if _computes(f))
    return {
        "torch": (vars(torch), frozenset(name for name in of_torch if not name.startswith(("__", *_RANDOM)))),
        "torch.Tensor": (vars(torch.Tensor), of_tensors),
        "torch.nn.functional": (vars(nn.functional), functional),
        "torch.functional": (vars(torch.functional), frozenset(torch.functional.__all__)),
        "torch._C._nn": (vars(torch._C._nn), frozenset(n for n in vars(torch._C._nn) if not n.startswith("__"))),
        "torch.nn.Module": (vars(nn.Module), frozenset(CALLS)),
    }


def _computes(function: Any) -> bool:
    return callable(function) and not isinstance(function, type)


class Surroundings:
    """The state of torch at one time.

    `replaced` are the functions that are not torch's own, or not the original ones: (name, function), with None for one
    that was deleted. `hooks` are the global module hooks.
    """

    def __init__(self) -> None:
        # recorded before they are read, so that a change in between is detected by the next check
        self._seen = [(space, list(space.values())) for space, _ in _SPACES.values()]
        self.hooks = _hooks()
        self.replaced = tuple(sorted(_replaced(), key=operator.itemgetter(0)))

    def unchanged(self) -> bool:
        """Whether nothing changed since. Takes some microseconds."""
        try:
            return self.hooks == _hooks() and all(list(space.values()) == values for space, values in self._seen)
        except Exception:
            # values that cannot be compared are foreign
            return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surroundings) and (self.replaced, self.hooks) == (other.replaced, other.hooks)


def look() -> Surroundings:
    """The current state of torch. The same object as long as nothing changes."""
    global _last
    if not _last.unchanged():
        _last = Surroundings()
    return _last


class TorchQuickCheck:
    """The check for each call of global module hooks, and of the functions of torch that some code can reach.

    Args:
        names: the names that the code can look up, see `reach`.
        kinds: the classes of the code. Names of torch's own classes are collected here.
        around: the state of torch when the code was read.
    """

    def __init__(self, names: frozenset[str], kinds: Iterable[type], around: Surroundings) -> None:
        self._hooks = around.hooks
        wanted = _reached(names.union(_OFTEN, *map(_names_of_torchs, kinds)))
        spaces = [(space, sorted(wanted & inner & space.keys())) for space, inner in _SPACES.values()]
        # the first name is doubled: itemgetter returns no tuple for a single name
        self._gets = [(operator.itemgetter(found[0], *found), space) for space, found in spaces if found]
        # an inherited method may be overridden by a new one
        self._methods = vars(torch.Tensor)
        self._own = len(self._methods)
        self._found = [get(space) for get, space in self._gets]
        # a change since `around` must not count as unchanged
        self._true = look() == around

    def unchanged(self) -> bool:
        """Whether none of them changed. Takes microseconds."""
        try:
            still = self._true and self._hooks_unchanged() and len(self._methods) == self._own
            return still and [get(space) for get, space in self._gets] == self._found
        except Exception:
            # one was deleted, or cannot be compared
            return False

    def _hooks_unchanged(self) -> bool:
        """Whether the global hooks are the same."""
        return self._hooks == _hooks() if self._hooks or any(_HOOKS) else True


def _names_of_torchs(kind: type) -> frozenset[str]:
    owners = (owner for owner in kind.__mro__ if package(owner.__module__) == "torch" and owner is not nn.Module)
    methods = (layer for owner in owners for value in vars(owner).values() for layer in layers(value))
    return frozenset(name for layer in methods for name in names_in(layer.__code__))


def _reached(names: frozenset[str]) -> frozenset[str]:
    """The names in torch that code can reach from the names that it looks up."""
    # operators are called without a name
    special = {name for name, f in vars(torch.Tensor).items() if name.startswith("__") and callable(f)}
    waiting = [*names, *special, *CALLS]
    found: set[str] = set()
    seen: set[Any] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for space, _ in _SPACES.values():
            functions = [space[name]] if name in space else []
            while functions:
                for layer in layers(functions.pop()):
                    if layer in seen:
                        continue
                    seen.add(layer)
                    inner = names_in(layer.__code__)
                    waiting += inner
                    functions += [layer.__globals__[n] for n in inner & layer.__globals__.keys()]
    return frozenset(found)


def _hooks() -> tuple[Any, ...]:
    # another thread may add one meanwhile
    return tuple(hook for hooks in _HOOKS for hook in tuple(hooks.values()) if not is_hook(hook))


def _replaced() -> Iterator[tuple[str, Any]]:
    for home, (space, _) in _SPACES.items():
        for name, stock in _STOCK[home].items():
            function = space.get(name)
            if (function is not stock or name not in _OWN[home]) and not _of_a_tracer(name, function):
                yield f"{home}.{name}", function
    # new methods of torch.Tensor that override inherited ones
    added = _SPACES["torch.Tensor"][1] & vars(torch.Tensor).keys() - _STOCK["torch.Tensor"].keys()
    yield from ((f"torch.Tensor.{name}", vars(torch.Tensor)[name]) for name in added)


def _of_a_tracer(name: str, function: Any) -> bool:
    """Whether it is a temporary patch by torch.fx while it traces, in any thread."""
    return name in CALLS and all(f.__globals__.get("__name__", "").startswith("torch.fx") for f in layers(function))


_SPACES = _spaces()
_STOCK = {home: {name: space[name] for name in names & space.keys()} for home, (space, names) in _SPACES.items()}
_OWN = {home: {n for n, f in stock.items() if not foreign_layers(f, nn.Module)} for home, stock in _STOCK.items()}
_last = Surroundings()
