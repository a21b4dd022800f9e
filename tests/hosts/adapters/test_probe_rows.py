"""The tables of probes: every import of a host's module has a row, names are told apart, and sentences can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts.standins.worlds import kinds
from sfast_ext.hosts.probes import HOSTS_OWN
from sfast_ext.ui.bug_report import without_paths

HOSTS = Path(__file__).parents[3] / "sfast_ext" / "hosts"
PLACES = {place for kind in kinds() for row in kind.PROBES for place in row.places}


def imports(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of what a file imports of a host's packages; no name for a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in HOSTS_OWN:
            for each in node.names:
                yield node.lineno, node.module, each.name
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in HOSTS_OWN:
                    yield node.lineno, each.name, ""


def has_row(module: str, name: str) -> bool:
    """Whether a row is about an import, or about something in the module that is imported."""
    inner = f"{module}.{name}" if name else module
    return f"{module}:{name}" in PLACES or any(place.partition(":")[0] == inner for place in PLACES)


IMPORTS = [(file, *each) for file in sorted(HOSTS.rglob("*.py")) for each in imports(file)]


@pytest.mark.parametrize(
    ("file", "line", "module", "name"), IMPORTS, ids=[f"{f.parent.name}-{f.stem}-{m}.{n}" for f, _, m, n in IMPORTS]
)
def test_an_import_of_a_host_s_module_has_a_row(file, line, module, name):
    assert has_row(module, name), f"{file}:{line}: no probe for {module}.{name}"


def test_an_import_without_a_row_is_noticed(tmp_path):
    file = tmp_path / "adapter.py"
    file.write_text("def f():\n    from modules import sd_vae, shared\n    import backend.loader\n", encoding="utf-8")
    found = list(imports(file))
    assert found == [(2, "modules", "sd_vae"), (2, "modules", "shared"), (3, "backend.loader", "")]
    assert [has_row(module, name) for _, module, name in found] == [False, True, False]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_a_name_stands_for_one_thing(kind):
    places: dict[str, tuple[str, ...]] = {}
    for row in kind.PROBES:
        assert places.setdefault(row.name, row.places) == row.places, row.name
        assert all(" " not in place and place.count(":") <= 1 for place in row.places)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_what_is_lost_is_a_sentence_without_a_stop(kind):
    features = {feature for row in kind.PROBES for feature in row.features}
    assert len({feature.name for feature in features}) == len(features)
    for feature in features:
        assert feature.lost == feature.lost.strip() and feature.lost[-1] not in ".:;"
        assert " " in feature.lost and feature.lost.isascii() and without_paths(feature.lost) == feature.lost
