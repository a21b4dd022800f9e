"""Patches that an extension installs for good, and that only call the original while the extension's switch is off.

FreeU installs one over `cat` when it is loaded. That such a patch does nothing is read from its code, never inferred
from its name: the first statement must be

    if not <global>.<attribute>...: return <original>(<all arguments, unchanged>)
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sfast_ext.behaviour.foreign_code import describe, is_foreign
from sfast_ext.hosts import reasons
from sfast_ext.reasons import Reason


@dataclass(frozen=True)
class DormantPatch:
    """A patch that has no effect while its switch is off."""

    function: Any
    switch: tuple[str, ...]
    globals: dict[str, Any]
    passes_to: DormantPatch | None
    """The patch that it calls as its original, if that is a dormant patch too."""

    def active(self) -> Reason | None:
        """A reason if the patch is on or its switch cannot be read; else None. Reads what the patch reads."""
        try:
            on = bool(functools.reduce(getattr, self.switch[1:], self.globals[self.switch[0]]))
        except Exception:
            on = True
        if on:
            return reasons.PATCH_ON(describe(self.function))
        return None if self.passes_to is None else self.passes_to.active()


def read_patch(patch: Any) -> DormantPatch | None:
    """The patch as a dormant one; None if it, or what it calls as its original, may have an effect while off."""
    function, originals = _parts_of(patch)
    if function is None:
        return None
    switch = _switch(function)
    if switch is None:
        return None
    for name, original in originals.items():
        if not callable(original) or not _starts_with(function, _guard(function, name, switch)):
            continue
        below = read_patch(original) if is_foreign(original, None) else None
        if below is not None or not is_foreign(original, None):
            return DormantPatch(patch, switch, function.__globals__, below)
    return None


def _parts_of(patch: Any) -> tuple[types.FunctionType | None, dict[str, Any]]:
    """The function of a patch, and the candidates for its original by their names in it."""
    if isinstance(patch, functools.partial) and isinstance(patch.func, types.FunctionType):
        if patch.args or len(patch.keywords) != 1:
            return None, {}
        return patch.func, dict(patch.keywords)
    function = getattr(patch, "__func__", patch)
    if not isinstance(function, types.FunctionType):
        return None, {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    try:
        return function, {name: cell.cell_contents for name, cell in cells}
    except ValueError:
        return None, {}  # an empty cell


def _switch(function: types.FunctionType) -> tuple[str, ...] | None:
    """The names of the value that the function's first branch tests."""
    names: list[str] = []
    for instruction in _instructions(function.__code__):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_ATTR"):
            names.append(instruction.argval)
        elif "JUMP" in instruction.opname:
            break
    return tuple(names) if names and names[0] in function.__globals__ else None


def _guard(function: types.FunctionType, original: str, switch: tuple[str, ...]) -> types.CodeType | None:
    """A function with the same arguments that consists of the guard, compiled by this interpreter."""
    taken: list[str] = []
    passed: list[str] = []
    starred = False
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            taken.append(f"*{name}")
            passed.append(f"*{name}")
        elif parameter.kind is parameter.VAR_KEYWORD:
            taken.append(f"**{name}")
            passed.append(f"**{name}")
        elif parameter.kind is parameter.KEYWORD_ONLY:
            taken += [name] if starred else ["*", name]
            passed += [] if name == original else [f"{name}={name}"]
        else:
            taken.append(name)
            passed.append(name)
        starred |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
    lines = (
        f"def around({original}):",
        f"    def function({', '.join(taken)}):",
        f"        if not {'.'.join(switch)}:",
        f"            return {original}({', '.join(passed)})",
        "    return function",
    )
    try:
        module = compile("\n".join(lines), "<guard>", "exec")
    except SyntaxError:
        return None
    return _inner(_inner(module))


def _inner(code: types.CodeType) -> types.CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _starts_with(function: types.FunctionType, guard: types.CodeType | None) -> bool:
    """Whether a function's code is that of the guard, up to the guard's return."""
    if guard is None:
        return False
    compared = zip(_instructions(guard), _instructions(function.__code__))
    for own, other in compared:
        if (own.opname, own.argval) != (other.opname, other.argval):
            return False
        if own.opname == "RETURN_VALUE":
            return True
    return False


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    # the number of captured variables says nothing about what the code does
    return (instruction for instruction in dis.get_instructions(code) if instruction.opname != "COPY_FREE_VARS")


class DormantPatches:
    """The dormant patches of one model that were vouched for. Their switches are read before a plan may run again."""

    def __init__(self) -> None:
        self._this_pass: dict[int, DormantPatch] = {}
        self._last_pass: dict[int, DormantPatch] = {}

    def new_pass(self) -> None:
        """Begin a pass. A patch that no pass vouches for again is no longer installed, and is forgotten."""
        if self._this_pass:
            self._last_pass, self._this_pass = self._this_pass, {}

    def active(self) -> Reason | None:
        """The reason of a patch that has been switched on; None if none has. Takes microseconds."""
        known = (*self._last_pass.values(), *self._this_pass.values())
        return next((reason for each in known if (reason := each.active()) is not None), None)

    def vouch(self, patch: Any) -> bool:
        """Whether a patch has no effect now. If so, `active` reads its switch from here on."""
        # an entry holds its patch, so no other object can get its id
        found = self._this_pass.get(id(patch)) or self._last_pass.get(id(patch)) or read_patch(patch)
        if found is None or found.active() is not None:
            return False
        self._this_pass[id(patch)] = found
        return True
