"""Calls of chosen functions, taken over for one thread and for a while.

The code of the function object is exchanged, not an attribute of a module: a caller that imported the function by name,
or holds it in a closure, is met too. Other threads run the original code meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from sfast_ext.report import logger

Handler = Callable[..., Any]
"""Called in place of a function, with the original, which runs the original code, and the arguments of the call."""

_MARK = "the detour of sfast_ext"
_lock = threading.Lock()
_detours: dict[FunctionType, _Detour] = {}
_local = threading.local()


@contextlib.contextmanager
def intercepted(handlers: Mapping[FunctionType, Handler]) -> Iterator[None]:
    """Within, this thread's calls of each function go to its handler. May be nested: the innermost counts."""
    outer = getattr(_local, "handlers", {})
    installed: list[FunctionType] = []
    try:
        with _lock:
            for function in handlers:
                if _install(function):
                    installed.append(function)
        _local.handlers = {**outer, **handlers}
        yield
    finally:
        _local.handlers = outer
        with _lock:
            for function in installed:
                _remove(function)


class _Detour:
    """What stands in a function's place while anybody intercepts it."""

    def __init__(self, function: FunctionType) -> None:
        self.code = function.__code__
        self.stub = _stub(len(function.__code__.co_freevars), self._call)
        self.users = 0
        self._function = function
        self._original = _copy(function)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = getattr(_local, "handlers", {}).get(self._function)
        if handler is None:
            return self._original(*args, **kwargs)
        return handler(self._original, *args, **kwargs)


def _install(function: FunctionType) -> bool:
    detour = _detours.get(function)
    if detour is None:
        detour = _Detour(function)
        try:
            function.__code__ = detour.stub
        except (TypeError, ValueError):
            logger.debug("%s cannot be intercepted", function, exc_info=True)
            return False
        _detours[function] = detour
    detour.users += 1
    return True


def _remove(function: FunctionType) -> None:
    detour = _detours[function]
    detour.users -= 1
    if not detour.users:
        del _detours[function]
        # somebody else may have exchanged it since
        if function.__code__ is detour.stub:
            function.__code__ = detour.code


def _copy(function: FunctionType) -> FunctionType:
    """A function of the same code, which stays when the code of `function` is exchanged."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


def _stub(cells: int, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> CodeType:
    """Code for a function with that many closure cells, which Python demands to be as many as before; it calls `call`.

    What it calls is a constant of the code: names would be looked up among the globals of the function's module.
    """
    names = [f"cell_{i}" for i in range(cells)]
    source = f"""
def outer({", ".join(names)}):
    def stub(*args, **kwargs):
        call = {_MARK!r}
        return call(args, kwargs)
        [{", ".join(names)}]
"""
    (outer,) = _codes(compile(source, "<sfast_ext.capture.interception>", "exec"))
    (stub,) = _codes(outer)
    return stub.replace(co_consts=tuple(call if x == _MARK else x for x in stub.co_consts))


def _codes(code: CodeType) -> list[CodeType]:
    return [x for x in code.co_consts if isinstance(x, CodeType)]
