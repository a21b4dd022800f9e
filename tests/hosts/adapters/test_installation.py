"""Installing all of it or nothing; the probes' checks; hosts that nobody knows."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hosts.standins.worlds import kinds, world_of
from sfast_ext import accelerator_of, hosts
from sfast_ext.hosts import starting
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.probes import Feature, could_be, every, examine, has, passes, probe, refers_to, takes, without

EXTRA = Feature("extra", "there is nothing extra")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A host of one module."""
    made = ModuleType("program")
    registered: list[Any] = []

    class Thing:
        def work(self, amount, *, quickly=False):
            return self.left - amount

    def register(callback):
        registered.append(callback)

    vars(made).update(
        Thing=Thing,
        add=lambda a, b: a + b,
        on_event=register,
        callback_map={"event": registered},
        broken=None,
    )
    monkeypatch.setitem(sys.modules, "program", made)
    return made


def installation(*probes: Any) -> tuple[Installation, list[Any]]:
    errors: list[Any] = []
    return Installation(examine(probes), lambda stage, exc: errors.append((stage, str(exc)))), errors


@pytest.mark.parametrize(
    ("check", "function", "said"),
    [
        (passes("model"), lambda model, info=None: 0, None),
        (passes("model"), lambda: 0, "takes (), not (model, ...)"),
        (passes("model", "info"), lambda model: 0, "takes (model), not (model, info, ...)"),
        (passes("model", "info"), lambda model, *rest: 0, None),
        (passes("model"), lambda *args, **more: 0, None),
        (passes(""), lambda anything: 0, None),
        (passes(), lambda: 0, None),
        (passes(), 3, "is no function"),
        # of another extension, which calls its parameters as it likes
        (passes("model"), lambda sd_model: 0, None),
        (takes("callback"), lambda callback, *, name=None: 0, None),
        (takes("callback"), lambda: 0, "takes (), and not (callback)"),
        (takes("callback"), lambda callback, filename: 0, "takes (callback, filename), and not (callback)"),
        (takes("a", section=None), lambda a, section=None: 0, None),
        (takes("a", section=None), lambda a: 0, "takes (a), and not (a, section=)"),
        (takes("a", section=None), lambda a, **more: 0, None),
        (takes("text"), print, None),
        (takes(), dict.fromkeys, "takes (iterable, value), and not ()"),
        (has("get"), {}, None),
        (has("get", "gets", "got"), {}, "has no gets, got"),
        (every(has("get"), has("got")), {}, "has no got"),
    ],
)
def test_a_check_says_what_is_not_as_it_should_be(check, function, said):
    assert check(function) == said


def in_its_own_code(function: Any) -> Any:
    function.__module__ = "modules.sd_models"
    return function


def test_the_names_of_parameters_count_in_the_host_s_own_code():
    assert passes("model")(in_its_own_code(lambda sd_model: 0)) == "takes (sd_model), not (model, ...)"
    assert passes("model", later=["full_load"])(in_its_own_code(lambda model: 0)) == "takes (model), without full_load"
    assert passes("model", later=["full_load"])(in_its_own_code(lambda model, *, full_load=False: 0)) is None
    # a wrapper of another extension that says what it wraps
    inner = in_its_own_code(lambda model: 0)
    assert passes("model")(functools.wraps(inner)(lambda *args: inner(*args))) is None


def test_names_that_code_uses_are_found_in_classes_closures_and_texts():
    class Base:
        def load(self):
            self.backup = {}

    class Patcher(Base):
        @property
        def size(self):
            return 1

        @staticmethod
        def helper(x):
            return [getattr(y, "marked", None) for y in x]

    assert refers_to("backup", "marked")(Patcher) is None
    assert refers_to("backup", "patches")(Patcher) == "does not use patches"
    assert refers_to("backup")(Base.load) is None
    assert refers_to("helper")(Base.load) == "does not use helper"
    # without code of Python nothing is known
    assert refers_to("backup")(len) is None


