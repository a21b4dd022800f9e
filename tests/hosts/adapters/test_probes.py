"""Each name of a host's that an adapter relies on, taken away in turn: by its table, so no row is without a test."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from hosts.standins.worlds import WORLDS, World, kinds, world_of
from sfast_ext import accelerator_of, hosts
from sfast_ext.hosts.a1111.probes import LORA
from sfast_ext.hosts.probes import Probe, examine
from sfast_ext.hosts.session import Session

ROWS = [(kind, row) for kind in kinds() for row in dict.fromkeys(kind.PROBES)]


FIRST = {row: kind for kind, row in reversed(ROWS)}
# another test has those that must not be there; a row of several programs is long in all but the first
CASES = [
    pytest.param(kind, row, "gone", marks=() if FIRST[row] is kind else pytest.mark.long)
    for kind, row in ROWS
    if not row.absent
]
# of some nothing but the name is relied on; the same check of several programs gives the same reason
CHECKED = {row: kind for kind, row in ROWS if row.check is not None and not row.absent}
CASES += [pytest.param(kind, row, "unlike") for row, kind in CHECKED.items()]


def named(value: Any) -> str:
    if isinstance(value, str):
        return value
    return value.__name__ if isinstance(value, type) else "-".join((value.name, *(f.name for f in value.features)))


def merged(kind: type[Session], row: Probe) -> set[Any]:
    """What is lost without a name, by all rows of it; nothing if it is required."""
    rows = [each for each in kind.PROBES if each.name == row.name]
    return set() if any(not each.features for each in rows) else {f for each in rows for f in each.features}


class Patched:
    """Names of the host's that a test has replaced."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    def at(self, place: str) -> tuple[Any, str, Any] | None:
        """Owner, attribute and value; for a module the modules of Python, its name and itself."""
        module, _, path = place.partition(":")
        try:
            owner: Any = importlib.import_module(module)
        except ImportError:
            return None
        if not path:
            return sys.modules, module, owner
        *above, attribute = path.split(".")
        owner = functools.reduce(getattr, above, owner)
        return (owner, attribute, getattr(owner, attribute)) if hasattr(owner, attribute) else None

    def replace(self, row: Probe, value: Callable[[Any], Any]) -> bool:
        """Put something in the place of what a row is about, made of what is there. Whether anything was."""
        found = [there for place in row.places if (there := self.at(place)) is not None]
        for owner, attribute, there in found:
            new = value(there)
            if owner is sys.modules:
                self._patch.setitem(sys.modules, attribute, new)
                package, _, last = attribute.rpartition(".")
                if package and new is not None:
                    self._patch.setattr(sys.modules[package], last, new)
                elif package:
                    self._patch.delattr(sys.modules[package], last, raising=False)
            elif new is GONE:
                delattr_of(self._patch, owner, attribute)
            else:
                self._patch.setattr(owner, attribute, new)
        return bool(found)

    def undo(self) -> None:
        self._patch.undo()


GONE = object()


def delattr_of(patch: pytest.MonkeyPatch, owner: Any, attribute: str) -> None:
    """Also of an object of a class that answers for every name."""
    patch.delattr(owner, attribute)


def gone(there: Any) -> Any:
    return None if isinstance(there, ModuleType) else GONE


def unlike(row: Probe) -> Callable[[Any], Any]:
    """Makes what fails the check of a row."""

    def replaced(there: Any) -> Any:
        if isinstance(there, ModuleType):
            return ModuleType(there.__name__)
        others = (lambda: None, lambda a, b, c, d, e, f: None, object(), type("Another", (), {"__call__": lambda s: 0}))
        return next(each for each in others if row.check is not None and row.check(each) is not None)

    return replaced


def raising(there: Any) -> Any:
    """A function of the same parameters that raises. One that was wrapped is not told from one that was not."""

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("changed by an update")

    raises.__signature__ = inspect.signature(there)  # type: ignore[attr-defined]
    return raises


def snapshot(world: World) -> dict[Any, Any]:
    """All that the extension could have changed: names of the host's, its callbacks, its settings, logs, PNG."""
    tops = ("modules", "modules_forge", "backend", "ldm_patched", "installer", "networks", "accelerate")
    found: dict[Any, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in tops or not isinstance(module, ModuleType):
            continue
        if name.startswith("accelerate") and name != "accelerate":
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, ModuleType) or attribute.startswith("__"):
                continue  # imported meanwhile
            found[name, attribute] = value
            if isinstance(value, type):
                found.update({(name, attribute, inner): each for inner, each in list(vars(value).items())})
    for name, registered in world.callbacks.items():
        found["callbacks", name] = list(registered)
    log = logging.getLogger("sfast_ext")
    found["log"] = [*log.handlers], log.propagate, log.parent, log.level, logging.getLogger("sd").filters[:]
    Image.init()
    found["png"] = Image.SAVE["PNG"]
    options = getattr(sys.modules.get("modules.shared"), "opts", None)
    for kept in ("data", "data_labels"):
        found[kept] = set(getattr(options, kept, ()))
    return found


