"""What is printed or logged in a host, whose output may be in any code page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# the command line sees to its own output
FILES = [
    *(f for f in (ROOT / "sfast_ext").rglob("*.py") if "tools" not in f.parts and f.name != "cli.py"),
    *(ROOT / "scripts").glob("*.py"),
    ROOT / "install.py",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_text_is_ascii(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # docstrings, also those below a constant, are for readers of the code
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    bare = {id(node.value) for body in bodies for node in body if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare]
    assert [(n.lineno, n.value) for n in texts if isinstance(n.value, str) and not n.value.isascii()] == []
