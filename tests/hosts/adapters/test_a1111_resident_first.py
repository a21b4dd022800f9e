"""AUTOMATIC1111 with 8 bits and --medvram on a small card: in the first image too, half-precision weights of layers
stay in system memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters.test_a1111_resident import MEDVRAM, Running, net, on  # noqa: F401
from sfast_ext.runtime import lean_calls
from sfast_ext.weights import expected

pytestmark = pytest.mark.usefixtures("proportions")


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "LEAST", 4 << 10)


@pytest.mark.parametrize("on", [(MEDVRAM, 1.9)], indirect=True)
def test_the_first_image(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    calls: list[int] = []
    real = lean_calls.run

    def counted(*given: Any) -> Any:
        calls.append(on.away)
        return real(*given)

    monkeypatch.setattr(lean_calls, "run", counted)
    assert on.image() < 0.06
    assert len(calls) == 1 and calls[0] > 5 and on.counter("weights_brought_back") == 0
    for networks in ((), (net("a", 0.5),), (net("a", 0.5),), ()):
        assert on.image(3, networks) < 0.1
    assert len(calls) == 1 and on.counter("weights_brought_back") == 0 and on.counter("errors") == 0


@pytest.mark.parametrize("on", [(MEDVRAM, 1.9)], indirect=True)
def test_the_first_image_with_a_lora(on: Running) -> None:  # noqa: F811
    for networks in ((net("a", 0.5),), (net("a", 0.5),), ()):
        assert on.image(3, networks) < 0.1
    assert on.counter("weights_brought_back") == 0 and on.counter("errors") == 0


@pytest.mark.parametrize("on", [(MEDVRAM, 1.9)], indirect=True)
def test_a_first_image_that_is_bypassed(on: Running) -> None:  # noqa: F811
    on.model.applied_token_merged_ratio = 0.5
    assert on.image() < 1e-3 and on.counter("weights_brought_back") == 1
    on.model.applied_token_merged_ratio = 0.0
    assert on.image() < 0.06 and on.image() < 0.06 and on.counter("errors") == 0
