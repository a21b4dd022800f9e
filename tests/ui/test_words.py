"""Sizes and states as people read them."""

from __future__ import annotations

import re

import pytest

from sfast_ext import reasons
from sfast_ext.hosts.reasons import HYPERNETWORK, UNSERVED
from sfast_ext.report import Report
from sfast_ext.ui import words

UNET = [(2, 4, 64, 64), (2,), (2, 77, 768)]
PLAN = {
    "label": "512x512, 1 image",
    "ms_before": 31.04,
    "ms_after": 14.78,
    "speedup": 2.1,
    "replays": 20,
    "last_pass": True,
}
ON = {"accelerated": 20, "bypassed": 0, "prepared": 0}


@pytest.mark.parametrize(
    ("shapes", "images", "said"),
    [
        (UNET, 1, "512x512, 1 image, 77 tokens"),
        (UNET, 2, "512x512, 2 images, 77 tokens"),
        (UNET, None, "512x512, batch 2, 77 tokens"),
        (UNET, 3, "512x512, batch 2, 77 tokens"),
        (UNET, 0, "512x512, batch 2, 77 tokens"),
        ([(8, 9, 96, 64), (8,), (8, 154, 768)], 4, "512x768, 4 images, 154 tokens"),
        ([(1, 4, 128, 128)], 1, "1024x1024, 1 image"),
        ([(2, 320, 64, 64), (2, 1280)], 1, None),
        ([(2, 77, 768)], 1, None),
        # Anima, in Forge Neo and in diffusers
        ([(2, 16, 1, 128, 96), (2,), (2, 1, 512, 1024)], 1, "768x1024, 1 image"),
        ([(1, 16, 1, 64, 64), (1,), (1, 77, 1024), (1, 1, 512, 512)], 1, "512x512, 1 image, 77 tokens"),
    ],
)
def test_a_call_is_called_by_its_size(shapes, images, said):
    assert words.size_words(shapes, images) == said


def test_a_plan_in_one_line():
    assert words.plan_words(PLAN) == "512x512, 1 image: 2.1x (31.0 -> 14.8 ms a step)"
    assert words.plan_words({**PLAN, "speedup": None}) == "512x512, 1 image: not compared in time"


def status(**change):
    unet = {"name": "unet", "plans": [PLAN], "calls_per_s": 23.4}
    return {"enabled": True, "no_gpu": None, "accelerators": [unet], "last_pass": ON, "reasons_listed": []} | change


def row(reason, calls_last=3):
    """A row of the status, as the report lists it."""
    report = Report()
    report.bypassed(reason)
    return {**report.as_dict()["reasons_listed"][0], "calls": 9, "calls_last": calls_last}


REASON = row(HYPERNETWORK("x"))
PREPARING = {"label": "768x512, 1 image, 77 tokens", "stage": "recording", "seconds": 2.4}


@pytest.mark.parametrize(
    ("change", "state", "text"),
    [
        ({}, "on", "2.1x, 23 it/s"),
        ({"accelerators": [{"name": "unet", "plans": [PLAN], "calls_per_s": 1.23}]}, "on", "2.1x, 1.2 it/s"),
        ({"accelerators": [{"name": "unet", "plans": []}]}, "on", "accelerated"),
        ({"last_pass": {}, "accelerators": []}, "ready", "ready"),
        ({"last_pass": {"prepared": 1}}, "ready", "prepared"),
        ({"preparing": PREPARING}, "preparing", "preparing 768x512"),
        ({"preparing": {**PREPARING, "seconds_left": 5.6}}, "preparing", "preparing 768x512, 6 s left"),
        ({"preparing": {**PREPARING, "seconds_left": 0.0}}, "preparing", "preparing 768x512, 0 s left"),
        (
            {"last_pass": {"bypassed": 3}, "reasons_listed": [REASON]},
            "original",
            "original: a hypernetwork is active: x",
        ),
        ({"last_pass": {**ON, "bypassed": 3}, "reasons_listed": [REASON]}, "partly", "partly, 2.1x, 23 it/s"),
        ({"enabled": False}, "off", "off"),
        # before anything about switches
        ({"no_gpu": reasons.NO_GPU(), "enabled": False}, "none", "no supported NVIDIA GPU"),
    ],
)
def test_the_state_in_a_few_words(change, state, text):
    found = words.badge(status(**change))
    assert (found["state"], found["text"]) == (state, text)
    assert found["detail"].endswith(".")


