"""Other methods of attention in the settings of the real SD.Next, without the extension and with it."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import Played, drawn, options

pytestmark = sdnext.MARKS


def method(name: str, to: str) -> list[sdnext.Step]:
    """Two pictures with a method."""
    return [options(f"to {name}", cross_attention_optimization=to), drawn(name), drawn(f"{name}, again")]


ROUND: list[sdnext.Step] = [
    drawn("plain"),
    *method("matrix products", "Batch matrix-matrix"),
    *method("dynamic", "Dynamic Attention BMM"),
    *method("scaled dot product", "Scaled-Dot-Product"),
]
PICTURES = sdnext.pictured(ROUND)

played, test_picture_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize("name", PICTURES)
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


def test_another_method_is_captured_anew(played: Played) -> None:
    assert played.gained("matrix products", "captures") == 1
    assert played.gained("matrix products, again", "captures") == 0
