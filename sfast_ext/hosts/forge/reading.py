"""What a UNet's forward reads of what it is given, as far as its code says."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from sfast_ext.hosts.probes import HOSTS_OWN


class Reading:
    """The keys that the code of a UNet and of its blocks has as text. Of what it is given, it hands on all else.

    Args:
        unet: not kept.
    """

    def __init__(self, unet: nn.Module) -> None:
        kinds = {kind for module in unet.modules() for kind in type(module).__mro__ if kind is not object}
        own = {kind for kind in kinds if kind.__module__.partition(".")[0] in HOSTS_OWN} | {type(unet)}
        functions = map(_functions_of, {kind.__module__ for kind in own})
        self._keys = frozenset().union(*map(_methods_of, own), *functions)
        self.parameters = _parameters(type(unet))
        """Those of the forward."""

    def option(self, name: str) -> bool:
        """Whether any of the code reads this option, or this one of the arguments that have no parameter."""
        return name in self._keys


def _parameters(kind: type) -> frozenset[str]:
    try:
        signature = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return frozenset()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return frozenset(name for name, each in signature.parameters.items() if each.kind not in variable)


@functools.lru_cache(maxsize=512)
def _methods_of(kind: type) -> frozenset[str]:
    """The texts in the methods of a class."""
    return _texts_in(getattr(each, "__func__", each) for each in vars(kind).values())


@functools.lru_cache(maxsize=64)
def _functions_of(module: str) -> frozenset[str]:
    """The texts in the functions that a module defines, which its classes call."""
    found = vars(sys.modules.get(module, object)).values()
    return _texts_in(each for each in found if getattr(each, "__module__", None) == module)


def _texts_in(found: Iterable[Any]) -> frozenset[str]:
    functions = [inspect.unwrap(each) for each in found if isinstance(each, FunctionType)]
    return frozenset(text for function in functions for text in _texts(function.__code__))


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        yield from _texts(constant) if isinstance(constant, CodeType) else _in_constant(constant)


def _in_constant(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for each in constant:
            yield from _in_constant(each)
