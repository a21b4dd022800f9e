"""The runner of `make mutations`, on files of its own. The list itself is checked by that command."""

from __future__ import annotations

import re

import pytest
from conftest import LONG
from mutations import Mutation, every
from mutations import __main__ as runner
from mutations.__main__ import BROKEN, NOTICED, SURVIVED


def package(tmp_path, text: str):
    (tmp_path / "sfast_ext").mkdir()
    file = tmp_path / "sfast_ext" / "a.py"
    file.write_text(text)
    return file


def test_a_source_that_is_gone_or_there_twice_is_told(tmp_path) -> None:
    package(tmp_path, "x = 1\nx = 1\n")
    for source in ("x = 1", "y = 1"):
        with pytest.raises(ValueError, match="times"):
            Mutation("one", "a.py", source, "x = 2", ()).mutated(tmp_path)


FORMATS = [
    "if ready(a, b) and not c:\n    go()\n",
    "if ready( a,b ) and not c:\n        go()\n",
    "if (\n    ready(\n        a, b) and\n    not c\n):\n    go()\n",
]


@pytest.mark.parametrize("text", FORMATS)
def test_white_space_and_line_breaks_do_not_count(text, tmp_path) -> None:
    package(tmp_path, text)
    mutated = Mutation("one", "a.py", "ready(a, b) and not c", "True", ()).mutated(tmp_path)
    assert "ready" not in mutated and mutated.count("True") == 1 and mutated.count("go()") == 1
    compile(mutated, "a.py", "exec")


def test_a_part_of_a_word_is_not_found(tmp_path) -> None:
    package(tmp_path, "ready_too = already = 1\n")
    with pytest.raises(ValueError, match="0 times"):
        Mutation("one", "a.py", "ready", "x", ()).mutated(tmp_path)


def test_each_has_a_test_that_is_not_long(pytestconfig) -> None:
    """Among those that are collected with this one: in `make test` all."""
    cases: dict[str, list[bool]] = {}
    for id, long in pytestconfig.stash[LONG].items():
        for test in {id, id.partition("[")[0]}:
            cases.setdefault(test.removeprefix("tests/"), []).append(long)
    for mutation in every():
        collected = [long for test in mutation.tests for long in cases.get(test, [])]
        assert not collected or not all(collected), f"{mutation.file}: {mutation.what}"


WRONG = [
    (Mutation("one", "a.py", "y", "z", ("test_a.py::test_f",)), "0 times"),
    (Mutation("one", "b.py", "y", "z", ("test_a.py::test_f",)), "b.py"),
    (Mutation("one", "a.py", "x", "(", ("test_a.py::test_f",)), "never closed|invalid syntax|unexpected EOF"),
    (Mutation("one", "a.py", "x", " x", ("test_a.py::test_f",)), "same program"),
    (Mutation("one", "a.py", "x", "z", ("test_a.py::test_g[1]",)), "there is no test_a.py::test_g"),
    (Mutation("one", "a.py", "x", "z", ()), "there is no no test"),
]


@pytest.mark.parametrize(("mutation", "said"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_with_the_list_is_told(mutation, said, tmp_path, monkeypatch) -> None:
    package(tmp_path, "x = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_f():\n    pass\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr("mutations.ROOT", tmp_path)
    monkeypatch.setattr(Mutation.mutated, "__defaults__", (tmp_path,))
    (found,) = runner.misfits([mutation])
    assert re.search(said, found)
    assert runner.misfits([Mutation("one", "a.py", "x", "z", ("test_a.py::test_f[a]",))]) == []


FOUND = [(0, SURVIVED), (1, NOTICED), (None, NOTICED), (2, BROKEN), (5, BROKEN)]


@pytest.mark.parametrize(("status", "expected"), FOUND)
def test_what_becomes_of_a_mutation_is_told_and_the_file_is_as_before(status, expected, tmp_path, monkeypatch) -> None:
    file = package(tmp_path, "x = 1\n")
    found = []

    def tests_pass(root, tests):
        found.append((root, tests, file.read_text()))
        return status, "said"

    monkeypatch.setattr(runner, "tests_pass", tests_pass)
    mutation = Mutation("one", "a.py", "x = 1", "x = 2", ("test_a.py::test_f",))
    assert runner.verdict(tmp_path, mutation) == (expected, "said")
    assert found == [(tmp_path, mutation.tests, "x = 2\n")] and file.read_text() == "x = 1\n"
