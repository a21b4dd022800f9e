"""The rooms of `sfast_ext` in docs/architecture.md, and the imports between them.

The table of that page is the rule. A room is a folder, or a set of files. A file belongs to the most specific entry
that names it. What counts as an import:

- Every `import` statement, also in a function and under `TYPE_CHECKING`, and `importlib.import_module` of a literal. A
  name that is put together at run time is not seen.
- `from a.b import c` imports the file a/b/c.py if there is one, and otherwise the file that defines `c`: a/b.py or
  a/b/__init__.py.
- Python also runs the `__init__` of each package above an imported file. That is no import by this rule. So an
  `__init__` may import its submodules, and they may import each other. It is a circle if one of them imports a name
  that the `__init__` defines.

Any room may import Python's library and torch. Another package needs to be named in the room's row.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
HEAD = ["room", "files", "holds", "may import"]
ANYBODYS = frozenset({*sys.stdlib_module_names, "torch"})


class Room(NamedTuple):
    """A row of the table. `entries` are files, and folders with a slash at their end; `may` are rooms and packages."""

    name: str
    entries: tuple[str, ...]
    may: frozenset[str]


class Import(NamedTuple):
    """`source` and `target` are files, relative to the package; a target outside of it is the name of a package."""

    source: str
    line: int
    target: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.text}"


def rooms_of(page: str) -> list[Room]:
    """The table of rooms in a page."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line[:1] == "|"]
    start = rows.index(HEAD) + 2
    found = []
    for row in rows[start:]:
        if len(row) != len(HEAD):
            break
        room, files, _, may = (re.findall(r"`([^`]+)`", cell) for cell in row)
        found.append(Room(room[0], tuple(files), frozenset(may)))
    return found


class Package:
    """The files of a package and their imports."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.py"))
        self.modules = {self._module(file): file for file in self.files}
        self.imports = [found for file in self.files for found in self._imports(file, folder / file)]

    def _module(self, file: str) -> str:
        parts = [self.name, *file.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imports(self, file: str, path: Path) -> Iterator[Import]:
        module = self._module(file)
        around = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        seen: set[tuple[int, str]] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in self._names(node, around):
                home = name.partition(".")[0]
                target = self._file(name) if home == self.name else home
                place = getattr(node, "lineno", 0), target
                if target != file and place not in seen:
                    seen.add(place)
                    yield Import(file, place[0], target, name)

    def _names(self, node: ast.AST, around: str) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            parents = around.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            home = ".".join([*above, node.module] if node.module else above)
            return [f"{home}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and not name.startswith("."):
                return [name]
        return []

    def _file(self, name: str) -> str:
        """The file that an import of a dotted name reads it from."""
        while name not in self.modules:
            name = name.rpartition(".")[0]
        return self.modules[name]


def room_of(file: str, rooms: Iterable[Room]) -> Room | None:
    """The room of a file: the one whose entry for it is the longest."""
    found = [
        (len(e), room) for room in rooms for e in room.entries if e == file or (e[-1] == "/" and file.startswith(e))
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


def flaws_of_the_table(package: Package, rooms: list[Room]) -> list[str]:
    """Rooms and words of the table that stand for nothing, and files that it leaves out."""
    names = [room.name for room in rooms]
    entries = [entry for room in rooms for entry in room.entries]
    homes = {file: room_of(file, rooms) for file in package.files}
    found = [f"the room {name} is there more than once" for name in {n for n in names if names.count(n) > 1}]
    found += [f"{entry} is in more than one room" for entry in {e for e in entries if entries.count(e) > 1}]
    found += [f"{file} is in no room" for file, room in homes.items() if room is None]
    for room in rooms:
        found += [f"the room {room.name} names {e}, which is not there" for e in room.entries if not _there(e, package)]
        if room not in homes.values():
            found.append(f"the room {room.name} holds no file")
        used = {i.target for i in package.imports if homes[i.source] == room}
        for word in room.may - used - set(names):
            found.append(f"the room {room.name} may import {word}, which is no room and no package that it imports")
    for circle in circles({room.name: room.may & set(names) for room in rooms}):
        found.append(f"the table lets rooms import each other in a circle: {', '.join(circle)}")
    return found


def _there(entry: str, package: Package) -> bool:
    return any(file == entry or (entry[-1] == "/" and file.startswith(entry)) for file in package.files)


def forbidden_imports(package: Package, rooms: list[Room]) -> list[str]:
    """Imports from one room to another, and of other packages, that the table does not permit."""
    found = []
    for each in package.imports:
        here = room_of(each.source, rooms)
        if here is None:
            continue
        there = room_of(each.target, rooms) if each.target in package.files else None
        word = there.name if there is not None else each.target
        if word != here.name and word not in here.may and word not in ANYBODYS:
            found.append(f"{each}: the room {here.name} may not import {word}")
    return found


def circles_of_files(package: Package) -> list[str]:
    """The groups of files that import each other in a circle, with the imports within each."""
    graph = {file: {i.target for i in package.imports if i.source == file} for file in package.files}
    found = []
    for circle in circles(graph):
        within = [i for i in package.imports if i.source in circle and i.target in circle]
        found.append("\n    ".join([f"a circle of {len(circle)} files:", *map(str, within)]))
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, or of one that leads to itself."""
    reached = {node: _reached(node, graph) for node in graph}
    components = {frozenset(n for n in reached[node] if node in reached.get(n, ())) for node in graph}
    return sorted(sorted(component) for component in components if component)


