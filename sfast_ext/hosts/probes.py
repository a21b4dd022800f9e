"""What an adapter relies on in its host: names and how they behave, as data, and the search for them, which changes
nothing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from sfast_ext.report import one_line, words_of

HOSTS_OWN = frozenset({"modules", "modules_forge", "backend", "ldm_patched"})
"""The packages of the programs themselves. Elsewhere is what another extension has put in the place of theirs."""

Check = Callable[[Any], "str | None"]
"""Says of what was found why the adapter cannot rely on it; None if it can."""


@dataclass(frozen=True)
class Feature:
    """What an adapter does in addition to accelerating the UNet. Without one of its probes it is lost alone.

    Args:
        name: a few words, such as "settings of one request".
        lost: what the user has to do without, a sentence without a full stop.
    """

    name: str
    lost: str


@dataclass(frozen=True)
class Probe:
    """A name of the host's that an adapter relies on.

    Args:
        places: where it may be, the first that holds counts: "package.module:attribute.attribute", or a module alone.
        check: what the adapter relies on in addition to the name.
        features: what is lost without it; nothing can be accelerated without it if there is none.
        absent: the name must not be there: it is the mark of another program.
    """

    places: tuple[str, ...]
    check: Check | None = None
    features: tuple[Feature, ...] = ()
    absent: bool = False

    @property
    def name(self) -> str:
        """What an adapter calls it: its path in its first place."""
        module, _, path = self.places[0].partition(":")
        return path or module

    @property
    def modules(self) -> tuple[str, ...]:
        """Where it may be."""
        return tuple(place.partition(":")[0] for place in self.places)


def probe(*places: str, check: Check | None = None, feature: Feature | tuple[Feature, ...] = ()) -> Probe:
    """A row of an adapter's table, see `Probe`."""
    return Probe(places, check, feature if isinstance(feature, tuple) else (feature,))


def without(*places: str) -> Probe:
    """A row of an adapter's table: none of these may be there."""
    return Probe(places, absent=True)


@dataclass(frozen=True)
class Place:
    """Where a name was found: `owner` has it as its attribute `attribute`."""

    owner: Any
    attribute: str
    value: Any


@dataclass(frozen=True)
class Missing:
    """A probe that does not hold, and why not."""

    probe: Probe
    why: str

    def __str__(self) -> str:
        return self.why


@dataclass
class Examined:
    """What `examine` found in the host."""

    probes: tuple[Probe, ...]
    places: dict[str, Place] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    @property
    def required(self) -> list[Missing]:
        """What is missing and cannot be done without."""
        return [each for each in self.missing if not each.probe.features]

    @property
    def lost(self) -> dict[Feature, list[Missing]]:
        """The features that something is missing for."""
        found: dict[Feature, list[Missing]] = {}
        for each in self.missing:
            for feature in each.probe.features:
                found.setdefault(feature, []).append(each)
        return found

    def has(self, feature: Feature) -> bool:
        """Whether nothing is missing for a feature."""
        return feature not in self.lost

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def __getitem__(self, name: str) -> Any:
        """What a probe found.

        Raises:
            KeyError: it does not hold, or there is none of this name.
        """
        return self.places[name].value

    def get(self, name: str, default: Any = None) -> Any:
        """What a probe found; else the default."""
        return self.places[name].value if name in self.places else default

    def place(self, name: str) -> Place:
        """Where a probe found it; see `__getitem__`."""
        return self.places[name]


def examine(probes: Iterable[Probe]) -> Examined:
    """Search the host for what an adapter relies on. Imports the host's modules, and changes nothing."""
    found = Examined(tuple(probes))
    for each in found.probes:
        place = _absent(each) if each.absent else _find(each)
        if isinstance(place, Missing):
            found.missing.append(place)
        elif place is not None:
            found.places[each.name] = place
    return found


def could_be(probes: Iterable[Probe]) -> bool:
    """Whether all modules that cannot be done without are there. Imports none of them: to import a module of a program
    that an adapter is not made for might change that program."""
    needed = (each for each in probes if not each.features)
    return all(each.absent != any(map(_is_there, each.modules)) for each in needed)


def _is_there(module: str) -> bool:
    if sys.modules.get(module) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _absent(row: Probe) -> Missing | None:
    there = next((each for each in row.places if not isinstance(_at(each), str)), None)
    return None if there is None else Missing(row, f"{_words(there)} is there, which is the mark of another program")


