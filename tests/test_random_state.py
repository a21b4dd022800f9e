"""Torch's random state is the host's: an image is being made while plans are."""

from __future__ import annotations

import pytest
import torch
from faulty import Pair

from sfast_ext import Config

GPU = pytest.mark.gpu


def states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


@pytest.mark.parametrize(("kind", "check"), [("small", "first"), ("small", "always"), ("unet", "first")])
@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=GPU)], ids=["cpu", "gpu"])
def test_plans_are_built_compared_and_run_without_it(kind, check, gpu):
    pair = Pair(kind, Config(allow_cpu=not gpu, check=check), gpu=gpu)
    before = states()
    with torch.no_grad():
        pair.same(3)
        pair.same(3, width=16)
    assert pair.counter("captures") == 2 and pair.runs
    assert all(torch.equal(one, other) for one, other in zip(states(), before))