def _reached(start: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    """The nodes to which one or more steps lead."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


@pytest.fixture(scope="module")
def sfast_ext() -> Package:
    return Package(ROOT / "sfast_ext")


@pytest.fixture(scope="module")
def rooms() -> list[Room]:
    return rooms_of(PAGE.read_text(encoding="utf-8"))


def test_the_table_names_every_file_and_every_room_exists(sfast_ext: Package, rooms: list[Room]) -> None:
    found = flaws_of_the_table(sfast_ext, rooms)
    assert not found, "\n" + "\n".join(found)


def test_rooms_import_what_the_table_permits(sfast_ext: Package, rooms: list[Room]) -> None:
    found = forbidden_imports(sfast_ext, rooms)
    assert not found, "\n" + "\n".join(found)


def test_no_files_import_each_other_in_a_circle(sfast_ext: Package) -> None:
    found = circles_of_files(sfast_ext)
    assert not found, "\n" + "\n".join(found)


# the checker itself, on a package of two rooms

TABLE = """
Text.

| room | files | holds | may import |
|---|---|---|---|
| `low` | `low/`, `base.py` | what others use | nothing |
| `high` | `__init__.py`, `high/` | what uses it | `low`, `gradio` |

More text.
"""
FILES = {
    "__init__.py": "from house.high import top",
    "base.py": "import sys, torch",
    "low/__init__.py": "",
    "low/tools.py": "from house.base import sys",
    "high/__init__.py": "from . import parts\nfrom .parts import part",
    "high/parts.py": "import gradio\nfrom house.low import tools\npart = top = 0",
}


@pytest.fixture
def built(tmp_path: Path):
    """`built({"low/tools.py": "import x"})`: a package that is right but for these files."""

    def build(changed: Mapping[str, str] | None = None) -> Package:
        for file, text in {**FILES, **(changed or {})}.items():
            path = tmp_path / "house" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return Package(tmp_path / "house")

    return build


def test_a_package_that_keeps_the_rules_passes(built) -> None:
    package, rooms = built(), rooms_of(TABLE)
    assert [room.name for room in rooms] == ["low", "high"]
    assert flaws_of_the_table(package, rooms) == forbidden_imports(package, rooms) == circles_of_files(package) == []


@pytest.mark.parametrize(
    "text",
    [
        "from house.high.parts import part",
        "from house.high import parts",
        "import house.high.parts",
        "import os, house.high.parts as p",
        "from ..high import parts",
        "from ..high.parts import part",
        "def f():\n    from house.high import parts",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.high.parts import part",
        "import importlib\nimportlib.import_module('house.high.parts')",
        "from importlib import import_module\nimport_module('house.high.parts')",
    ],
)
def test_an_import_of_a_room_that_is_not_permitted_is_found(built, text: str) -> None:
    package = built({"low/tools.py": text})
    (found,) = forbidden_imports(package, rooms_of(TABLE))
    assert re.match(r"low/tools\.py:\d+ imports house\.high\.parts", found)
    assert found.endswith("the room low may not import high")


def test_the_line_of_an_import_is_told(built) -> None:
    (found,) = forbidden_imports(built({"low/tools.py": "a = 1\n\nimport house.high.parts"}), rooms_of(TABLE))
    assert found.startswith("low/tools.py:3 ")


def test_a_name_of_a_packages_init_is_an_import_of_that_file(built) -> None:
    (found,) = forbidden_imports(built({"low/tools.py": "import house"}), rooms_of(TABLE))
    assert found == "low/tools.py:1 imports house: the room low may not import high"


@pytest.mark.parametrize("name", ["gradio", "modules.shared", "numpy"])
def test_a_package_that_a_room_does_not_name_is_found(built, name: str) -> None:
    (found,) = forbidden_imports(built({"low/tools.py": f"def f():\n    import {name}"}), rooms_of(TABLE))
    assert found.endswith(f"the room low may not import {name.partition('.')[0]}")


@pytest.mark.parametrize("text", ["import house.base", "from house import base", "from ..base import b"])
def test_a_circle_of_files_is_found(built, text: str) -> None:
    package = built({"low/tools.py": text, "base.py": "def f():\n    from house.low.tools import t"})
    assert not forbidden_imports(package, rooms_of(TABLE))
    (found,) = circles_of_files(package)
    assert found.startswith("a circle of 2 files:")
    assert "base.py:2 imports house.low.tools.t" in found and "low/tools.py:1 imports house.base" in found


def test_a_circle_of_three_files_in_two_rooms_is_one(built) -> None:
    changed = {"base.py": "from house.high.parts import part", "high/parts.py": "from house.low import tools"}
    (found,) = circles_of_files(built(changed))
    assert "circle of 3 files" in found and "high/__init__.py" not in found


def test_a_submodule_that_takes_a_name_of_the_init_above_it_closes_a_circle(built) -> None:
    own = "from house.high import {}\npart = 0"
    (found,) = circles_of_files(built({"high/parts.py": own.format("Context")}))
    assert (
        "high/__init__.py:1 imports house.high.parts" in found and "high/parts.py:1 imports house.high.Context" in found
    )
    # a submodule's own name is no name of the init
    assert not circles_of_files(built({"high/parts.py": own.format("others"), "high/others.py": ""}))


@pytest.mark.parametrize(
    "old, new, flaw",
    [
        ("`base.py` |", "`base.py`, `gone.py` |", "the room low names gone.py, which is not there"),
        ("`low/`, ", "", "low/tools.py is in no room"),
        ("`__init__.py`, ", "`__init__.py`, `base.py`, ", "base.py is in more than one room"),
        ("`gradio`", "`gradio`, `lowe`", "the room high may import lowe, which is no room and no package"),
        ("nothing", "`high`", "the table lets rooms import each other in a circle: high, low"),
        ("| `high`", "| `attic` | `attic/` | nothing | nothing |\n| `high`", "the room attic holds no file"),
        ("| `high`", "| `low`", "the room low is there more than once"),
    ],
)
def test_a_flaw_of_the_table_is_found(built, old: str, new: str, flaw: str) -> None:
    assert old in TABLE
    found = flaws_of_the_table(built(), rooms_of(TABLE.replace(old, new)))
    assert any(each.startswith(flaw) for each in found), found
