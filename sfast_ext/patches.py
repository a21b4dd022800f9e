"""What another party put on a module: which function it is, and whose."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch import nn

_EXTENSIONS = ("extensions", "extensions-builtin")
# what comes with the host is known to its adapter
_BUILT_IN = "extensions-builtin"


@dataclass(frozen=True)
class Patch:
    """Something that another party put on a module instance."""

    path: str
    module: nn.Module
    kind: str
    """"forward", "method" or "hook" on the instance; "class" where an extension exchanged its class's forward."""
    function: Any

    def words(self) -> str:
        """The patch and where it comes from, for the report."""
        what = "forward of its class" if self.kind == "class" else self.kind
        return f"{self.path or 'the model'} has a foreign {what}, {described(self.function)}"


def described(function: Any) -> str:
    """A function by its name, and the WebUI's extension that it comes from, where it lies in one's folder."""
    function = _innermost(function)
    home = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    extension = extension_of(function)
    return f"{home}.{name}" + (f" of the extension {extension}" if extension else "")


def extension_of(function: Any) -> str | None:
    """The folder in a WebUI's `extensions` that a function's code lies in, or None."""
    parts = PurePath(getattr(_code(function), "co_filename", "")).parts
    return next((inside for folder, inside in zip(parts, parts[1:]) if folder in _EXTENSIONS), None)


def _innermost(function: Any) -> Any:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__func__"):
            function = function.__func__
        else:
            return function


def _code(function: Any) -> Any:
    """The code of a function, or of the call of an object; None for what is not written in Python."""
    inner = _innermost(function)
    if not hasattr(inner, "__code__") and callable(inner):
        inner = _innermost(type(inner).__call__)
    return getattr(inner, "__code__", None)


def shadows(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is a function laid over a method that the class brings, beyond those of every module."""
    method = getattr(type(module), name, None)
    if not callable(method) or not callable(value) or hasattr(nn.Module, name):
        return False
    return not (getattr(value, "__self__", None) is module and getattr(value, "__func__", None) is method)


@functools.lru_cache(maxsize=256)
def _foreign_function(function: Any, home: str) -> bool:
    if getattr(function, "__module__", home) == home or extension_of(function) is None:
        return False
    return _BUILT_IN not in PurePath(_code(function).co_filename).parts


def exchanged(kind: Any) -> bool:
    """Whether the forward of a class, or of one it derives from, is a function of another party's extension."""
    owner = next((c for c in kind.__mro__ if "forward" in c.__dict__), None)
    return owner is not None and _foreign_function(owner.__dict__["forward"], owner.__module__)
