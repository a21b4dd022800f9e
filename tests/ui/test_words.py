"""Sizes and states as people read them."""

from __future__ import annotations

import pytest

from sfast_ext.ui import words

UNET = [(2, 4, 64, 64), (2,), (2, 77, 768)]
PLAN = {
    "label": "512x512, 1 picture",
    "ms_before": 31.04,
    "ms_after": 14.78,
    "speedup": 2.1,
    "replays": 20,
    "last_pass": True,
}
ON = {"accelerated": 20, "bypassed": 0, "prepared": 0}


@pytest.mark.parametrize(
    ("shapes", "pictures", "said"),
    [
        (UNET, 1, "512x512, 1 picture, 77 tokens"),
        (UNET, 2, "512x512, 2 pictures, 77 tokens"),
        (UNET, None, "512x512, batch 2, 77 tokens"),
        (UNET, 3, "512x512, batch 2, 77 tokens"),
        (UNET, 0, "512x512, batch 2, 77 tokens"),
        ([(8, 9, 96, 64), (8,), (8, 154, 768)], 4, "512x768, 4 pictures, 154 tokens"),
        ([(1, 4, 128, 128)], 1, "1024x1024, 1 picture"),
        ([(2, 320, 64, 64), (2, 1280)], 1, None),
        ([(2, 77, 768)], 1, None),
    ],
)
def test_a_call_is_called_by_its_size(shapes, pictures, said):
    assert words.size_words(shapes, pictures) == said


def test_a_plan_in_one_line():
    assert words.plan_words(PLAN) == "512x512, 1 picture: 2.1x (31.0 -> 14.8 ms a step)"
    assert words.plan_words({**PLAN, "speedup": None}) == "512x512, 1 picture: not compared in time"


def status(**change):
    unet = {"name": "unet", "plans": [PLAN], "calls_per_s": 23.4}
    return {"enabled": True, "no_gpu": None, "accelerators": [unet], "last_pass": ON, "reasons_listed": []} | change


REASON = {"reason": "a hypernetwork is active: x; remove it from the prompt to accelerate", "calls": 9, "calls_last": 3}
PREPARING = {"label": "768x512, 1 picture, 77 tokens", "stage": "recording", "seconds": 2.4}


@pytest.mark.parametrize(
    ("change", "state", "text"),
    [
        ({}, "on", "2.1x, 23 it/s"),
        ({"accelerators": [{"name": "unet", "plans": [PLAN], "calls_per_s": 1.23}]}, "on", "2.1x, 1.2 it/s"),
        ({"accelerators": [{"name": "unet", "plans": []}]}, "on", "accelerated"),
        ({"last_pass": {}, "accelerators": []}, "ready", "ready"),
        ({"last_pass": {"prepared": 1}}, "ready", "prepared"),
        ({"preparing": PREPARING}, "preparing", "preparing 768x512"),
        (
            {"last_pass": {"bypassed": 3}, "reasons_listed": [REASON]},
            "original",
            "original: a hypernetwork is active: x",
        ),
        ({"last_pass": {**ON, "bypassed": 3}, "reasons_listed": [REASON]}, "partly", "partly, 2.1x, 23 it/s"),
        ({"enabled": False}, "off", "off"),
        # before anything about switches
        ({"no_gpu": "torch finds no NVIDIA GPU", "enabled": False}, "none", "no supported NVIDIA GPU"),
    ],
)
def test_the_state_in_a_few_words(change, state, text):
    found = words.badge(status(**change))
    assert (found["state"], found["text"]) == (state, text)
    assert found["detail"].endswith(".")


def test_what_was_not_measured_is_not_shown():
    plan = {**PLAN, "speedup": None}
    assert words.badge(status(accelerators=[{"plans": [plan], "calls_per_s": None}]))["text"] == "accelerated"


def test_an_old_reason_is_not_that_of_the_last_picture():
    old = {**REASON, "calls_last": 0}
    assert words.badge(status(reasons_listed=[old]))["state"] == "on"


def test_a_plan_of_another_picture_is_not_the_speed_of_this_one():
    slow = {**PLAN, "speedup": 1.0, "last_pass": False, "replays": 900}
    assert words.badge(status(accelerators=[{"plans": [slow, PLAN]}]))["text"] == "2.1x"


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        ({}, None),
        ({"enabled": False}, None),
        ({"last_pass": {"bypassed": 3}, "reasons_listed": [REASON]}, "hypernetwork"),
        ({"last_pass": {**ON, "bypassed": 3}, "reasons_listed": [REASON]}, "hypernetwork"),
        ({"no_gpu": "torch finds no NVIDIA GPU"}, "no-gpu"),
        ({"no_gpu": "the GPU has compute capability 6.1; 7.0 or later is needed"}, "unsupported-gpu"),
    ],
)
def test_where_something_can_be_done_the_entry_of_the_help_is_named(change, entry):
    assert words.badge(status(**change))["help"] == entry


def test_no_word_of_engineers_is_in_the_badge():
    changes = ({}, {"last_pass": {}}, {"preparing": PREPARING}, {"enabled": False}, {"no_gpu": "x"})
    told = " ".join(" ".join(filter(None, words.badge(status(**change)).values())) for change in changes).lower()
    assert not [word for word in ("graph", "plan", "forward", "kernel", "tensor", "unet") if word in told]
