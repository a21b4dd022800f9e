"""The last line of `make test`, and what is said before it begins of programs that are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import needs
import pytest
import totals
from kernels import cuda_on_cpu

ROOT = Path(__file__).parents[1]


def result(file: Path, *counts: int, seconds: float) -> tuple[str, totals.Total]:
    tests, skipped, failures, errors = counts
    file.write_text(
        f'<testsuites><testsuite tests="{tests}" skipped="{skipped}" failures="{failures}" errors="{errors}"'
        f' time="{seconds}"></testsuite></testsuites>'
    )
    return file.stem, totals.read(file)


def test_the_total_is_that_of_all_runs(tmp_path):
    suite = result(tmp_path / "suite.xml", 7338, 4, 0, 0, seconds=492.4)
    interpreter = result(tmp_path / "interpreter.xml", 759, 124, 0, 0, seconds=41.2)
    assert totals.line([suite, interpreter]) == (
        "all runs: 7969 passed, 128 skipped in 8 min 54 s (suite: 7334 passed, 4 skipped in 8 min 12 s;"
        " interpreter: 635 passed, 124 skipped in 41 s)"
    )


def test_failures_and_errors_are_counted(tmp_path):
    failing = result(tmp_path / "suite.xml", 10, 1, 2, 3, seconds=1)
    assert (
        totals.line([failing])
        == "all runs: 4 passed, 1 skipped, 5 failed in 1 s (suite: 4 passed, 1 skipped, 5 failed in 1 s)"
    )


def test_pytest_writes_what_is_read(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()\ndef test_c(): assert 0\n"
    )
    file = tmp_path / "results" / "suite.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", "test_a.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert totals.read(file)[:3] == (1, 1, 1)


def only(monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(needs.shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "sudo apt-get install g++"),
        ("dnf", "sudo dnf install gcc-c++"),
        ("pacman", "sudo pacman -S gcc"),
        ("zypper", "sudo zypper install gcc-c++"),
        ("apk", "apk add g++"),
        ("brew", "brew install gcc"),
        ("none", "install g++ or gcc-c++ or gcc with your system's packages"),
    ],
)
def test_without_a_compiler_the_command_that_installs_one(monkeypatch, manager, command):
    monkeypatch.setattr(needs.sys, "platform", "linux")
    only(monkeypatch, manager, "node")
    assert needs.cpp_compiler() is None and needs.without_compiler() == f"a C++ compiler is not installed: {command}"
    (said,) = needs.missing()
    assert command in said and "skipped" in said


def test_what_is_there_is_not_missed(monkeypatch):
    only(monkeypatch, "clang++", "node")
    assert needs.cpp_compiler() == "/bin/clang++" and not needs.missing()
    only(monkeypatch, "g++", "clang++", "apt-get")
    assert needs.cpp_compiler() == "/bin/g++" and "sudo apt-get install nodejs" in needs.missing()[0]
    monkeypatch.setenv("CXX", "g++")
    assert needs.cpp_compiler() == "/bin/g++"
    monkeypatch.setenv("CXX", "/nowhere/g++-99")
    assert needs.cpp_compiler() is None and "CXX names /nowhere/g++-99" in needs.without_compiler()


def test_kernels_are_skipped_without_a_compiler(monkeypatch):
    monkeypatch.setattr(cuda_on_cpu, "COMPILER", None)
    monkeypatch.setattr(cuda_on_cpu.os, "name", "posix")
    cuda_on_cpu._all_else.cache_clear()
    with pytest.raises(pytest.skip.Exception, match="C(XX|\\+\\+)"):
        cuda_on_cpu._all_else()


def test_all_that_ci_runs_is_in_the_makefile():
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    *_, last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()
    assert last == "exec make --jobs=2 demo test"
    assert all(f"\n{target}:" in made for target in last.split()[3:])
