"""The wrong Python, the wrong folder and missing packages: one line that says what to type."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sfast_ext import cli
from sfast_ext.cli import interpreter
from sfast_ext.tools.lib import Unavailable

ROOT = Path(__file__).parents[2]
PYTHON = "Scripts/python.exe" if os.name == "nt" else "bin/python"


@pytest.fixture
def webui(tmp_path, monkeypatch):
    """A WebUI with the extension in it; nothing else is around."""
    package = tmp_path / "a webui" / "extensions" / "stable-fast-webui" / "sfast_ext"
    package.mkdir(parents=True)
    monkeypatch.setattr(interpreter, "PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    for name in ("VENV_DIR", "venv_dir"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "a webui"


def environment(folder: Path, *, torch: bool = True, python: str = "bin/python") -> Path:
    """An environment for packages; its interpreter."""
    packages = folder / ("Lib/site-packages" if python.endswith(".exe") else "lib/python3.10/site-packages")
    (packages / ("torch" if torch else "numpy")).mkdir(parents=True)
    file = folder / python
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    return file


def found() -> list[Path]:
    return list(interpreter.webui_pythons())


@pytest.mark.parametrize("folder", ["venv", ".venv", "env", "../system/python", "python_embeded", "../python_embeded"])
@pytest.mark.parametrize("python", ["bin/python", "bin/python3", "Scripts/python.exe", "python.exe"])
def test_the_python_of_the_webui(webui, folder, python):
    own = environment(webui / folder, python=python)
    assert [each.resolve() for each in found()] == [own.resolve()]


def test_no_python_without_torch_is_named(webui):
    environment(webui / "venv", torch=False)
    assert not found()
    own = environment(webui / ".venv")
    assert found() == [own]


def test_neither_is_this_one(webui, monkeypatch):
    environment(webui / "venv")
    monkeypatch.setattr(sys, "prefix", str(webui / "venv"))
    assert not found()


def test_an_environment_elsewhere_that_the_webui_was_told(webui, tmp_path, monkeypatch):
    own = environment(tmp_path / "elsewhere" / "packages")
    assert not found()
    monkeypatch.setenv("VENV_DIR", str(tmp_path / "elsewhere" / "packages"))
    assert found() == [own]
    monkeypatch.setenv("VENV_DIR", "-")
    assert not found()


def test_the_folder_in_which_it_was_started_counts_as_well(webui, tmp_path, monkeypatch):
    other = tmp_path / "other" / "webui" / "models"
    other.mkdir(parents=True)
    own = environment(tmp_path / "other" / "webui" / "venv")
    monkeypatch.chdir(other)
    assert found() == [own]


def test_an_extension_that_is_a_link(webui, tmp_path, monkeypatch):
    own = environment(webui / "venv")
    real = tmp_path / "code" / "sfast_ext"
    real.mkdir(parents=True)
    link = webui / "extensions" / "linked"
    link.symlink_to(real.parent)
    monkeypatch.setattr(interpreter, "PACKAGE", link / "sfast_ext")
    assert found() == [own]


def refused(monkeypatch, capsys, arguments, *missing: str) -> str:
    find = importlib.util.find_spec
    monkeypatch.setattr(interpreter.importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    for name in missing:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1
    return told.err.strip()


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["bench", "--model", "tiny-sd15"], ["demo"]])
def test_without_torch_the_command_for_the_right_python(webui, monkeypatch, capsys, arguments):
    own = environment(webui / "venv")
    told = refused(monkeypatch, capsys, arguments, "torch")
    words = told.partition("Type: ")[2]
    assert "has no torch" in told and sys.executable in told
    if os.name != "nt":
        assert shlex.split(words) == [str(own), str(interpreter.PACKAGE), *arguments]


def test_without_torch_and_without_a_webui_around(webui, monkeypatch, capsys):
    told = refused(monkeypatch, capsys, ["doctor"], "torch")
    assert "Use the WebUI's Python" in told and "venv" in told and "doctor" in told


@pytest.mark.parametrize("name", ["diffusers", "transformers", "safetensors"])
@pytest.mark.parametrize("command", ["demo", "bench", "quality", "tune"])
def test_without_another_package_how_to_install_it(webui, monkeypatch, capsys, command, name):
    told = refused(monkeypatch, capsys, [command], name)
    assert f"has no {name}. Install" in told and "-m venv sfast-venv" in told and "pip install torch diffusers" in told


def test_doctor_needs_torch_alone(webui, monkeypatch, capsys):
    monkeypatch.setattr(
        interpreter.importlib.util, "find_spec", lambda name: pytest.fail(name) if name != "torch" else 1
    )
    interpreter.check(cli.NEEDS["doctor"], [])


@pytest.mark.parametrize("raised", [OSError("[WinError 126] shm.dll"), ImportError("libcudart.so.12: cannot open")])
def test_a_torch_that_cannot_be_imported(webui, monkeypatch, raised):
    def fails(name):
        raise raised

    monkeypatch.setattr(interpreter.importlib, "import_module", fails)
    with pytest.raises(Unavailable, match="torch of .* cannot be imported"):
        interpreter.check(["torch"], ["doctor"])


def test_an_old_python_is_told_of_the_oldest():
    assert interpreter.too_old((3, 10, 0)) is None and interpreter.too_old((4, 0)) is None
    for version in ((3, 9, 18), (3, 8), (3, 7, 1)):
        assert "Python 3.10 or later is needed; this is 3." in interpreter.too_old(version)


def test_an_old_python_can_read_what_answers_it():
    files = [ROOT / "sfast_ext" / name for name in ("__init__.py", "__main__.py", "tools/__init__.py")]
    files += (ROOT / "sfast_ext" / "cli").glob("*.py")
    files += [ROOT / "sfast_ext" / "tools" / "lib" / name for name in ("__init__.py", "names.py", "weight_files.py")]
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 8))


WITHOUT = """
import sys
sys.modules.update(torch=None, numpy=None, diffusers=None, safetensors=None)
sys.argv = ["sfast_ext", *{arguments!r}]
{how}
"""
AS_A_MODULE = "import runpy; runpy.run_module('sfast_ext', run_name='__main__')"
AS_A_PATH = f"import runpy; runpy.run_path({str(ROOT / 'sfast_ext')!r}, run_name='__main__')"


@pytest.mark.parametrize(
    ("how", "arguments", "status", "said"),
    [
        (AS_A_MODULE, ["--version"], 0, "0."),
        (AS_A_MODULE, ["bench", "--help"], 0, "example:"),
        (AS_A_MODULE, ["doctor"], 2, "has no torch. "),
        (AS_A_PATH, ["doctor"], 2, "has no torch. "),
        (AS_A_PATH, ["bench", "--size", "500x500"], 2, "multiples of 8"),
    ],
)
def test_a_python_without_any_package(how, arguments, status, said, tmp_path):
    code = WITHOUT.format(how=how, arguments=arguments)
    folder = ROOT if how == AS_A_MODULE else tmp_path
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == status and said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_by_its_path_it_runs_in_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "sfast_ext"), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.strip() == cli.parsers.__version__
