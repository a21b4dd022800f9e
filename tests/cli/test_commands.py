from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfast_ext import __version__, cli
from sfast_ext.tools import doctor
from sfast_ext.tools.lib import machine

ROOT = Path(__file__).parents[2]


def test_the_module_runs_and_says_its_version():
    result = subprocess.run(
        [sys.executable, "-m", "sfast_ext", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0 and result.stdout.strip() == __version__


def test_doctor_for_a_person(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("Stable Fast", __version__, "torch", "Triton", "What will be used"):
        assert word in out


def test_doctor_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sfast_ext"] == __version__
    assert found["used"] and all(sentence.endswith(".") for sentence in found["used"])
    assert isinstance(found["known_bad"], list)


WINDOWS = ("Windows-10-10.0.19045-SP0", "Windows-11-10.0.26100-SP0")


@pytest.mark.parametrize("system", [*WINDOWS, "Linux-6.8.0-x86_64-with-glibc2.39"])
@pytest.mark.parametrize("triton", ["3.3.1", None])
def test_doctor_on_a_system_with_this_name(system, triton, monkeypatch, capsys):
    monkeypatch.setattr(doctor.environment.platform, "platform", lambda: system)
    if triton is None:
        monkeypatch.setattr(doctor.environment, "triton_error", lambda: "ModuleNotFoundError: No module named 'triton'")
        monkeypatch.setattr(doctor.environment, "has_triton", lambda: False)
        monkeypatch.setattr(doctor.environment, "version", lambda name: None)
    monkeypatch.setattr(doctor.environment, "nvrtc_file", lambda: "lib/nvrtc64_120_0.dll")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert system in out and "lib/nvrtc64_120_0.dll" in out
    assert ("was not run on Windows" in out) == (system in WINDOWS)
    # every code page has what it writes
    out.encode("ascii")


def test_output_goes_into_a_file_whatever_the_code_page_lacks(monkeypatch):
    into = io.TextIOWrapper(io.BytesIO(), encoding="cp932")
    monkeypatch.setattr(sys, "stdout", into)
    monkeypatch.setattr(doctor, "main", lambda *_: print("a – b") or 0)
    assert cli.main(["doctor"]) == 0
    into.flush()
    assert into.buffer.getvalue() == b"a ? b" + os.linesep.encode()


def test_doctor_says_what_follows_without_triton(monkeypatch):
    monkeypatch.setattr(doctor.environment, "triton_runs_on", lambda device: False)
    found = {"gpu": "a card", "compiler": None, "cudnn": 90100, "nvrtc": None}
    assert any("none; PyTorch" in sentence for sentence in doctor.used(found))
    assert any("kernels: CUDA C++, for norms" in sentence for sentence in doctor.used({**found, "nvrtc": "12.1"}))
    assert "No GPU" in doctor.used({**found, "gpu": None})[0]
    told = {cuda: " ".join(doctor.used({**found, "gpu": None, "cuda": cuda})) for cuda in (None, "13.0")}
    assert "built for CPUs" in told[None] and "built for CPUs" not in told["13.0"]


def test_doctor_says_what_runs_with_triton(monkeypatch):
    monkeypatch.setattr(doctor.environment, "triton_runs_on", lambda device: True)
    said = doctor.used({"gpu": "a card", "compiler": "cc", "cudnn": 90100, "nvrtc": "13.0"})
    assert "Fused kernels: Triton, and CUDA C++ if that is quicker." in said
    attention, convolutions = (next(s for s in said if s.startswith(w)) for w in ("Attention", "Convolutions"))
    assert said.index(convolutions) == said.index(attention) + 1


def test_a_commit_that_is_told_goes_before_that_of_the_folder(monkeypatch):
    said = {"rev-parse": "0123456789ab", "status": " M file"}
    monkeypatch.setattr(machine, "_first_line", lambda *command: said.get(command[1]))
    monkeypatch.delenv("SFAST_COMMIT", raising=False)
    assert machine.commit() == "0123456789ab+"
    said["status"] = None
    assert machine.commit() == "0123456789ab"
    said["rev-parse"] = None
    assert machine.commit() is None
    said["rev-parse"] = "0123456789ab"
    monkeypatch.setenv("SFAST_COMMIT", "fedcba987654")
    assert machine.commit() == machine.describe()["commit"] == "fedcba987654"


class Nvml:
    """NVIDIA's library, as far as it is asked."""

    def __init__(self, begins=0, tells=0):
        self.nvmlInit_v2 = lambda: begins
        self.tells = tells

    def nvmlSystemGetDriverVersion(self, into, size):
        into.value = b"580.1.2"
        return self.tells


@pytest.mark.parametrize(
    ("nvml", "told"),
    [(Nvml(), "580.1.2"), (Nvml(begins=1), None), (Nvml(tells=9), None), (object(), None), (None, None)],
)
def test_the_driver_is_known_without_nvidia_smi(monkeypatch, nvml, told):
    def library(name):
        if nvml is None:
            raise OSError(f"{name}: cannot open shared object file")
        return nvml

    monkeypatch.setattr(machine.ctypes, "CDLL", library)
    monkeypatch.setattr(machine, "_first_line", lambda *command: None)
    assert machine.driver() == told
    monkeypatch.setattr(machine, "_first_line", lambda *command: "580.3")
    assert machine.driver() == "580.3"


def test_a_code_page_that_lacks_a_character_stops_nothing(monkeypatch):
    """As a pipe of Windows has it."""
    pipes = [io.TextIOWrapper(io.BytesIO(), encoding="cp437") for _ in range(2)]
    for name, pipe in zip(("stdout", "stderr"), pipes):
        monkeypatch.setattr(sys, name, pipe)
    command = ["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "eager", "--iterations", "1"]
    monkeypatch.setattr(sys, "argv", ["sfast_ext", *command])
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("sfast_ext", run_name="__main__")
    for pipe in pipes:
        pipe.flush()
    assert not stop.value.code and b"64" in pipes[0].buffer.getvalue()
