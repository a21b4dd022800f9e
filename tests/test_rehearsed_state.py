"""Calls that no user made leave no trace in what a forward keeps."""

from __future__ import annotations

import pytest
import torch
from stateful import CHANGES, Kept, built, fast, run, summary

from sfast_ext.report import rehearsal
from sfast_ext.runtime import residency

# what cannot be wound back, and is not changed by a capture either: only a run of the original does it
FORWARD_ONLY = {"itertools.count", "itertools.cycle", "a generator", "a weak dictionary"}


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - FORWARD_ONLY))
def test_a_rehearsal_leaves_what_a_processor_keeps_as_it_was(name):
    kept = Kept()
    model = built(CHANGES[name], kept)
    accelerator = fast(model)
    run(model, 2)
    before = summary(kept), summary([vars(model.first).get("n"), vars(model.second).get("maps")])
    with rehearsal():
        run(model, 3)
    assert (summary(kept), summary([vars(model.first).get("n"), vars(model.second).get("maps")])) == before
    accelerator.release()


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize("name", sorted(CHANGES.keys() - FORWARD_ONLY))
def test_the_first_call_may_be_a_rehearsal(name, room, monkeypatch):
    monkeypatch.setattr(residency, "is_full", lambda context, device: not room)
    kept = Kept()
    before = summary(kept)
    model = built(CHANGES[name], kept)
    accelerator = fast(model)
    with rehearsal():
        run(model, 1)
    assert summary(kept) == before and not isinstance(kept.tensor, torch._subclasses.FakeTensor)
    assert room or not accelerator.plans
    accelerator.release()
