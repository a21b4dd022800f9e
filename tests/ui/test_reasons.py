"""The reasons that code can give, the table of their entries, and the page of those entries: three lists that agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sfast_ext.ui import reasons

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sfast_ext"
PAGE = ROOT / "docs" / "troubleshooting.md"
RAISED = {"NotOurs", "CaptureRefused", "WeightsAway"}
"""Exceptions whose text becomes a reason."""
CALLED = {"bypassed", "reject"}
"""Methods whose last argument is one."""
GIVES_REASONS = re.compile(
    r"bypass_reason|_offload_reason|unserved|verify_plan|too_inaccurate|unexplained|too_slow|^active$|functionalize"
    r"|^obstacle$|^_named$|^_replaced$|^layer_reason$"
)
"""Functions that return one."""
TABLES = ("PIPELINES", "COMPILED")
"""Tables of texts that become a part of one."""
MENTION = re.compile(
    "|".join((*RAISED, *CALLED, *TABLES, "def words", re.sub(r"\^(\w+)\$", r"def \1", GIVES_REASONS.pattern)))
)
"""What a file with a reason has somewhere: most files need not be parsed, which each worker would do at its start."""
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if not {"tools", "ui"} & set(p.relative_to(PACKAGE).parts)]


def texts(node: ast.AST, names: dict[str, ast.AST]) -> list[str]:
    """What an expression of texts can be, with a word for each value that is put in."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            values = ["thing"]
            if isinstance(part, ast.Constant):
                values = [part.value]
            elif isinstance(part, ast.FormattedValue) and ast.unparse(part.value) in names:
                values = texts(names[ast.unparse(part.value)], {}) or values
            found = [before + value for before in found for value in values]
        return found
    if isinstance(node, ast.IfExp):
        return texts(node.body, names) + texts(node.orelse, names)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in texts(value, names)]
    if isinstance(node, ast.BinOp):
        return [a + b for a in texts(node.left, names) for b in texts(node.right, names)]
    if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names:
        name = ast.unparse(node)
        return texts(names[name], {other: value for other, value in names.items() if other != name})
    return []


def reasons_in(file: Path) -> Iterator[tuple[str, str]]:
    """Place and text of each reason that a file can give."""
    source = file.read_text(encoding="utf-8")
    for top in ast.walk(ast.parse(source)) if MENTION.search(source) else ():
        if isinstance(top, ast.Assign) and getattr(top.targets[0], "id", "") in TABLES:
            for each in ast.walk(top.value):
                if isinstance(each, ast.Constant) and len(str(each.value)) > 12:
                    yield f"{file.name}:{each.lineno}", each.value
        if not isinstance(top, (ast.FunctionDef, ast.Module)):
            continue
        names: dict[str, ast.AST] | None = None
        for node in ast.walk(top) if isinstance(top, ast.FunctionDef) else ():
            given: list[ast.AST] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                given = list(node.args[-1:]) if name in CALLED or name in RAISED else []
            elif isinstance(node, ast.Return) and node.value is not None:
                patch = file.name in ("foreign_code.py", "values.py") and top.name == "words"
                given = [node.value] if patch or GIVES_REASONS.search(top.name) else []
            if given and names is None:
                names = {ast.unparse(n.targets[0]): n.value for n in ast.walk(top) if isinstance(n, ast.Assign)}
            for each in given:
                for text in texts(each, names or {}):
                    yield f"{file.name}:{node.lineno}", text


FOUND = [found for file in FILES for found in reasons_in(file)]


def anchors(page: str) -> list[str]:
    return re.findall(r'^<a id="([a-z0-9-]+)"></a>$', page, re.MULTILINE)


def test_the_reasons_of_the_code_are_found():
    # fewer would mean that this test looks in the wrong places
    assert len({text for _, text in FOUND}) > 55
    told = " | ".join(text for _, text in FOUND)
    for part in (
        "a hypernetwork is active",
        "has no UNet",
        "its plan differs",
        "on the meta device",
        "HyperTile draws",
    ):
        assert part in told


@pytest.mark.parametrize(("place", "text"), sorted(set(FOUND)), ids=lambda value: str(value)[:60])
def test_each_reason_of_the_code_has_an_entry(place, text):
    assert reasons.code_of(text) != reasons.OTHER, f"{place} gives a reason without an entry: {text}"


def test_each_entry_of_the_table_explains_a_reason_of_the_code():
    given = {reasons.code_of(text) for _, text in FOUND}
    # the report itself has the text of the last one
    assert {code for code, _ in reasons.TABLE} - given == {"many-reasons"}
    assert reasons.code_of("(further reasons)") == "many-reasons"


def test_the_page_has_each_entry_once():
    page = anchors(PAGE.read_text(encoding="utf-8"))
    assert len(page) == len(set(page))
    codes = [code for code, _ in reasons.TABLE]
    assert not [code for code in (*codes, reasons.OTHER) if code not in page]


def test_what_nobody_knows_has_an_entry_too():
    assert reasons.code_of("<img onerror=alert(1)>") == reasons.OTHER
