"""Where kernels that write 8 bits run: built by the host's C++ compiler on a CPU, or on a card."""

from __future__ import annotations

import pytest
import torch

from kernels import cuda_on_cpu
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, registry


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def quantiser_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """That of the operands of kernels that write 8 bits. A kernel that declines them fails the test."""
    if request.param == "cpu":
        if kernels.interpreted():
            pytest.skip("the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET")
        monkeypatch.setattr(nvrtc.Source, "_launch", cuda_on_cpu.launch)
        monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)

    def declined(kernel: registry.Kernel, reason: object) -> None:
        raise AssertionError(f"{kernel} declined: {reason}")

    # by the test's own patches: what a test then patches is undone before this
    monkeypatch.setattr(registry.Kernel, "count", declined)
    return torch.device(request.param)