def changes(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    modules = {key[0] for key in before if isinstance(key, tuple)}
    known = {key: value for key, value in after.items() if not isinstance(key, tuple) or key[0] in modules}
    names = [key for key in {**before, **known} if not _same(before.get(key), known.get(key))]
    # the way to ask why
    return [key for key in names if key != ("callbacks", "app_started")]


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (list, set, tuple)) and not callable(a) and type(a) is type(b) and _equal(a, b))


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False


@functools.lru_cache(maxsize=None)
def stock(kind: type[Session]) -> torch.Tensor:
    """The image of the host alone."""
    with world_of(kind) as world:
        world.load()
        return world.make()


Change = Callable[[], Any]
"""Makes the image of the host alone, with the same change."""


def alone(kind: type[Session], row: Probe, value: Callable[[Any], Any]) -> Any:
    with changed(kind, row, value, again=True) as world:
        return made(world)


@contextmanager
def changed(kind: type[Session], row: Probe, value: Callable[[Any], Any], again: bool = False) -> Iterator[World]:
    """A host in which a name is another, or has gone; `again` if a class of the stand-in may have lost it already."""
    stock(kind)
    patched = Patched()
    with world_of(kind) as world:
        try:
            assert patched.replace(row, value) or again, f"the stand-in has no {row.name}"
            yield world
        finally:
            for each in kinds():
                each.stop()
            patched.undo()


def started(capsys: Any, caplog: Any) -> list[str]:
    """Start as the host does; the lines that it wrote."""
    capsys.readouterr()
    caplog.clear()
    with caplog.at_level("INFO", "sfast_ext"):
        hosts.start("0.0")
    logged = [r.getMessage() for r in caplog.records if r.name == "sfast_ext" and r.levelno >= logging.INFO]
    return list(dict.fromkeys([*capsys.readouterr().out.splitlines(), *logged]))


def running() -> Session | None:
    return next((kind.running for kind in kinds() if kind.running is not None), None)


def made(world: World) -> torch.Tensor | type[BaseException]:
    """The image, or what the host raises for want of the name itself."""
    try:
        world.load()
        return world.make()
    except Exception as exc:
        return type(exc)


def image_is_the_host_s_own(kind: type[Session], world: World, without: Change) -> None:
    image = made(world)
    if isinstance(image, type):
        assert image is without()
    else:
        assert torch.equal(image, stock(kind)), "another image"
        assert accelerator_of(world.unet()) is None and "forward" not in vars(world.unet())


def image_is_accelerated(kind: type[Session], world: World, without: Change) -> None:
    image = made(world)
    if isinstance(image, type):
        assert image is without()
    else:
        torch.testing.assert_close(image, stock(kind), rtol=1e-3, atol=1e-3)
        assert accelerator_of(world.unet()) is not None


def test_every_kind_of_session_has_a_stand_in():
    assert {kind.__name__ for kind in kinds()} == set(WORLDS)


@pytest.mark.parametrize("kind", kinds(), ids=named)
def test_a_stand_in_has_all_that_is_relied_on_and_is_left_as_it_was(kind, capsys, caplog):
    stock(kind)
    with world_of(kind) as world:
        before = snapshot(world)
        assert not examine(kind.PROBES).missing
        assert changes(before, snapshot(world)) == []
        (line,) = started(capsys, caplog)
        assert "does nothing" not in line and isinstance(running(), kind)
        image_is_accelerated(kind, world, lambda: None)


def lost_alone(kind: type[Session], row: Probe, world: World, lines: list[str], without: Change | None) -> None:
    """Check that what a name is for is lost, and nothing else; with an image if it is told what the host does alone."""
    session = running()
    assert session is not None and type(session) is kind
    assert set(session.installation.lost) == merged(kind, row), session.installation.lost
    for feature in session.installation.lost:
        (line,) = [each for each in lines if feature.lost in each]
        assert line in [f"Stable Fast: {each}" for each in session.lost()]
    assert len(lines) == 1 + len(merged(kind, row)), lines
    told = session.status()["host"]["remarks"]
    assert told[len(told) - len(session.lost()) :] == session.lost()
    if without is not None:
        image_is_accelerated(kind, world, without)


