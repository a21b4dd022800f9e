"""Patches that an extension lays for good, and that only pass on what they are given while its switch is off.

FreeU lays one over `cat` when it is loaded. That such a patch does nothing is read from the code that runs, never told
by its name: its first statement must be

    if not <global>.<attribute>...: return <what was there before>(<all that it was given, as it was given>)
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sfast_ext.behaviour.foreign_code import brought, described


@dataclass(frozen=True)
class DormantPatch:
    """A patch that is not there while its switch is off."""

    function: Any
    switch: tuple[str, ...]
    globals: dict[str, Any]
    passes_to: DormantPatch | None
    """The patch that it passes on to, where that is one of the same kind."""

    def active(self) -> str | None:
        """The patch in words where it is on, or cannot be asked; else None. Read as the patch itself does."""
        try:
            on = bool(functools.reduce(getattr, self.switch[1:], self.globals[self.switch[0]]))
        except Exception:
            on = True
        if on:
            return f"{described(self.function)} is on; turn it off to accelerate"
        return None if self.passes_to is None else self.passes_to.active()


def read_patch(patch: Any) -> DormantPatch | None:
    """Read whether a patch does nothing while a switch is off, and neither does what it passes on to."""
    function, originals = _parts_of(patch)
    if function is None:
        return None
    switch = _switch(function)
    if switch is None:
        return None
    for name, original in originals.items():
        if not callable(original) or not _starts_with(function, _guard(function, name, switch)):
            continue
        below = read_patch(original) if brought(original, None) else None
        if below is not None or not brought(original, None):
            return DormantPatch(patch, switch, function.__globals__, below)
    return None


def _parts_of(patch: Any) -> tuple[types.FunctionType | None, dict[str, Any]]:
    """The function, and what may be the one that was there before, by the name that it has in it."""
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
    """The names of the value that the function's first branch asks for."""
    names: list[str] = []
    for instruction in _instructions(function.__code__):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_ATTR"):
            names.append(instruction.argval)
        elif "JUMP" in instruction.opname:
            break
    return tuple(names) if names and names[0] in function.__globals__ else None


def _guard(function: types.FunctionType, original: str, switch: tuple[str, ...]) -> types.CodeType | None:
    """A function of the same arguments that is nothing but the guard, compiled by this very interpreter."""
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
    """Whether the code of a function is the guard, up to the end of the guard's return."""
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
    # how many variables are captured says nothing about what is done with them
    return (instruction for instruction in dis.get_instructions(code) if instruction.opname != "COPY_FREE_VARS")


class DormantPatches:
    """The dormant of the patches of one model that were vouched for, once off: asked before a plan may run again."""

    def __init__(self) -> None:
        self._this_pass: dict[int, DormantPatch] = {}
        self._last_pass: dict[int, DormantPatch] = {}

    def new_pass(self) -> None:
        """What is not vouched for again in this pass is forgotten with the next: it is no longer laid."""
        if self._this_pass:
            self._last_pass, self._this_pass = self._this_pass, {}

    def active(self) -> str | None:
        """At each call: a patch that was off and is on, in words. Microseconds."""
        known = (*self._last_pass.values(), *self._this_pass.values())
        return next((words for each in known if (words := each.active()) is not None), None)

    def vouch(self, patch: Any) -> bool:
        """Whether a patch does nothing now; if so, `active` follows its switch from here on."""
        # what is kept keeps its patch, so that none has its address
        found = self._this_pass.get(id(patch)) or self._last_pass.get(id(patch)) or read_patch(patch)
        if found is None or found.active() is not None:
            return False
        self._this_pass[id(patch)] = found
        return True
