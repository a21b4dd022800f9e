"""Patches of the UNet that nothing of ours knows, made by an extension of the test's own in the real SD.Next."""

from __future__ import annotations

import pytest

from . import sdnext
from .sdnext import TOLERANCE, Played, drawn

pytestmark = sdnext.MARKS

EXTENSION = "unknown-patches"
# the kind of a patch in sdnext_patches.py -> the function that the reason is to name
PATCHES = {
    "attention": "patched_attention",
    "resnets": "patched_resnet",
    "hook": "watching_block",
    "method": "patched_method",
    "processor": "LouderProcessor",
    "whole": "patched_unet",
}


def asked(kind: str) -> sdnext.Step:
    return f"to {kind}", "call", f"/test/v1/patch?kind={kind}"


ROUND: list[sdnext.Step] = [
    drawn("plain"),
    *(
        step
        for kind in PATCHES
        for step in (
            asked(kind),
            drawn(kind),
            drawn(f"{kind}, again", seed=2),
            (f"{kind} taken away", "call", "/test/v1/patch?kind=none"),
            drawn(f"plain after {kind}"),
        )
    ),
]
IMAGES = sdnext.images_of(ROUND)


played, test_image_equals_the_one_without_the_extension = sdnext.playing(ROUND)


@pytest.mark.parametrize("kind", PATCHES)
def test_each_patch_changes_the_image(played: Played, kind: str) -> None:
    assert played.apart(kind, "plain") > 2 * TOLERANCE


@pytest.mark.parametrize("kind", [kind for kind in PATCHES if kind != "whole"])
def test_the_original_runs_and_the_reason_names_function_and_extension(played: Played, kind: str) -> None:
    for name in (kind, f"{kind}, again"):
        played.bypassed(name, PATCHES[kind], EXTENSION)


def test_a_forward_over_the_unet_is_named_and_the_plans_run_below_it(played: Played) -> None:
    events = played.reports["whole"]["events"]
    assert any(PATCHES["whole"] in e["message"] and EXTENSION in e["message"] for e in events)
    assert played.ran("whole") > 0


@pytest.mark.parametrize("kind", PATCHES)
def test_plans_go_on_when_a_patch_is_taken_away(played: Played, kind: str) -> None:
    played.accelerated(f"plain after {kind}")
    assert played.gained(f"plain after {kind}", "captures") == 0
