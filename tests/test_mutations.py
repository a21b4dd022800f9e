"""The list of mutations cannot rot: each source line is there once, each mutant is Python, each test exists."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from mutations import ROOT, Mutation, every
from mutations import __main__ as runner
from mutations.__main__ import BROKEN, NOTICED, SURVIVED

MUTATIONS = every()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}: {m.what}")
def test_it_can_be_made_and_its_tests_exist(mutation: Mutation) -> None:
    assert ast.dump(ast.parse(mutation.mutated())) != _dumped(ROOT / "sfast_ext" / mutation.file)
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in _functions(ROOT / "tests" / file)


@functools.lru_cache(maxsize=None)
def _dumped(file: Path) -> str:
    return ast.dump(ast.parse(file.read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=None)
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(f.name for f in tree.body if isinstance(f, ast.FunctionDef))


def test_each_takes_away_something_else() -> None:
    assert len(MUTATIONS) >= 40
    assert len({m.what for m in MUTATIONS}) == len({(m.file, m.mutant, m.source) for m in MUTATIONS}) == len(MUTATIONS)


def test_a_source_that_is_gone_or_there_twice_is_told(tmp_path) -> None:
    (tmp_path / "sfast_ext").mkdir()
    (tmp_path / "sfast_ext" / "a.py").write_text("x = 1\nx = 1\n")
    for source in ("x = 1", "y = 1"):
        with pytest.raises(ValueError, match="times"):
            Mutation("one", "a.py", source, "x = 2", ()).mutated(tmp_path)


FOUND = [(0, SURVIVED), (1, NOTICED), (None, NOTICED), (2, BROKEN), (5, BROKEN)]


@pytest.mark.parametrize(("status", "expected"), FOUND)
def test_what_becomes_of_a_mutation_is_told_and_the_file_is_as_before(status, expected, tmp_path, monkeypatch) -> None:
    (tmp_path / "sfast_ext").mkdir()
    file = tmp_path / "sfast_ext" / "a.py"
    file.write_text("x = 1\n")
    found = []

    def tests_pass(root, tests):
        found.append((root, tests, file.read_text()))
        return status, "said"

    monkeypatch.setattr(runner, "tests_pass", tests_pass)
    mutation = Mutation("one", "a.py", "x = 1", "x = 2", ("test_a.py::test_f",))
    assert runner.verdict(tmp_path, mutation) == (expected, "said")
    assert found == [(tmp_path, mutation.tests, "x = 2\n")] and file.read_text() == "x = 1\n"
