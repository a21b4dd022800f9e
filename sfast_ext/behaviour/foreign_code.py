"""Foreign code: monkey-patches by third parties, what they are and where they come from."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from logging import Logger
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.behaviour.quick_check import content_of
from sfast_ext.behaviour.snapshot import MAX_LENGTH

_EXTENSIONS = ("extensions", "extensions-builtin")
# extensions that ship with the host are known to its adapter
_BUILT_IN = "extensions-builtin"


@dataclass(frozen=True)
class Patch:
    """A patch by a third party."""

    path: str
    module: nn.Module
    kind: str
    """On the root: "replaced" for a function of torch, with its name as `path`, or "hook on all modules". On an
    instance: "forward", "method" or "hook". Of its class: "class" for a foreign forward, "function" for another method,
    or a function that a method calls. Otherwise the name of an attribute that is a foreign callable, such as
    "processor"."""
    function: Any

    def reason(self) -> reasons.Reason:
        """The patch and its origin, for the report."""
        if self.kind == "replaced":
            if not self.function:
                return reasons.TORCH_GONE(self.path)
            return reasons.TORCH_REPLACED(self.path, describe(self.function))
        what = {"class": "forward of its class", "function": "function in its class"}.get(self.kind, self.kind)
        return reasons.FOREIGN_PATCH(self.path or "the model", what, describe(self.function))


def describe(function: Any) -> str:
    """A function by name and origin: the WebUI extension that it belongs to, or its file."""
    function = _innermost(function)
    home = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    if hasattr(function, "__wrapped__") and isinstance(function, FunctionType):
        # functools.wraps copied the names of the wrapped function
        home, name = function.__globals__.get("__name__", home), function.__code__.co_name
    extension = extension_of(function)
    if extension:
        return f"{home}.{name} of the extension {extension}"
    file = PurePath(getattr(_code(function), "co_filename", "<none>"))
    # not the whole path: it may contain the user's name
    return f"{home}.{name}" if file.name.startswith("<") else f"{home}.{name} in {'/'.join(file.parts[-2:])}"


def extension_of(function: Any) -> str | None:
    """The name of the folder in a WebUI's `extensions` that contains a function's code, or None."""
    return _extension_in(getattr(_code(function), "co_filename", ""))[0]


@functools.lru_cache(maxsize=4096)
def _extension_in(file: str) -> tuple[str | None, bool]:
    """The extension that a file belongs to, and whether it ships with the host."""
    parts = PurePath(file).parts
    inside = next((inside for folder, inside in zip(parts, parts[1:]) if folder in _EXTENSIONS), None)
    return inside, _BUILT_IN in parts


def owning_extension(kind: type) -> str | None:
    """The extension that defines a class, by the methods of its own module. None for the host's classes."""
    own = (f for f in vars(kind).values() if getattr(f, "__module__", None) == kind.__module__)
    return next((extension for f in own if (extension := extension_of(f)) is not None), None)


def _innermost(function: Any) -> Any:
    while True:
        if isinstance(function, (functools.partial, functools.partialmethod)):
            function = function.func
        elif hasattr(type(function), "__func__"):
            # not of the object: looking an attribute up may run its code
            function = function.__func__
        else:
            return function


def _code(function: Any) -> Any:
    """The code of a function, or of an object's `__call__`. None if it is not Python."""
    inner = _innermost(function)
    if not hasattr(type(inner), "__code__") and callable(inner):
        inner = _innermost(type(inner).__call__)
    return inner.__code__ if hasattr(type(inner), "__code__") else None