def nothing_stays(
    kind: type[Session], before: dict[Any, Any], world: World, lines: list[str], without: Change
) -> None:
    """Check that the host is as it was, and that one line says why."""
    assert running() is None
    assert changes(before, snapshot(world)) == []
    (line,) = [each for each in lines if "does nothing" in each]
    assert lines == [line]
    image_is_the_host_s_own(kind, world, without)


@pytest.mark.parametrize(("kind", "row", "how"), CASES, ids=named)
def test_without_a_name_its_feature_is_lost_or_nothing_stays(kind, row, how, capsys, caplog):
    value = gone if how == "gone" else unlike(row)
    with changed(kind, row, value) as world:
        before = snapshot(world)
        lines = started(capsys, caplog)
        if merged(kind, row):
            # once for each name, also of several programs: a plan takes most of the time
            imaged = how == "gone" and FIRST[row] is kind
            lost_alone(kind, row, world, lines, (lambda: alone(kind, row, value)) if imaged else None)
        else:
            nothing_stays(kind, before, world, lines, lambda: alone(kind, row, value))
            assert row.name.rpartition(".")[2] in lines[0]


@pytest.mark.parametrize(("kind", "row"), [each for each in ROWS if each[1].absent], ids=named)
def test_the_mark_of_another_program_is_heeded(kind, row, capsys, caplog, monkeypatch):
    stock(kind)
    with world_of(kind) as world:
        for place in row.places:
            monkeypatch.setitem(sys.modules, place, ModuleType(place))
        before = snapshot(world)
        assert [each.probe for each in examine(kind.PROBES).required] == [row]
        nothing_stays(kind, before, world, started(capsys, caplog), lambda: None)


CALLED = [
    (kind, row)
    for kind, row in ROWS
    if row.name.startswith("on_") or row.name in ("OptionInfo", "git_tag")
]
"""What is called while the extension is installed."""


@pytest.mark.parametrize(("kind", "row"), CALLED, ids=named)
def test_with_a_function_that_raises_its_feature_is_lost_or_nothing_stays(kind, row, capsys, caplog):
    value = raising
    with changed(kind, row, value) as world:
        before = snapshot(world)
        lines = started(capsys, caplog)
        if merged(kind, row):
            lost_alone(kind, row, world, lines, (lambda: alone(kind, row, value)) if FIRST[row] is kind else None)
        else:
            nothing_stays(kind, before, world, lines, lambda: alone(kind, row, value))
            assert "changed by an update" in lines[0]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("kind", kinds(), ids=named)
def test_settings_that_are_refused_half_way_do_not_stay(kind, after, capsys, caplog, monkeypatch):
    stock(kind)
    with world_of(kind) as world:
        options, left = world.opts, [after]
        register = options.add_option

        def add_option(*args: Any, **more: Any) -> Any:
            if not left[0]:
                raise RuntimeError("settings are frozen")
            left[0] -= 1
            return register(*args, **more)

        before = snapshot(world)
        monkeypatch.setattr(type(options), "add_option", staticmethod(add_option))
        lines = started(capsys, caplog)
        monkeypatch.undo()
        nothing_stays(kind, before, world, lines, lambda: None)
        assert "settings are frozen" in lines[0]


@pytest.mark.parametrize(
    ("row", "how"),
    [(row, how) for row in LORA for how in ("gone", "unlike") if how == "gone" or row.check is not None],
    ids=named,
)
def test_a_lora_that_is_not_applied_as_known_is_never_ignored(row, how, monkeypatch):
    """A plan does not call the layers' forwards, in which it is applied."""
    standin = importlib.import_module("hosts.standins.a1111")
    (kind,) = [each for each in kinds() if each.__name__ == "A1111Session"]
    with standin.running() as host:
        host.load(1)
        host.lora(a=1.0)
        expected = host.generate()
    with standin.running(sfast_allow_cpu=True) as host:
        known = ModuleType("networks")
        vars(known).update(vars(host.networks))
        if how == "gone":
            del vars(known)[row.name]
        else:
            vars(known)[row.name] = unlike(row)(None)
        monkeypatch.setitem(sys.modules, "networks", known)
        hosts.start("0")
        host.load(1)
        host.lora(a=1.0)
        assert torch.equal(host.generate(), expected)
        assert kind.running is not None
        (reason,) = kind.running.status()["reasons"]
        assert reason.startswith("the extension Lora works in a way that is not known: networks") and row.name in reason
        kind.stop()


def test_the_marks_of_lora_are_read_in_its_own_code():
    def network_apply_weights(layer):
        return layer.network_layer_name, layer.other_names

    (row,) = [each for each in LORA if each.check is not None]
    assert row.check is not None and row.check(network_apply_weights) is None
    network_apply_weights.__module__ = "networks"
    assert row.check(network_apply_weights) == "does not use network_current_names"
