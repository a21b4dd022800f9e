"""Where a forward reads a value from: the code of a processor, and of a wrapper on the root, for each place."""

from __future__ import annotations

import itertools
import types
from dataclasses import dataclass
from typing import Any

from fuzz.values import Value

_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Code of a processor that reads a value.

    Attributes:
        expression: of the value, where it is read.
        put: a statement that puts `value` there; `p` is the processor, `attn` the module it belongs to.
        get: an expression of what is there.
        scale: what the processor calls; `READ` stands for the number that is read.
        before: definitions before the class.
        body: of the class.
        bases: of the class.
        begin: statements of `__init__`.
    """

    expression: str
    put: str
    get: str
    scale: str = "READ"
    before: str = ""
    body: str = ""
    bases: str = ""
    begin: str = "pass"


PROCESSOR = """
import contextvars
import functools
import threading
import types

{before}


class Processor{bases}:
    {body}

    def __init__(self, inner):
        self.inner = inner
        {begin}

    def __call__(self, attn, *args, **kwargs):
        return self.inner(attn, *args, **kwargs) * ({scale})


def put(p, attn, value):
    {put}


def get(p, attn):
    return {get}
"""

_HELPER = "def helper({}):\n    return READ"
PLACES: dict[str, Place] = {
    "an attribute": Place("self.value", "p.value = value", "p.value"),
    "an attribute of an attribute": Place(
        "self.options.value", "p.options.value = value", "p.options.value",
        before="class Options:\n    pass", begin="self.options = Options()",
    ),
    "an entry of an attribute": Place(
        "self.options['value']", "p.options['value'] = value", "p.options['value']", begin="self.options = {}"
    ),
    "a slot": Place("self.value", "p.value = value", "p.value", body='__slots__ = ("inner", "value")'),
    "an attribute of the class": Place("self.value", "Processor.value = value", "Processor.value"),
    "an attribute of a base class": Place(
        "self.value", "Base.value = value", "Base.value", before="class Base:\n    pass", bases="(Base)"
    ),
    "an attribute of the metaclass": Place(
        "type(self).value", "Meta.value = value", "Meta.value",
        before="class Meta(type):\n    pass", bases="(metaclass=Meta)",
    ),
    "a property": Place(
        "self.value", "p._value = value", "p._value", body="value = property(lambda self: self._value)"
    ),
    "what a class method reads": Place(
        "cls.value", "Processor.value = value", "Processor.value", scale="self.read()",
        body="@classmethod\n    def read(cls):\n        return READ",
    ),
    "what a static method reads": Place(
        "GLOBAL", "globals().update(GLOBAL=value)", "GLOBAL", scale="self.read()",
        body="@staticmethod\n    def read():\n        return READ",
    ),
    "a global": Place("GLOBAL", "globals().update(GLOBAL=value)", "GLOBAL"),
    "a global of a function of a function": Place(
        "GLOBAL", "globals().update(GLOBAL=value)", "GLOBAL", scale="helper()",
        before="def further():\n    return READ\n\n\ndef helper():\n    return further()",
    ),
    "an entry of a global": Place("STATE['value']", "STATE['value'] = value", "STATE['value']", before="STATE = {}"),
    "an attribute of a global": Place(
        "OPTIONS.value", "OPTIONS.value = value", "OPTIONS.value",
        before="class Options:\n    pass\n\n\nOPTIONS = Options()",
    ),
    "an attribute of another module": Place(
        "other.value", "other.value = value", "other.value",
        before='other = types.ModuleType("generated_package.other")',
    ),
    "a default argument": Place(
        "value", "helper.__defaults__ = (value,)", "helper.__defaults__[0]", scale="helper()",
        before=_HELPER.format("value=None"),
    ),
    "a default argument by name": Place(
        "value", "helper.__kwdefaults__ = {'value': value}", "helper.__kwdefaults__['value']", scale="helper()",
        before=_HELPER.format("*, value=None"),
    ),
    "an attribute of a function": Place(
        "helper.value", "helper.value = value", "helper.value", scale="helper()", before=_HELPER.format("")
    ),
    "a closure": Place(
        "value", "PUT(value)", "GET()", scale="helper()",
        before="""def closed(value):
    def helper():
        return READ

    def put(new):
        nonlocal value
        value = new

    return helper, put, lambda: value


