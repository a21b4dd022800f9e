"""Temporarily intercepts calls of chosen functions in one thread.

The code of the function object is replaced, not an attribute of a module. So callers that imported the function by
name, or hold it in a closure, are intercepted too. Other threads run the original code meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from sfast_ext.report import logger

Handler = Callable[..., Any]
"""Called in place of a function, with the original function and the arguments of the call."""

_MARK = "the detour of sfast_ext"
_lock = threading.Lock()
_detours: dict[FunctionType, _Detour] = {}
_local = threading.local()


@contextlib.contextmanager
def intercepted(handlers: Mapping[FunctionType, Handler]) -> Iterator[None]:
    """Within, this thread's calls of each function go to its handler. May be nested: the innermost handler is
    called."""
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
    """Replaces the code of a function while any thread intercepts it."""

    def __init__(self, function: FunctionType) -> None:
        self.code = function.__code__
        self.stub: CodeType | None = None
        self.users = 0
        self._function = function
        self._original = _copy(function)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = getattr(_local, "handlers", {}).get(self._function)
        if handler is None:
            return self._original(*args, **kwargs)
        return handler(self._original, *args, **kwargs)


def _install(function: FunctionType) -> bool:
    detour = _detours.get(function)
    if detour is None:
        detour = _Detour(function)
        stub = _stub(len(function.__code__.co_freevars), detour.call)
        try:
            function.__code__ = stub
        except (TypeError, ValueError):
            logger.debug("%s cannot be intercepted", function, exc_info=True)
            return False
        detour.stub = stub
        _detours[function] = detour
    detour.users += 1
    return True


def _remove(function: FunctionType) -> None:
    detour = _detours[function]
    detour.users -= 1
    if not detour.users:
        del _detours[function]
        # a third party may have replaced it since
        if function.__code__ is detour.stub:
            function.__code__ = detour.code
        # its constant leads back here, and Python's garbage collection does not look into code
        detour.stub = None


def _copy(function: FunctionType) -> FunctionType:
    """A copy of a function, not affected when the code of `function` is replaced."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


def _stub(cells: int, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> CodeType:
    """Code that calls `call`. Python requires the same number of closure cells as in the code that it replaces.

    `call` is a constant of the code: a name would be looked up in the globals of the function's module.
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
