"""When memory that the C library keeps of what was freed goes back to the system."""

from __future__ import annotations

import pytest
import torch
from fuzz.nets import SmallNet

from sfast_ext import Config, Hooks, freed_memory
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.report import Report
from sfast_ext.weights import pinned_buffers

ON, OFF = Config(allow_cpu=True, drop_slower=False), Config(allow_cpu=True, enabled=False)


@pytest.fixture
def trims(monkeypatch):
    """How often memory was given back."""
    found = []
    monkeypatch.setattr(system_memory, "trim", lambda: found.append(1))
    return found


def used(attachment, *nets):
    """Both have a plan."""
    for net in nets:
        attachment.follow(net, ON, keep=nets)
        with torch.no_grad():
            for _ in range(2):
                net(torch.randn(2, 4, 8, 8), torch.tensor([5, 7]), torch.randn(2, 7, 8))
    assert all(each.plans for each in attachment.accelerators())


@pytest.fixture
def attachment():
    made = Attachment(lambda module: Hooks(), Report())
    used(made, SmallNet().eval(), SmallNet().eval())
    yield made
    made.release()


def test_after_the_extension_is_switched_off(attachment, trims):
    first = attachment.accelerators()[0].module
    attachment.follow(first, OFF)
    assert trims == [1]
    attachment.follow(first, OFF)
    attachment.release()
    # there was nothing to free
    attachment.follow(first, ON)
    attachment.follow(first, OFF)
    assert trims == [1]


def test_after_the_models_were_released(attachment, trims):
    attachment.release()
    attachment.release()
    assert trims == [1]


@pytest.mark.parametrize("stays", [False, True])
def test_after_plans_were_dropped_for_another_checkpoint_and_not_if_they_stay(attachment, trims, monkeypatch, stays):
    monkeypatch.setattr(gpu_room, "has_room_to_wait", lambda module: stays)
    for each in attachment.accelerators():
        monkeypatch.setattr(each, "give_memory_back", lambda: False)
    attachment.suspend()
    assert trims == ([] if stays else [1])


def test_after_one_of_several_models_is_gone(attachment, trims):
    first = attachment.accelerators()[0].module
    attachment.follow(first, ON)
    assert trims == [1]
    attachment.follow(first, ON)
    assert trims == [1]


def test_after_the_user_has_dropped_the_plans(attachment, trims):
    assert attachment.drop_plans() == 2 and attachment.drop_plans() == 0
    assert trims == [1]


def test_an_image_gives_nothing_back(attachment, trims):
    used(attachment, *[each.module for each in attachment.accelerators()])
    assert trims == []


def test_a_release_that_fails_hides_no_other(attachment, trims, monkeypatch):
    def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr(attachment.accelerators()[0], "release", fail)
    attachment.release()
    assert trims == [1] and attachment.accelerators() == []


def test_all_of_it_is_given_back(monkeypatch):
    asked = []

    def broken():
        asked.append("pinned")
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(pinned_buffers, "free", broken)
    monkeypatch.setattr(freed_memory, "give_back", lambda: asked.append("freed"))
    system_memory.trim()
    assert asked == ["pinned", "freed"]
