"""Cards that NVRTC does not know: kernels in CUDA C++ are left out there, with one reason and no warning."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from kernels.support import needs_nvrtc
from sfast_ext import environment
from sfast_ext.kernels.backend import input_copies, nvrtc
from sfast_ext.kernels.backend.cuda_libraries import Bindings

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forgotten():
    nvrtc.targets.cache_clear()
    yield
    nvrtc.targets.cache_clear()


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A GPU, and an NVRTC by what it answers; it compiles nothing."""

    def pretend(capability, version=(13, 0), known=(75, 80, 90, 121), **others):
        compiler = SimpleNamespace(version=lambda: version, architectures=lambda: list(known), **others)
        monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), compiler))
        monkeypatch.setattr(nvrtc, "no_nvrtc", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def build(source, architecture, constants):
        raise nvrtc.Unavailable(f"invalid value for --gpu-architecture ({architecture})")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(nvrtc, "build", build)
    monkeypatch.setattr(environment, "triton_surpassed", lambda device: None)
    for name in ("SFAST_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    return pretend


def source():
    return nvrtc.Source("copies", lambda *args: ([], 128, 0), ("copies",))


@pytest.mark.parametrize(("capability", "version"), [((7, 0), (13, 0)), ((7, 2), (13, 1)), ((13, 0), (12, 8))])
def test_a_card_that_it_does_not_know_has_one_reason(card, capability, version):
    card(capability, version)
    reason = nvrtc.unsupported(GPU)
    for words in ("NVRTC " + ".".join(map(str, version)), ".".join(map(str, capability)), "7.5 to 12.1"):
        assert words in reason
    assert not source().supported(GPU)
    assert environment.left_out(GPU) == [f"{reason}."] and environment.known_bad()[-1] == f"{reason}."


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 1)])
def test_a_card_that_it_knows_has_none(card, capability):
    card(capability)
    assert nvrtc.unsupported(GPU) is None and source().supported(GPU) and environment.left_out(GPU) == []


def test_a_card_that_it_knows_is_asked_for_once(card, monkeypatch):
    card((8, 0))
    asked, found = [], nvrtc.bindings()
    monkeypatch.setattr(nvrtc, "bindings", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: asked.append(device) or (8, 0))
    assert all(source().supported(GPU) for _ in range(3)) and len(asked) == 1
    # another NVRTC is asked about anew
    card((7, 0))
    assert not source().supported(GPU)


def test_nothing_is_compiled_or_warned_of_on_such_a_card(card, monkeypatch, caplog):
    """Where copies of inputs are made ready, as for the first plan after each start."""
    card((7, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(input_copies, "_SOURCE", source())
    found = input_copies.Copies.__new__(input_copies.Copies)
    found._targets, found._index = [SimpleNamespace(device=GPU)], 0
    with caplog.at_level(logging.INFO, "sfast_ext"):
        assert found._found() is None and not caplog.records
        # of one that it knows, and that fails, the log tells
        card((8, 0))
        nvrtc.targets.cache_clear()
        assert found._found() is None and "copies.cu is not used" in caplog.text


def test_an_older_nvrtc_knows_volta(card):
    card((7, 0), (12, 9), (50, 60, 70, 75, 90))
    assert source().supported(GPU)


def test_one_that_does_not_answer_is_met_at_the_first_compilation(card, monkeypatch):
    card((7, 0))
    monkeypatch.delattr(nvrtc.bindings().nvrtc, "architectures")
    assert nvrtc.unsupported(GPU) is None and source().supported(GPU)
    card((7, 0), known=())
    nvrtc.targets.cache_clear()
    assert nvrtc.unsupported(GPU) is None
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), None))
    nvrtc.targets.cache_clear()
    assert nvrtc.unsupported(GPU) is None and not source().supported(GPU)


def test_where_there_is_none_the_report_says_why(card, monkeypatch):
    card((8, 6))
    monkeypatch.setattr(nvrtc, "no_nvrtc", lambda: "libnvrtc.so.12 does not load (no such file)")
    reason = "libnvrtc.so.12 does not load (no such file), so kernels in CUDA C++ are left out"
    assert nvrtc.unsupported(GPU) == reason and environment.left_out(GPU) == [f"{reason}."]
    assert not source().supported(GPU)


def test_without_a_gpu_nothing_is_asked(card, monkeypatch):
    card((7, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nvrtc.unsupported(GPU) is None and nvrtc.unsupported(torch.device("cpu")) is None


def test_what_the_installed_one_says():
    needs_nvrtc()
    version, known = nvrtc.targets()
    assert version.partition(".")[0].isdigit() and {80, 90} <= set(known)
    # what it does not name it does not compile
    assert (70 in known) == (int(version.partition(".")[0]) < 13)
    unknown = "sm_70" if 70 not in known else "sm_10"
    with pytest.raises(nvrtc.Unavailable):
        nvrtc.build(b"", unknown, {})