helper, PUT, GET = closed(None)""",
    ),
    "a closure of a callback": Place(
        "value", "PUT(value)", "GET()", scale="self.callback(1.0)", begin="self.callback = callback",
        before="""def closed(value):
    def callback(x):
        return x * (READ)

    def put(new):
        nonlocal value
        value = new

    return callback, put, lambda: value


callback, PUT, GET = closed(None)""",
    ),
    "a partial": Place(
        "value", "p.read = functools.partial(helper, value)", "p.read.args[0]", scale="self.read()",
        before=_HELPER.format("value"),
    ),
    "a partial by name": Place(
        "value", "p.read = functools.partial(helper, value=value)", "p.read.keywords['value']",
        scale="self.read()", before=_HELPER.format("*, value"),
    ),
    "a bound method": Place(
        "self.value", "p.read.__self__.value = value", "p.read.__self__.value", scale="self.read()",
        before="class Options:\n    def read(self):\n        return READ", begin="self.read = Options().read",
    ),
    "a context variable": Place(
        "VARIABLE.get()", "VARIABLE.set(value)", "VARIABLE.get()",
        before='VARIABLE = contextvars.ContextVar("value")',
    ),
    "a variable of the thread": Place(
        "LOCAL.value", "LOCAL.value = value", "LOCAL.value", before="LOCAL = threading.local()"
    ),
    "an attribute of the layer": Place(
        "attn.value_of_a_package", "attn.value_of_a_package = value", "attn.value_of_a_package"
    ),
}  # fmt: skip


HOMES = ("/home/user", "/home/user", "/venv/lib/python3/site-packages")
"""A program's code, or an installed package's."""
UNCHANGING = frozenset({
    "a default argument", "a default argument by name", "an attribute of a function", "a closure",
    "a variable of the thread",
})  # fmt: skip
"""What no program changes in the functions of an installed package: it is not followed there."""


def homes(place: str) -> tuple[str, ...]:
    """The folders that code with a value at a place may be in."""
    return HOMES[:1] if place in UNCHANGING else HOMES


def package(place: Place, value: Value, home: str = HOMES[0]) -> Any:
    """A module with a processor that reads such a value there."""
    read = value.read(place.expression)
    parts = {
        name: getattr(place, name).replace("READ", read)
        for name in ("before", "bases", "body", "begin", "scale", "put", "get")
    }
    parts["body"] = parts["body"] or "pass"
    return module(PROCESSOR.format(**parts), home)


WRAPPER = """
def laid_over(before, value):
    def wrapper(*args, **kwargs):
        by = {read}
        if args:
            args = (args[0] * by, *args[1:])
        else:
            kwargs["sample"] = kwargs["sample"] * by
        return before(*args, **kwargs)

    def put(new):
        nonlocal value
        value = new

    return wrapper, put


def taking_an_argument(before):
    def wrapper(*args, settings, **kwargs):
        value = settings
        by = {read}
        if args:
            args = (args[0] * by, *args[1:])
        else:
            kwargs["sample"] = kwargs["sample"] * by
        return before(*args, **kwargs)

    return wrapper
"""


def wrappers(value: Value) -> Any:
    """A module whose wrappers of a forward read such a value."""
    return module(WRAPPER.format(read=value.read("value")))


def module(source: str, home: str = HOMES[0]) -> Any:
    """A module, as when it is imported from somewhere."""
    name = f"generated_package.number_{next(_numbers)}"
    made = types.ModuleType(name)
    exec(compile(source, f"{home}/{name.replace('.', '/')}.py", "exec"), vars(made))
    return made
