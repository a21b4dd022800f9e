"""What somebody changed of torch itself, for every module there is: its functions, and hooks on all modules.

What torch's functions were is noted when this module is imported. One that another party's code stands for by then is
known by that code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _modules

from sfast_ext.behaviour.foreign_code import CALLS, foreign_layers, layers, names_in, package

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_HOOKS: tuple[dict[int, Any], ...] = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
# a forward that draws random numbers gets no plan, whoever draws them
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson")
_OF_TENSORS = frozenset(
    {
        "__deepcopy__", "__reduce_ex__", "__repr__", "__setstate__", "__str__", "backward", "cpu", "cuda", "numpy",
        "register_hook", "share_memory_", "storage", "untyped_storage",
    }
)  # fmt: skip
"""Methods of tensors that compute nothing."""

_OFTEN = frozenset(
    {
        "avg_pool2d", "cat", "conv2d", "dropout", "embedding", "gelu", "group_norm", "interpolate", "layer_norm",
        "linear", "pad", "scaled_dot_product_attention", "silu", "softmax",
    }
)  # fmt: skip
"""What a UNet calls: a host may keep a module's own forward where no name leads to it."""

_Functions = Mapping[str, Any]


def _spaces() -> dict[str, tuple[_Functions, frozenset[str]]]:
    """What holds the functions that forwards call, by its name, and which of its names are of such."""
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
    """What was found in one look at torch.

    `replaced` are the functions that are not torch's own, or not the ones that were there at first: (name, function),
    None for one that is gone. `hooks` are those on all modules.
    """

    def __init__(self) -> None:
        # noted before they are read: what changes in between is seen at the next look
        self._seen = [(space, list(space.values())) for space, _ in _SPACES.values()]
        self.hooks = _hooks()
        self.replaced = tuple(sorted(_replaced(), key=operator.itemgetter(0)))

    def unchanged(self) -> bool:
        """Whether nothing changed since; some microseconds."""
        try:
            return self.hooks == _hooks() and all(list(space.values()) == values for space, values in self._seen)
        except Exception:
            # values that cannot be compared are others' own
            return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surroundings) and (self.replaced, self.hooks) == (other.replaced, other.hooks)


def look() -> Surroundings:
    """What torch is now; the same object for as long as nothing changes."""
    global _last
    if not _last.unchanged():
        _last = Surroundings()
    return _last


class TorchQuickCheck:
    """A look for each call at the functions of torch that some code can reach, and at hooks on all modules.

    Args:
        names: what the code can look up, see `reach`.
        kinds: the classes whose code it is; of torch's own among them, names are collected here.
        around: what was found by a look before that.
    """

    def __init__(self, names: frozenset[str], kinds: Iterable[type], around: Surroundings) -> None:
        self._hooks = around.hooks
        wanted = _reached(names.union(_OFTEN, *map(_names_of_torchs, kinds)))
        spaces = [(space, sorted(wanted & inner & space.keys())) for space, inner in _SPACES.values()]
        # of a single name it gives no tuple
        self._gets = [(operator.itemgetter(found[0], *found), space) for space, found in spaces if found]
        # a method that tensors inherit is overridden by one of the same name
        self._own = len(vars(torch.Tensor))
        self._found = self._now()
        # what changed since `around` was found must not pass for it
        self._true = look() == around

    def _now(self) -> list[Any]:
        return [each for get, space in self._gets for each in get(space)]

    def unchanged(self) -> bool:
        """Whether none of them changed; microseconds."""
        try:
            still = self._true and self._hooks_unchanged() and len(vars(torch.Tensor)) == self._own
            return still and self._now() == self._found
        except Exception:
            # one is gone, or cannot be compared
            return False

    def _hooks_unchanged(self) -> bool:
        """Whether the same hooks are on all modules."""
        return self._hooks == _hooks() if self._hooks else not any(_HOOKS)


def _names_of_torchs(kind: type) -> frozenset[str]:
    owners = (owner for owner in kind.__mro__ if package(owner.__module__) == "torch" and owner is not nn.Module)
    methods = (layer for owner in owners for value in vars(owner).values() for layer in layers(value))
    return frozenset(name for layer in methods for name in names_in(layer.__code__))


def _reached(names: frozenset[str]) -> frozenset[str]:
    """The names in torch that code can reach, from the names that it looks up itself."""
    # operators, which no code names
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
    return tuple(hook for hooks in _HOOKS for hook in hooks.values())


def _replaced() -> Iterator[tuple[str, Any]]:
    for home, (space, _) in _SPACES.items():
        for name, stock in _STOCK[home].items():
            function = space.get(name)
            if (function is not stock or name not in _OWN[home]) and not _of_a_tracer(name, function):
                yield f"{home}.{name}", function
    # a method that tensors inherit is overridden by one of the same name
    added = _SPACES["torch.Tensor"][1] & vars(torch.Tensor).keys() - _STOCK["torch.Tensor"].keys()
    yield from ((f"torch.Tensor.{name}", vars(torch.Tensor)[name]) for name in added)


def _of_a_tracer(name: str, function: Any) -> bool:
    """Whether it is what torch.fx puts there for as long as it traces something, in whichever thread."""
    return name in CALLS and all(f.__globals__.get("__name__", "").startswith("torch.fx") for f in layers(function))


_SPACES = _spaces()
_STOCK = {home: {name: space[name] for name in names & space.keys()} for home, (space, names) in _SPACES.items()}
_OWN = {home: {n for n, f in stock.items() if not foreign_layers(f, nn.Module)} for home, stock in _STOCK.items()}
_last = Surroundings()
