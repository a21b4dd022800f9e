from __future__ import annotations

import pytest
import torch

from sfast_ext import environment, kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime, triton_versions

GPU = torch.device("cuda", 0)
TURING, AMPERE, HOPPER, BLACKWELL = (7, 5), (8, 6), (9, 0), (12, 0)


@pytest.fixture
def card(monkeypatch):
    """Lets a card and a Triton pass for those that are installed."""

    def pretend(version, capability):
        monkeypatch.setattr(triton_runtime, "AVAILABLE", True)
        monkeypatch.setattr(triton_runtime, "VERSION", version)
        monkeypatch.setattr(
            triton_runtime, "capability", lambda device: capability if device.type == "cuda" else (0, 0)
        )
        monkeypatch.setattr(environment, "has_triton", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize("version", [(2, 1), (2, 3), (3, 0), (3, 2), (3, 3), (3, 7)])
def test_what_a_version_compiles(version):
    later = version >= (3, 3)
    for capability in (TURING, AMPERE, HOPPER):
        assert triton_versions.unsupported(version, capability) is None
        assert triton_versions.unsupported(version, capability, torch.float16) is None
        refused = triton_versions.unsupported(version, capability, torch.bfloat16)
        assert (refused is None) == (later or capability != TURING)
    assert (triton_versions.unsupported(version, BLACKWELL) is None) == later


def test_the_reason_names_both_and_what_to_install():
    reason = triton_versions.unsupported((2, 1), TURING, torch.bfloat16)
    assert "Triton 2.1" in reason and "7.5" in reason and "bfloat16" in reason and "torch 2.7" in reason


@pytest.mark.skipif(kernels.interpreted(), reason="a GPU's kernels are chosen")
def test_launches_take_no_dtype_that_does_not_compile(card):
    halves = {dtype: torch.empty(4, dtype=dtype, device="meta") for dtype in (torch.float16, torch.bfloat16)}
    card((2, 1), TURING)
    with triton_runtime.dry_run(GPU):
        assert triton_runtime.accepts(halves[torch.float16]) is None
        assert "has no bfloat16" in triton_runtime.accepts(halves[torch.bfloat16])
        assert "has no bfloat16" in triton_runtime.accepts(halves[torch.float16], halves[torch.bfloat16])
    card((2, 1), AMPERE)
    with triton_runtime.dry_run(GPU):
        assert triton_runtime.accepts(halves[torch.bfloat16]) is None


def test_a_card_that_triton_does_not_know_gets_none_of_its_kernels(card):
    card((3, 2), BLACKWELL)
    assert not environment.triton_runs_on(GPU)
    card((3, 3), BLACKWELL)
    assert environment.triton_runs_on(GPU) and environment.triton_refusal(GPU, torch.bfloat16) is None


def test_bfloat16_alone_is_refused_on_turing(card):
    card((3, 1), TURING)
    assert environment.triton_runs_on(GPU)
    assert environment.triton_refusal(GPU, torch.float16, torch.float32) is None
    assert "bfloat16" in environment.triton_refusal(GPU, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("version", [(2, 1), (2, 3), (3, 0), (3, 7)])
@pytest.mark.parametrize("compiler", [True, False])
def test_an_old_one_gives_way_to_cuda_if_that_compiles(card, version, compiler, monkeypatch):
    card(version, AMPERE)
    monkeypatch.setattr(nvrtc, "targets", lambda: ("12.1", (86,)) if compiler else None)
    monkeypatch.setattr(nvrtc, "unsupported", lambda device: None if compiler else "no NVRTC")
    surpassed = version < (3, 0) and compiler
    assert environment.triton_runs_on(GPU) != surpassed
    said = [line for line in environment.left_out(GPU) if "older than 3.0" in line]
    assert len(said) == surpassed and all(f"Triton {version[0]}.{version[1]}" in line for line in said)


def test_no_device_but_a_gpu_is_refused_anything(card):
    card((2, 1), TURING)
    assert environment.triton_refusal(torch.device("cpu"), torch.bfloat16) is None
