"""Each pass is in the table, and has a test where it rewrites and one where it must not: this names what a new one
lacks. What each requires of the order is held by test_order.py."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

from sfast_ext import passes
from sfast_ext.passes import PASSES

ROOT = Path(__file__).parents[2]
PACKAGE = Path(passes.__file__).parent


def written(folder: Path) -> list[tuple[str, str]]:
    """The passes in a folder's files, as file and function: under the decorator `fusion`, or taking a graph module and
    a context."""
    found = []
    for file in sorted(folder.glob("*.py")):
        if file.stem == "__init__":
            continue
        for each in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                decorators = [ast.unparse(d.func) for d in each.decorator_list if isinstance(d, ast.Call)]
                takes = [a.annotation and ast.unparse(a.annotation) for a in each.args.args]
                if "fusion" in decorators or takes == ["fx.GraphModule", "PassContext"]:
                    found.append((file.stem, each.name))
    return found


def lacking(folder: Path, tests: Path, table: Collection[str]) -> list[str]:
    """What the passes in `folder` lack, in a sentence each.

    Args:
        tests: the folder of their tests.
        table: names of the passes that run.
    """
    told = []
    for file, name in written(folder):
        if name not in table:
            told.append(f"{name} never runs: add it to PASSES in sfast_ext/passes/__init__.py")
        test = tests / f"test_{file}.py"
        place = f"tests/passes/{test.name}"
        tree = ast.parse(test.read_text(encoding="utf-8") if test.is_file() else "")
        if name not in names_in(tree):
            told.append(f"{name} has no test: write {place}")
            continue
        counts = compared_with(tree)
        if not any(counts):
            told.append(f"{name} has no test where it rewrites, with the number of rewrites: add it to {place}")
        if 0 not in counts:
            told.append(f"{name} has no test where it must not rewrite, with 0 rewrites: add it to {place}")
    return told


def names_in(tree: ast.AST) -> set[str]:
    """What is imported or used by name."""
    imported = {n.name for n in ast.walk(tree) if isinstance(n, ast.alias)}
    return imported | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def compared_with(tree: ast.AST) -> set[int]:
    """The whole numbers that something is asserted to be equal to."""
    equal = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Eq)]
    constants = [c.value for n in equal for c in ast.walk(n.comparators[0]) if isinstance(c, ast.Constant)]
    return {value for value in constants if type(value) is int}


def test_no_pass_lacks_anything() -> None:
    told = lacking(PACKAGE, ROOT / "tests" / "passes", {entry.name for entry in PASSES})
    assert not told, "\n".join(told)


def test_every_entry_of_the_table_is_found() -> None:
    assert {entry.name for entry in PASSES} <= {name for _, name in written(PACKAGE)}
    assert all(entry.name == entry.function.__name__ for entry in PASSES)


DECORATED = "@fusion((aten.mul.Tensor,))\ndef quick_gelu(node, pinned, ctx): ...\n"
PLAIN = "def quick_gelu(gm: fx.GraphModule, ctx: PassContext) -> int: ...\n"
TEST = "def test_it():\n    assert traced.rewrite(quick_gelu) == 1\n"
LEFT = "def test_left_alone():\n    assert traced.rewrite(quick_gelu) == 0\n"


@pytest.mark.parametrize("source", [DECORATED, PLAIN])
def test_what_a_new_pass_lacks_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "quick_gelu.py").write_text(source, encoding="utf-8")
    assert [sentence.partition(":")[0] for sentence in lacking(tmp_path, tmp_path, ())] == [
        "quick_gelu never runs",
        "quick_gelu has no test",
    ]
    for test, left in (
        (TEST, ["quick_gelu has no test where it must not rewrite, with 0 rewrites"]),
        (LEFT, ["quick_gelu has no test where it rewrites, with the number of rewrites"]),
        (TEST + LEFT, []),
    ):
        (tmp_path / "test_quick_gelu.py").write_text(test, encoding="utf-8")
        told = lacking(tmp_path, tmp_path, {"quick_gelu"})
        assert [sentence.partition(":")[0] for sentence in told] == left
