"""Fixtures of the adapters' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def proportions(monkeypatch: pytest.MonkeyPatch) -> None:
    """ldm's models have two levels, for tests of memory, and of networks that add to the middle of a UNet."""
    pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit")
    from hosts.standins import a1111

    a1111.two_levels(monkeypatch)
