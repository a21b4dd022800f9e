"""Each method of attention of the real SD.Next: the images without the extension, and the plan of its default."""

from __future__ import annotations

from typing import Any

import pytest

from . import sdnext
from .sdnext import Played, Step, drawn, options, to_checkpoint
from .webui import last_plan, same_plan

pytestmark = sdnext.MARKS

DEFAULT = "Scaled-Dot-Product"
# in GB of scores for scaled dot products; in MB of queries, times four, for products of matrices
RATES = {"dynamic_attention_slice_rate": 0.5, "dynamic_attention_trigger_rate": 1}
LOW_RATES = {"dynamic_attention_slice_rate": 0.01, "dynamic_attention_trigger_rate": 0.01}
# each is used once with low rates, before there is a plan for it
LARGE, WIDE, HUGE = ({"width": width, "height": 256} for width in (256, 192, 448))


def method(name: str, to: str, **more: Any) -> list[Step]:
    """Two images with a method."""
    return [options(f"to {name}", cross_attention_optimization=to, **more), drawn(name), drawn(f"{name}, again")]


def sliced(name: str, size: dict[str, int]) -> list[Step]:
    """An image of a size at which the method that is on makes slices."""
    return [options(f"to {name}", **LOW_RATES), drawn(name, **size), options(f"from {name}", **RATES)]


def overridden(name: str, *overrides: str) -> list[Step]:
    """Scaled dot products under these overrides, which SD.Next reads at a change of method."""
    disabled = options(f"before {name}", sdp_overrides=list(overrides), cross_attention_optimization="Disabled")
    return [disabled, drawn(f"disabled before {name}"), *method(name, DEFAULT)]


ROUND: list[Step] = [
    # as it comes: scaled dot products, on a CPU under "Dynamic attention"
    drawn("plain"),
    *sliced("slices of scores", LARGE),
    *overridden("no override"),
    *overridden("Flex", "Flex attention"),
    *overridden("dynamic override", "Dynamic attention"),
    *method("matrix products", "Batch matrix-matrix"),
    *method("dynamic", "Dynamic Attention BMM"),
    *sliced("slices of heads", WIDE),
    *method("scaled dot product", DEFAULT),
    *method("attention slicing", "Batch matrix-matrix", attention_slicing="Enabled"),
    options("from attention slicing", attention_slicing="Default"),
    *method("dynamic again", "Dynamic Attention BMM"),
    # slices of tokens, in which SD.Next lets each query see the keys of its own slice alone
    *sliced("slices of tokens", HUGE),
    # another UNet of the same architecture, whose plans are new
    options("to the reference", cross_attention_optimization=DEFAULT, sdp_overrides=[]),
    to_checkpoint("to another checkpoint", "tiny-b"),
    drawn("reference"),
    drawn("reference, large", **LARGE),
    drawn("reference, wide", **WIDE),
    drawn("reference, huge", **HUGE),
]
IMAGES = sdnext.images_of(ROUND)
REFERENCES = [name for name in IMAGES if name.startswith("reference")]
NOT_ALIKE = "slices of tokens"

played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


def reference(played: Played, name: str) -> dict[str, Any]:
    """The plan of the default for the size of a step."""
    signature = last_plan(played.reports[name])["signature"]
    plans = [last_plan(played.reports[other]) for other in REFERENCES]
    return next(plan for plan in plans if plan["signature"] == signature)


@pytest.mark.parametrize("name", IMAGES)
def test_plans_ran(played: Played, name: str) -> None:
    played.accelerated(name)


@pytest.mark.parametrize("name", [name for name in IMAGES if name != NOT_ALIKE and name not in REFERENCES])
def test_the_plan_is_that_of_the_default(played: Played, name: str) -> None:
    same_plan(last_plan(played.reports[name]), reference(played, name))


def test_what_is_no_attention_over_all_keys_is_left_as_it_is(played: Played) -> None:
    plan, other = last_plan(played.reports[NOT_ALIKE]), reference(played, NOT_ALIKE)
    assert plan["digest"] != other["digest"] and plan["operations"]["aten.bmm.default"] > 0


@pytest.mark.parametrize("name", ["slices of scores", "Flex", "matrix products", "dynamic", "slices of heads"])
def test_another_method_or_size_is_captured_anew(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 1


@pytest.mark.parametrize("name", [name for name in IMAGES if name.endswith(", again")])
def test_the_next_image_needs_no_capture(played: Played, name: str) -> None:
    assert played.gained(name, "captures") == 0
