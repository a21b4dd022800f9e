"""What another party put on a module: which function it is, and whose."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    """"forward", "method" or "hook" on the instance; "class" where its class's forward is an extension's; the
    name of an attribute, such as "processor", that is a callable of an extension's."""
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


def brought(value: Any, home: str | None) -> bool:
    """Whether a function or callable object, such as an attention processor, is of another extension than `home`.

    What comes with the host in `extensions-builtin` is known to its adapter.
    """
    if not callable(value):
        return False
    extension = extension_of(value)
    return extension is not None and extension != home and _BUILT_IN not in PurePath(_code(value).co_filename).parts


@functools.lru_cache(maxsize=1024)
def forward_brought(forward: Callable[..., Any], home: str | None) -> bool:
    """`brought`, for the forward of a class: an extension exchanged it, or the class is its own."""
    return brought(forward, home)