@pytest.mark.parametrize(
    ("seconds", "left", "done"),
    [(2.4, None, None), (2.4, 5.6, 0.3), (0.0, 4.0, 0.0), (3.0, 0.0, 1.0), (0.0, 0.0, None)],
)
def test_how_far_a_preparation_is(seconds, left, done):
    found = words.badge(status(preparing={**PREPARING, "seconds": seconds, "seconds_left": left}))
    assert found["progress"] == done and ("s left" in found["detail"]) == (left is not None)
    assert words.badge(status())["progress"] is None


def test_what_was_not_measured_is_not_shown():
    plan = {**PLAN, "speedup": None}
    assert words.badge(status(accelerators=[{"plans": [plan], "calls_per_s": None}]))["text"] == "accelerated"


def test_an_old_reason_is_not_that_of_the_last_image():
    old = {**REASON, "calls_last": 0}
    assert words.badge(status(reasons_listed=[old]))["state"] == "on"


def test_a_plan_of_another_image_is_not_the_speed_of_this_one():
    slow = {**PLAN, "speedup": 1.0, "last_pass": False, "replays": 900}
    assert words.badge(status(accelerators=[{"plans": [slow, PLAN]}]))["text"] == "2.1x"


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        ({}, None),
        ({"enabled": False}, None),
        ({"last_pass": {"bypassed": 3}, "reasons_listed": [REASON]}, "hypernetwork"),
        ({"last_pass": {**ON, "bypassed": 3}, "reasons_listed": [REASON]}, "hypernetwork"),
        ({"no_gpu": reasons.NO_GPU()}, "no-gpu"),
        ({"no_gpu": reasons.OLD_GPU("6.1", "7.0")}, "unsupported-gpu"),
        ({"unserved": UNSERVED("modules.shared has no opts"), "enabled": False}, "unserved"),
    ],
)
def test_where_something_can_be_done_the_entry_of_the_help_is_named(change, entry):
    assert words.badge(status(**change))["help"] == entry


def test_no_word_of_engineers_is_in_the_badge():
    changes = ({}, {"last_pass": {}}, {"preparing": PREPARING}, {"enabled": False}, {"no_gpu": reasons.NO_GPU()})
    found = [words.badge(status(**change)) for change in changes]
    told = " ".join(each[key] for each in found for key in ("state", "text", "detail")).lower()
    assert not [word for word in ("graph", "plan", "forward", "kernel", "tensor", "unet") if word in told]


STATES = {
    "on": {},
    "partly": {"last_pass": {"accelerated": 5, "bypassed": 4}, "reasons_listed": [REASON]},
    "original": {"last_pass": {"bypassed": 4}, "reasons_listed": [REASON]},
    "none": {"no_gpu": reasons.NO_GPU()},
    "unserved": {"unserved": UNSERVED("modules.shared has no opts")},
    "off": {"enabled": False},
    "prepared": {"last_pass": {"prepared": 1}},
    "ready": {"last_pass": {}},
    "preparing": {"preparing": PREPARING},
    "preparing, batch": {"preparing": {**PREPARING, "label": "512x512, batch 3, 77 tokens"}},
    "preparing, many": {"preparing": {**PREPARING, "label": "512x512, 2 images, 77 tokens"}},
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_the_badge_s_words_are_pieces_whatever_its_data(change):
    def constant(**more):
        found = words.badge(status(**change, **more))
        parts = [*found["text_parts"], *found["detail_parts"]]
        assert all(parts) and (found["text"], found["detail"]) == tuple(
            "".join(found[f"{key}_parts"]) for key in ("text", "detail")
        )
        return {part.strip() for part in parts if re.search("[A-Za-z]{2,}", part.replace("it/s", ""))}

    again = {"calls_per_s": 7.0, "plans": [{"speedup": 1.3, "replays": 2, "last_pass": True}]}
    assert constant() == constant(accelerators=[again])


def test_what_is_said_of_other_data_differs_in_its_data_alone():
    def parts(steps, name):
        bypassed = {"last_pass": {"bypassed": steps}, "reasons_listed": [row(HYPERNETWORK(name), steps)]}
        found = words.badge(status(**bypassed))
        return {part.strip() for part in [*found["text_parts"], *found["detail_parts"]]} - {name, str(steps)}

    assert parts(3, "anime") == parts(12, "<b>x</b>; is on")
    assert "remove it from the prompt to accelerate" in parts(3, "x") and "original:" in parts(3, "x")


def test_a_full_stop_is_no_part_of_the_reason():
    change = {"last_pass": {"bypassed": 3}, "reasons_listed": [row(reasons.GRADIENTS())]}
    parts = words.badge(status(**change))["detail_parts"]
    assert parts == ["The last image was not accelerated:", " ", "gradients are being recorded", "."]
