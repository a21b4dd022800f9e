"""What is counted and timed around a call of the original is no part of its result: a fault in it is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.plans.payback import Earnings, RareCalls
from sfast_ext.runtime.plan_builder import PlanBuilder
from sfast_ext.timing import Stopwatch

PLACES: list[tuple[Any, str]] = [
    (Earnings, "due"), (Earnings, "ran"), (Earnings, "built"), (Earnings, "_debt"),
    (RareCalls, "is_due"), (RareCalls, "take"), (RareCalls, "ran"), (RareCalls, "built"), (RareCalls, "give_back"),
    (Stopwatch, "__init__"), (Stopwatch, "stop"), (PlanBuilder, "live_trace"),
]  # fmt: skip
CONFIGS = {
    "earned": Config(allow_cpu=True, triton=False, earned=True),
    "rare": Config(allow_cpu=True, triton=False, rare_calls=True, rare_gain=1e6),
    "plain": Config(allow_cpu=True, triton=False),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
@torch.no_grad()
def test_the_caller_gets_the_result(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], config: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))
    acc = accelerate(net, CONFIGS[config])

    def check(rows: int) -> None:
        x = torch.randn(rows, 8)
        assert torch.allclose(net(x), nn.Sequential.forward(net, x), atol=1e-5)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    check(2)
    with monkeypatch.context() as patch:
        patch.setattr(*place, broken)
        for rows in (2, 2, 3, 3, 5):
            check(rows)
    # what is held for a build was given back
    assert acc._model.build_lock.acquire(blocking=False)
    acc._model.build_lock.release()
    for _ in range(2):
        for rows in (2, 3, 4):
            check(rows)