def test_the_first_place_that_holds_counts(program, monkeypatch):
    other = ModuleType("program_of_august")
    other.add = lambda a, b: a - b  # type: ignore[attr-defined]
    row = probe("program_of_august:add", "program:add", check=takes("a", "b"))
    assert examine([row])["add"](3, 1) == 4
    monkeypatch.setitem(sys.modules, "program_of_august", other)
    found = examine([row])
    assert found["add"](3, 1) == 2 and found.place("add").owner is other
    other.add = lambda a: a  # type: ignore[attr-defined]
    assert examine([row])["add"](3, 1) == 4
    del other.add, program.add
    (missing,) = examine([row]).missing
    assert str(missing) == "program_of_august has no add, and program has no add"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere:add", "there is no module nowhere"),
        ("program.nowhere:add", "there is no module program.nowhere"),
        ("program:Thing.play", "program.Thing has no play"),
        ("program:nothing.play", "program has no nothing"),
        ("program:broken.play", "program.broken has no play"),
    ],
)
def test_what_is_missing_is_named(program, place, said):
    (missing,) = examine([probe(place)]).missing
    assert str(missing) == said


def test_what_raises_when_it_is_looked_at_is_missing(program, tmp_path, monkeypatch):
    class Odd(ModuleType):
        @property
        def lazy(self):
            raise RuntimeError("not loaded yet")

    monkeypatch.setitem(sys.modules, "odd", Odd("odd"))
    (tmp_path / "half_installed.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "a_program.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def check(value):
        raise KeyError("unlike")

    rows = [probe("odd:lazy"), probe("half_installed:x"), probe("program:add", check=check), probe("a_program:x")]
    told = [str(each) for each in examine(rows).missing]
    assert told == [
        "odd.lazy cannot be read (RuntimeError: not loaded yet)",
        "the module half_installed cannot be imported "
        "(ModuleNotFoundError: No module named 'a_package_that_nobody_has')",
        "program.add cannot be examined (KeyError: 'unlike')",
        "the module a_program cannot be imported (SystemExit: 3)",
    ]


def test_no_module_of_another_program_is_imported(program, tmp_path, monkeypatch):
    (tmp_path / "changes_torch.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert could_be([probe("program:add"), probe("changes_torch:x")])
    assert not could_be([probe("program:add"), probe("changes_torch:x"), probe("nowhere:y")])
    assert could_be([probe("program:add"), probe("nowhere:y", feature=EXTRA)])
    assert not could_be([without("program")]) and could_be([without("nowhere")])


def test_steps_are_undone_in_reverse_and_a_wrapper_of_another_s_stays_harmless(program):
    host, errors = installation(probe("program:add"), probe("program:on_event"), probe("program:Thing.work"))
    original, seen = program.add, []
    host.wrap("add", lambda inner, a, b: inner(a, b) + 100)
    host.add(lambda: seen.append("first"))
    host.add(lambda: seen.append("second"))
    host.callback("on_event", lambda: 5, empty=7)
    assert program.add(1, 2) == 103
    ours = program.add
    program.add = lambda a, b: ours(a, b) * 2
    (callback,) = program.callback_map["event"]
    assert callback() == 5
    host.undo()
    assert seen == ["second", "first"] and program.add(1, 2) == 6 and errors == []
    # the host forgets it when it unloads its scripts
    assert program.callback_map["event"] == [callback] and callback() == 7
    assert program.Thing.work is not None and original(1, 2) == 3


def test_a_failed_installation_takes_callbacks_out_of_all_lists(program):
    host, _ = installation(probe("program:on_event"))
    program.callback_map["event"].append("another's")
    host.callback("on_event", lambda: None)
    host.fail()
    assert program.callback_map["event"] == ["another's"]


def test_entries_that_hold_a_callback_are_found_and_a_host_s_own_removal_is_used(program):
    removed = []
    program.on_event = lambda callback: program.callback_map["event"].append(SimpleNamespace(callback=callback))
    program.remove_callbacks_for_function = removed.append
    host, _ = installation(probe("program:on_event"))
    host.callback("on_event", lambda: None)
    host.fail()
    assert len(removed) == 1 and program.callback_map["event"] == []


def test_a_callback_of_a_registrar_that_raises_late_is_taken_away(program):
    def register(callback):
        program.callback_map["event"].append(callback)
        raise RuntimeError("too late")

    program.on_event = register
    host, _ = installation(probe("program:on_event"))
    with pytest.raises(RuntimeError, match="too late"):
        host.callback("on_event", lambda: None)
    host.fail()
    assert program.callback_map["event"] == []


def test_a_feature_is_lost_alone_when_a_step_of_it_raises(program):
    host, errors = installation(probe("program:add"), probe("program:Thing.work", feature=EXTRA))
    before, method = program.add, program.Thing.work
    host.wrap("add", lambda inner, a, b: inner(a, b))
    ours = program.add

    def steps():
        host.wrap("Thing.work", lambda inner, *args, **more: 0)
        assert program.Thing.work is not method
        raise ValueError("half way")

    assert not host.feature(EXTRA, steps)
    assert program.Thing.work is method and program.add is ours and host.lost == {EXTRA: "ValueError: half way"}
    # it is not tried again
    assert not host.feature(EXTRA, lambda: pytest.fail("taken"))
    host.undo()
    assert program.add is before and errors == []


def test_a_feature_without_a_name_is_not_begun(program):
    host, _ = installation(probe("program:add"), probe("program:nothing", feature=EXTRA))
    assert not host.feature(EXTRA, lambda: pytest.fail("begun"))
    assert host.lost == {EXTRA: "program has no nothing"}


def test_what_cannot_be_undone_does_not_keep_the_rest(program):
    host, errors = installation(probe("program:add"))
    original = program.add
    host.wrap("add", lambda inner, a, b: 0)

    def fails():
        raise OSError("gone")

    host.add(fails)
    host.fail()
    assert program.add is original and errors == [("undo", "gone")]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_a_renamed_program_gets_the_nearest_adapter_if_its_probes_hold(kind, monkeypatch, capsys):
    for each in kinds():
        monkeypatch.setattr(each, "is_host", classmethod(lambda cls: False))
    with world_of(kind) as world:
        hosts.start("0")
        assert isinstance(kind.running, kind) and type(kind.running) is kind
        assert "does nothing" not in capsys.readouterr().out
        (remark,) = kind.running.remarks()
        assert remark == f"this WebUI is not known; it is served as {kind.HOST}, and was not tested by us"
        world.load()
        with torch.no_grad():
            world.make()
        assert accelerator_of(world.unet()) is not None


def test_a_known_program_that_became_another_is_served_as_that(monkeypatch, capsys):
    """A Forge Neo that has what Forge Classic has, and nothing of Forge Neo's own."""
    (kind,) = [each for each in kinds() if each.__name__ == "ClassicSession"]
    with world_of(kind):
        monkeypatch.setattr(sys.modules["modules_forge.forge_version"], "version", "neo")
        hosts.start("0")
        assert kind.running is not None and "does nothing" not in capsys.readouterr().out
        assert kind.running.remarks()[0].startswith("this WebUI is not known; it is served as Forge Classic")


def test_other_programs_probes_are_not_examined_in_a_known_one(monkeypatch):
    examined = []
    monkeypatch.setattr(starting, "examine", lambda probes: examined.append(probes) or examine(probes))
    for kind in kinds():
        with world_of(kind):
            examined.clear()
            hosts.start("0")
            assert examined == [kind.PROBES]


def test_a_program_of_another_family_is_left_alone(monkeypatch, capsys):
    for name in ("modules", "modules.shared", "modules.script_callbacks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert hosts.start("1.2") is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Stable Fast 1.2 does nothing: this WebUI is not known; AUTOMATIC1111 WebUI, SD.Next, ")
    assert all(kind.running is None for kind in kinds())
