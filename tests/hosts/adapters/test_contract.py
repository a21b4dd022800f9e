"""What each host adapter must have, see sfast_ext/hosts/README.md: this names what a new one lacks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HOSTS = Path("sfast_ext") / "hosts"
TESTS = Path("tests") / "hosts"
ROOMS = Path("docs") / "architecture.md"
FEATURES = Path("docs") / "features.md"
VARIABLES = {Path("tests") / "conftest.py": '"{}"', Path("CONTRIBUTING.md"): "`{}`"}
"""Where the variable that names a checkout of the host is listed, and how it is written there."""
FUNCTIONS = {"detect": [], "start": ["version"]}
"""What scripts/stable_fast.py calls, and with what."""
SESSION = ("install", "host_version", "model_name")
WEBUI_SESSION = ("host_version", "unet_of")
"""What a session must define, see sfast_ext/hosts/session.py and webui_session.py, by its base."""
BASES = {"Session": SESSION, "WebUISession": WEBUI_SESSION}


def adapters(root: Path) -> list[str]:
    """Names of the folders that hold an adapter."""
    return sorted(file.parent.name for file in (root / HOSTS).glob("*/adapter.py"))


def missing(root: Path, name: str) -> list[str]:
    """What the adapter of this name lacks, each in words."""
    file = root / HOSTS / name / "adapter.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {f.name: [a.arg for a in f.args.args] for f in tree.body if isinstance(f, ast.FunctionDef)}
    found = [
        f"{HOSTS / name}/adapter.py has no function {function}({', '.join(arguments)})"
        for function, arguments in FUNCTIONS.items()
        if functions.get(function) != arguments
    ]
    classes = [c for c in tree.body if isinstance(c, ast.ClassDef)]
    sessions = {c: BASES[base] for c in classes for base in map(ast.unparse, c.bases) if base in BASES}
    if not sessions:
        found.append(f"{HOSTS / name}/adapter.py has no class derived from sfast_ext.hosts.session.Session")
    for session, needed in sessions.items():
        methods = {f.name for f in session.body if isinstance(f, ast.FunctionDef)}
        found += [f"{session.name} does not define {method}()" for method in needed if method not in methods]
        fields = {
            ast.unparse(t): each.value for each in session.body if isinstance(each, ast.Assign) for t in each.targets
        }
        found += [] if "HOST" in fields else [f"{session.name} does not set HOST"]
        if "HOST" in fields and ast.literal_eval(fields["HOST"]) not in _text(root / FEATURES):
            found.append(f"{FEATURES} does not say what works in {ast.unparse(fields['HOST'])}")
    if name not in _registered(root / HOSTS / "__init__.py"):
        found.append(f"{HOSTS}/__init__.py does not name it in ADAPTERS")
    if f"`hosts/{name}/`" not in _text(root / ROOMS):
        found.append(f"the table of rooms in {ROOMS} has no row for `hosts/{name}/`")
    variable = f"SFAST_{name.upper()}_DIR"
    found += [
        f"{file} does not list {variable}"
        for file, written in VARIABLES.items()
        if written.format(variable) not in _text(root / file)
    ]
    standin = TESTS / "standins" / f"{name}.py"
    if not (root / standin).is_file():
        found.append(f"there is no stand-in, {standin}")
    for folder, what in (("adapters", "tests of the adapter"), ("live", "tests in the real host")):
        place = TESTS / folder
        files = [*(root / place).glob(f"test_{name}.py"), *(root / place).glob(f"test_{name}_*.py")]
        if not any(_has_tests(file) for file in files):
            found.append(f"there are no {what}, {place}/test_{name}*.py")
    return found


def _registered(file: Path) -> set[object]:
    """The names in the tuple ADAPTERS."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "ADAPTERS":
            return set(ast.literal_eval(each.value))
    return set()


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _has_tests(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(f, ast.FunctionDef) and f.name.startswith("test_") for f in tree.body)


def test_there_are_adapters():
    assert {"a1111", "sdnext"} <= set(adapters(ROOT))


@pytest.mark.parametrize("name", adapters(ROOT))
def test_an_adapter_has_all_that_is_asked_of_it(name):
    told = missing(ROOT, name)
    assert not told, "\n".join(told)


@pytest.fixture
def skeleton(tmp_path):
    """A project with an adapter that is an empty file, and nothing else of it."""
    for file in (HOSTS / "forge" / "adapter.py", HOSTS / "__init__.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('ADAPTERS = ("a1111",)\n' if file.name == "__init__.py" else "", encoding="utf-8")
    return tmp_path


def test_an_empty_skeleton_is_noticed(skeleton):
    assert adapters(skeleton) == ["forge"]
    words = "\n".join(missing(skeleton, "forge"))
    for lacking in (
        "no function detect()",
        "no function start(version)",
        "no class derived from sfast_ext.hosts.session.Session",
        "does not name it in ADAPTERS",
        "the table of rooms in docs/architecture.md has no row for `hosts/forge/`",
        "tests/conftest.py does not list SFAST_FORGE_DIR",
        "CONTRIBUTING.md does not list SFAST_FORGE_DIR",
        "no stand-in, tests/hosts/standins/forge.py",
        "no tests of the adapter, tests/hosts/adapters/test_forge*.py",
        "no tests in the real host, tests/hosts/live/test_forge*.py",
    ):
        assert lacking in words.replace("\\", "/")


def test_each_step_of_filling_it_takes_one_line_away(skeleton):
    def write(file: Path, text: str) -> None:
        (skeleton / file).parent.mkdir(parents=True, exist_ok=True)
        (skeleton / file).write_text(text, encoding="utf-8")

    functions = "def detect(): ...\ndef start(version): ...\n"
    empty = "class ForgeSession(Session):\n    pass\n"
    whole = 'class ForgeSession(Session):\n    HOST = "Forge"\n' + "".join(
        f"    def {method}(self): ...\n" for method in SESSION
    )
    adapter, test = HOSTS / "forge" / "adapter.py", "def test_it(): ...\n"
    steps = [
        (adapter, functions, 8),
        (adapter, functions + empty, 11),
        (adapter, functions + empty.replace("(Session", "(WebUISession"), 10),
        (adapter, functions + whole, 8),
        (HOSTS / "__init__.py", 'ADAPTERS = ("a1111", "forge")\n', 7),
        (ROOMS, "| `hosts/forge` | `hosts/forge/` | Forge | `hosts` |\n", 6),
        (FEATURES, "| Feature | Forge |\n", 5),
        (Path("tests") / "conftest.py", 'WEBUIS = ("SFAST_FORGE_DIR",)\n', 4),
        (Path("CONTRIBUTING.md"), "`SFAST_FORGE_DIR`\n", 3),
        (TESTS / "standins" / "forge.py", "", 2),
        (TESTS / "adapters" / "test_forge.py", "", 2),
        (TESTS / "adapters" / "test_forge.py", test, 1),
        (TESTS / "live" / "test_forge_requests.py", test, 0),
    ]
    for file, text, left in steps:
        write(file, text)
        assert len(missing(skeleton, "forge")) == left, (file, missing(skeleton, "forge"))