def overrides_method(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is a function that overrides a method of the class, other than those of nn.Module."""
    method = getattr(type(module), name, None)
    if not callable(method) or not callable(value) or hasattr(nn.Module, name):
        return False
    return not (getattr(value, "__self__", None) is module and getattr(value, "__func__", None) is method)


def is_foreign(value: Any, own: str | None) -> bool:
    """Whether a function or callable object, such as an attention processor, belongs to another extension than `own`.

    Not for `extensions-builtin`: those are known to the host's adapter.
    """
    if not callable(value):
        return False
    extension, built_in = _extension_in(getattr(_code(value), "co_filename", ""))
    return extension is not None and extension != own and not built_in


CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
"""Methods that run when a module is called, before its forward."""
# patched by hosts, without influence on results
_BOOKKEEPING = frozenset({"_load_from_state_dict", "_save_to_state_dict", "reset_parameters", "extra_repr"})
OF_OBJECTS = frozenset(
    {
        "__init__", "__new__", "__del__", "__init_subclass__", "__class_getitem__", "__repr__", "__str__", "__dir__",
        "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__delattr__",
    }
)  # fmt: skip
"""Special methods that a forward does not run. Others are called by syntax, without a name in the code."""

PLAIN = (bool, int, float, str)
# depth to which calls within a package are followed from a method
_MAX_DEPTH = 3
# packages with replacements of PyTorch's attention
KERNELS = frozenset({"xformers", "flash_attn", "sageattention"})
_ATTENTIONS = KERNELS | {"torch", "diffusers"}
COMMON = frozenset({"torch", "typing_extensions", "sfast_ext", *sys.stdlib_module_names})
"""Packages that any code may use, for a decorator say, and this one: what it keeps is no behaviour of a forward."""


def layers(function: Any) -> Iterator[FunctionType]:
    """A function and those below it: that of a bound method or a partial, and functions in its closure."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        each = _innermost(waiting.pop())
        if not isinstance(each, FunctionType):
            each = _innermost(type(each).__call__) if _has_code(each) else None
        if isinstance(each, FunctionType) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [content for cell in each.__closure__ or () if _has_code(content := content_of(cell))]


def cells(function: Any, owner: type) -> Iterator[CellType]:
    """The closure cells of a function's layers, without those of foreign code."""
    for layer in layers(function):
        if written_by(layer) == package(owner.__module__):
            yield from layer.__closure__ or ()


def foreign_layers(function: Any, owner: type, *, imported: bool = False) -> list[FunctionType]:
    """The layers of a method that belong neither to the package of its class nor to torch or Python.

    Args:
        imported: packages that the module of the class imports count as its own, as for decorators of a library.
    """
    own = COMMON | {package(owner.__module__)}
    found = [layer for layer in layers(function) if written_by(layer) not in own and not _comes_with_the_host(layer)]
    if found and imported:
        more = _imported_by(owner.__module__)
        found = [layer for layer in found if written_by(layer) not in more]
    return found


def knowable(function: Any) -> bool:
    """Whether the behaviour of a function is determined by its identity and by plain values in its closure and module.

    The attention of a library counts as such, whatever it looks up.
    """
    return all(_stays(value) for _, value in free_values(function))


Place = CellType | tuple[dict, str]


def free_values(function: Any) -> Iterator[tuple[Place, Any]]:
    """The free values of a function and of those that it calls: (cell, or dictionary and name; value)."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        for layer in layers(waiting.pop()):
            if id(layer) in seen or written_by(layer) in _ATTENTIONS:
                continue
            seen.add(id(layer))
            around = layer.__globals__
            found: list[tuple[Place, Any]] = [(cell, content_of(cell)) for cell in layer.__closure__ or ()]
            found += [((around, name), around[name]) for name in names_in(layer.__code__) & around.keys()]
            found += [((vars(layer), name), value) for name, value in vars(layer).items()]
            yield from found
            waiting += [value for _, value in found if isinstance(value, (FunctionType, functools.partial))]


def _stays(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return package(value.__name__) in COMMON
    if isinstance(value, functools.partial):
        return all(map(_stays, (value.func, *value.args, *value.keywords.values())))
    functions = (type, FunctionType, BuiltinFunctionType)
    return value is None or isinstance(value, (*PLAIN, *functions, torch.dtype, torch.device))


def _has_code(value: Any) -> bool:
    """Whether a value is callable and written in Python."""
    return callable(value) and not isinstance(value, (type, nn.Module)) and _code(value) is not None


def package(module: str) -> str:
    """The package of a module, by its name."""
    return module.partition(".")[0]


def written_by(function: FunctionType) -> str:
    """The package of a function's code. `__module__` may be that of a wrapped function."""
    if function.__code__.co_filename.startswith("<eval_with_key>"):
        return "torch"  # generated code of a graph
    return package(function.__globals__.get("__name__") or "")


def _imported_by(module: str) -> frozenset[str]:
    names = vars(sys.modules[module]) if module in sys.modules else {}
    homes = (v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in [*names.values()])
    return frozenset(package(home) for home in homes if isinstance(home, str))


def _comes_with_the_host(function: FunctionType) -> bool:
    return _extension_in(function.__code__.co_filename)[1]


Finding = tuple[type | dict, str, Any]


def methods(kind: type, names: frozenset[str]) -> Iterator[Finding]:
    """The methods and plain values of a class, and what the methods that run find in their modules: functions, plain
    values, and containers of those.

    Args:
        names: the names of methods that may run, see `reach`.

    Yields (class or dictionary that holds it, name, function or value). Torch's own classes are skipped.
    """
    for owner in kind.__mro__:
        if package(owner.__module__) not in ("builtins", "torch"):
            for name, value in vars(owner).items():
                if name in OF_OBJECTS or name in _BOOKKEEPING and name not in names:
                    continue
                if callable(function := getattr(value, "__func__", value)):
                    yield owner, name, function
                    if name in names:
                        yield from read_by(function)
                elif isinstance(value, PLAIN) and not name.startswith("__"):
                    yield owner, name, value


def torchs_methods(kind: type) -> Iterator[tuple[type, str, Any]]:
    """The methods that a class inherits from torch's classes, and CALLS: (class, name, method or None)."""
    for owner in kind.__mro__:
        of_torch = package(owner.__module__) == "torch" and owner is not nn.Module
        if of_torch or (owner is not nn.Module and issubclass(owner, nn.Module)):
            # a class without one may get one
            yield from ((owner, name, vars(owner).get(name)) for name in CALLS)
        for name, value in vars(owner).items() if of_torch else ():
            bookkeeping = name.startswith("__") or name in _BOOKKEEPING
            if not bookkeeping and name != "forward" and isinstance(getattr(value, "__func__", value), FunctionType):
                yield owner, name, value


def read_by(function: Any, depth: int = 0) -> Iterator[Finding]:
    """What a function, and functions of its package that it calls, find in the globals of their modules."""
    function = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType):
        return
    code = function.__code__
    for cell in (function.__closure__ or ()) if depth < _MAX_DEPTH else ():
        # a wrapper of the host's calls the original method
        yield from read_by(content_of(cell), depth + 1)
    names, around, own = names_in(code), function.__globals__, written_by(function)
    for used in names & around.keys():
        found = around[used]
        if isinstance(found, ModuleType) and package(found.__name__) == own:
            # attributes of another module of the package
            there = ((name, vars(found)[name]) for name in names & vars(found).keys())
            yield from ((vars(found), name, value) for name, value in there if _is_compared(value))
        if isinstance(found, (type, ModuleType, Logger)) or used.startswith("__"):
            # an attribute like __name__ is not a global, and a logger computes nothing
            continue
        if _is_compared(found):
            yield around, used, found
            if isinstance(found, FunctionType) and depth < _MAX_DEPTH and written_by(found) == own:
                yield from read_by(found, depth + 1)
        elif hasattr(found, "__dict__"):
            # an object in place of a module, as AUTOMATIC1111 has for torch
            yield from ((vars(found), attribute, vars(found).get(attribute)) for attribute in names)


def _is_compared(value: Any) -> bool:
    """Whether a function or a value is part of the key."""
    return not isinstance(value, type) and (callable(value) or isinstance(value, PLAIN) or _of_plain(value))


def _of_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 0 < len(items) <= MAX_LENGTH and all(isinstance(item, PLAIN) for item in items)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names that code looks up, including nested functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))
