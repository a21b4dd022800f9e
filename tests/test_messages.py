"""What is printed or logged in a host, whose output may be in any code page."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# the command line sees to its own output
FILES = [
    *(f for f in (ROOT / "sfast_ext").rglob("*.py") if not {"tools", "cli"} & {*f.parts}),
    *(ROOT / "scripts").glob("*.py"),
    ROOT / "install.py",
]


def texts(tree: ast.Module) -> list[ast.Constant]:
    """The constants of a file but for docstrings, which are for readers of the code."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    bare = {id(node.value) for body in bodies for node in body if isinstance(node, ast.Expr)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare]


def test_texts_are_ascii():
    found = []
    for file in FILES:
        constants = texts(ast.parse(file.read_text(encoding="utf-8")))
        values = [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]
        found += [f"{file.relative_to(ROOT)}:{line} {value!r}" for line, value in values if not value.isascii()]
    assert not found, "\n".join(found)
