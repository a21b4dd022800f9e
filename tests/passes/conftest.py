from __future__ import annotations

import pytest
import torch

from sfast_ext.kernels.backend import nvrtc


@pytest.fixture(autouse=True)
def same_weights_in_each_run() -> None:
    torch.manual_seed(0)


@pytest.fixture
def with_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for every card may be launched, as far as a pass can tell."""
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: not source.hopper)
