from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfast_ext import cli, native
from sfast_ext.tools import doctor

ROOT = Path(__file__).parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has loaded nothing."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("_loaded", "_error", "_failed"):
        monkeypatch.setattr(native, name, None)
    return tmp_path


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert native.folder() == Path("/a/sfast_ext")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert native.folder() == Path("/b/sfast_ext")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native.folder() == Path.home() / ".cache" / "sfast_ext"


def test_another_torch_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.path()
    assert before == native.path()
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    assert native.path() != before


def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = native.path()
    changed = tmp_path / "linear_add.cpp"
    changed.write_bytes(native.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    assert native.path() != before


def test_not_built() -> None:
    assert not native.load()
    assert not native.available(CPU)
    found = native.describe()
    assert (found["built"], found["loaded"]) == (False, False)
    assert found["path"] == str(native.path()) and "python -m sfast_ext build" in found["error"]
    json.dumps(found)


def test_without_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "SOURCE", tmp_path / "gone.cpp")
    assert not native.load()
    assert "gone.cpp" in native.describe()["error"]


def test_a_broken_library_raises_nothing() -> None:
    native.path().parent.mkdir(parents=True)
    native.path().write_bytes(b"no library")
    assert not native.load()
    found = native.describe()
    assert found["built"] and not found["loaded"] and "OSError" in found["error"]
    native.path().unlink()
    assert not native.load()


def test_a_library_without_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    native.path().parent.mkdir(parents=True)
    native.path().touch()
    if hasattr(torch.ops.sfast_ext, "linear_add"):
        pytest.skip("this process has the operation")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    assert not native.load()
    assert "AttributeError" in native.describe()["error"]


def test_which_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(native, "load", lambda: True)
    for capability, half, brain in (((6, 1), False, False), ((7, 5), True, False), ((9, 0), True, True)):
        monkeypatch.setattr(native, "_capability", lambda index, capability=capability: capability)
        assert native.available(CUDA) is half
        assert native.takes(torch.float16, CUDA) is half
        assert native.takes(torch.bfloat16, CUDA) is brain
        assert not native.takes(torch.float32, CUDA)
        assert not native.available(CPU) and not native.takes(torch.float16, CPU)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not native.available(CUDA)


def test_build_says_why_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cli.main(["build"]) == 1
    assert "without CUDA" in capsys.readouterr().err


def test_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "my-c++"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert native.compiler() == str(mine)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(native.BuildError, match="compiler"):
        native.compiler()


def test_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    words = [sys.executable, "-c", "import sys; sys.exit('no such header')"]
    monkeypatch.setattr(native, "command", lambda output: words)
    with pytest.raises(native.BuildError, match="no such header"):
        native.build()
    assert not native.path().exists()


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["native"] is None and found["native_operations"] == native.describe()
    monkeypatch.setattr(doctor.environment, "triton_runs_on", lambda device: False)
    sentences = doctor.used({**found, "gpu": "a card"})
    assert any("python -m sfast_ext build" in sentence for sentence in sentences)


@pytest.mark.skipif(torch.version.cuda is None or not sys.platform.startswith("linux"), reason="needs torch with CUDA")
def test_builds_and_loads(nothing_built: Path) -> None:
    """In a process of its own: what is loaded once stays."""
    code = """
import torch
from sfast_ext import cli, native
assert cli.main(["build"]) == 0
found = native.describe()
assert found["built"] and found["loaded"] and found["error"] is None, found
assert "Tensor? bias" in str(torch.ops.sfast_ext.linear_add.default._schema)
assert native.build() == native.path()
"""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(nothing_built)}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode and ("No C++ compiler" in result.stderr or "Set CUDA_HOME" in result.stderr):
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert [file.name for file in nothing_built.rglob("*") if file.is_file()] == [native.path().name]
