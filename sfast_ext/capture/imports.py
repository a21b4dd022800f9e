"""Imports by a forward that is being recorded.

A module that a forward imports at its first run would be executed under the recording modes. Tensors that it creates
would be fake and stay in a library that others use, and the graph would contain the operations that create them.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType
from typing import Any

_thread = threading.local()


@contextlib.contextmanager
def in_other_thread() -> Iterator[None]:
    """Within, first imports of this thread are executed by another thread, which has none of its modes."""
    if getattr(_thread, "active", False):
        yield
        return
    _thread.active = True
    try:
        with _replaced(builtins, "__import__", _statement), _replaced(importlib, "import_module", _call):
            yield
    finally:
        _thread.active = False


@contextlib.contextmanager
def _replaced(home: Any, name: str, like: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(home, name)
    mine = like(original)
    setattr(home, name, mine)
    try:
        yield
    finally:
        # if a third party wrapped ours meanwhile, it stays and does nothing
        if getattr(home, name) is mine:
            setattr(home, name, original)


def _statement(original: Callable[..., Any]) -> Callable[..., Any]:
    loaded = sys.modules
    # a third party's may want to see each import
    plain = isinstance(original, BuiltinFunctionType)

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        # hot: torch imports inside functions, tens of thousands of times in a capture
        full = _absolute(name, globals, level) if level else name
        module = loaded.get(full)
        if module is None or fromlist:
            known = module.__dict__ if module is not None else {}
            for wanted in fromlist or ("",):
                if wanted not in known:
                    return _elsewhere(lambda: original(name, globals, locals, fromlist, level))
            if plain and not getattr(known.get("__spec__"), "_initializing", False):
                # what the original would find; it waits for modules that another thread executes
                return module
        return original(name, globals, locals, fromlist, level)

    return __import__


def _absolute(name: str, globals: Any, level: int) -> str:
    """The absolute name of a relative import, or "" if unknown."""
    package = (globals or {}).get("__package__") or ""
    home = package.rsplit(".", level - 1)[0]
    return f"{home}.{name}" if home and name else home


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def import_module(name: str, package: str | None = None) -> Any:
        return original(name) if name in sys.modules else _elsewhere(lambda: original(name, package))

    return import_module


def _elsewhere(run: Callable[[], Any]) -> Any:
    """Run an import, in another thread if it may be the first."""
    if not getattr(_thread, "active", False) or _within_an_import():
        return run()
    with ThreadPoolExecutor(1, "sfast: import") as other:
        return other.submit(run).result()


def _within_an_import() -> bool:
    """Whether this thread is executing a module. It holds the import lock of it, so another thread could deadlock."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