def _find(row: Probe) -> Place | Missing:
    why = []
    for each in row.places:
        place = _at(each)
        said = place if isinstance(place, str) else _checked(row, place)
        if said is None:
            assert isinstance(place, Place)
            return place
        why.append(said if isinstance(place, str) else f"{_words(each)} {said}")
    return Missing(row, one_line(", and ".join(why)))


def _checked(row: Probe, place: Place) -> str | None:
    if row.check is None:
        return None
    try:
        return row.check(place.value)
    except Exception as exc:
        return f"cannot be examined ({words_of(exc)})"


def _at(place: str) -> Place | str:
    """What is at a place, or why nothing is."""
    module, _, path = place.partition(":")
    if not _is_there(module):
        return f"there is no module {module}"
    try:
        value: Any = importlib.import_module(module)
    except (Exception, SystemExit) as exc:  # a module that is a script may end the program
        return f"the module {module} cannot be imported ({words_of(exc)})"
    owner, attribute, above = value, "", module
    for attribute in filter(None, path.split(".")):
        owner = value
        try:
            value = getattr(owner, attribute)
        except AttributeError:
            return f"{above} has no {attribute}"
        except Exception as exc:
            return f"{above}.{attribute} cannot be read ({words_of(exc)})"
        above = f"{above}.{attribute}"
    return Place(owner, attribute, value)


def _words(place: str) -> str:
    return place.replace(":", ".")


def passes(*names: str, later: Iterable[str] = ()) -> Check:
    """The check of a function that the host calls and the adapter wraps: its first parameters are these. A function of
    another extension's in its place may call them otherwise.

    Args:
        names: "" stands for a parameter of any name.
        later: parameters with these names are read too, wherever they are.
    """

    def check(function: Any) -> str | None:
        signature = _signature(function)
        if isinstance(signature, str) or signature is None:
            return signature
        kinds = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()) and len(kinds) < len(names):
            kinds = [*kinds, *([None] * (len(names) - len(kinds)))]  # type: ignore[list-item]
        if len(kinds) < len(names):
            return f"takes {_said(signature)}, not ({', '.join(names)}, ...)"
        if str(getattr(function, "__module__", "")).partition(".")[0] not in HOSTS_OWN:
            return None
        for name, parameter in zip(names, kinds):
            if name and parameter is not None and parameter.name != name:
                return f"takes {_said(signature)}, not ({', '.join(names)}, ...)"
        lacking = [name for name in later if name not in signature.parameters]
        return f"takes {_said(signature)}, without {', '.join(lacking)}" if lacking else None

    return check


def takes(*positional: str, **keywords: Any) -> Check:
    """The check of a function that the adapter calls: with so many arguments by position, and with these by name."""

    def check(function: Any) -> str | None:
        signature = _signature(function)
        if isinstance(signature, str) or signature is None:
            return signature
        try:
            signature.bind(*positional, **keywords)
        except TypeError:
            wanted = [*positional, *(f"{name}=" for name in keywords)]
            return f"takes {_said(signature)}, and not ({', '.join(wanted)})"
        return None

    return check


def has(*attributes: str) -> Check:
    """The check of an object, a class or a module: it has these attributes."""

    def check(value: Any) -> str | None:
        lacking = [each for each in attributes if not hasattr(value, each)]
        return f"has no {', '.join(lacking)}" if lacking else None

    return check


def refers_to(*names: str) -> Check:
    """The check of a function or of a class: code of the host's in it uses these names, of attributes or as text."""

    def check(value: Any) -> str | None:
        used = {name for code in _codes(value) for name in _names(code)}
        lacking = [each for each in names if each not in used]
        return f"does not use {', '.join(lacking)}" if used and lacking else None

    return check


def every(*checks: Check) -> Check:
    """All of these checks."""

    def check(value: Any) -> str | None:
        return next((said for each in checks if (said := each(value)) is not None), None)

    return check


def _signature(function: Any) -> inspect.Signature | str | None:
    """None if a function does not tell."""
    if not callable(function):
        return "is no function"
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _said(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


def _codes(value: Any) -> Iterator[CodeType]:
    kinds = [kind for kind in value.__mro__ if kind is not object] if isinstance(value, type) else []
    for each in [member for kind in kinds for member in vars(kind).values()] if kinds else [value]:
        function = inspect.unwrap(getattr(each, "__func__", each)) if callable(each) else each
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (each for each in constant if isinstance(each, str))
