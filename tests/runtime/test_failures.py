"""What is done about exceptions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfast_ext import Hooks
from sfast_ext.report import Report
from sfast_ext.runtime import model_state
from sfast_ext.runtime.plan_runner import Failures

NO_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")


def fails() -> bool:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("exc", "short", "again", "errors"),
    [
        (NO_MEMORY, lambda: True, True, 0),
        (NO_MEMORY, lambda: False, False, 0),
        (NO_MEMORY, None, False, 0),
        (NO_MEMORY, fails, False, 1),
        (ValueError("another"), fails, False, 0),
    ],
)
def test_a_host_that_gives_way_to_the_original_forward(
    monkeypatch: pytest.MonkeyPatch, exc: Exception, short: Any, again: bool, errors: int
) -> None:
    monkeypatch.setattr(model_state, "pool_of", lambda device: SimpleNamespace(holds_memory=False))
    report = Report()
    hooks = Hooks(short_of_memory=short)
    context: Any = SimpleNamespace(device=lambda: torch.device("cuda", 0), hooks=hooks, report=report)
    context.make_way = lambda: model_state.ModuleContext.make_way(context)
    context._leave_again = lambda device: False
    assert Failures(context, SimpleNamespace()).freed_memory_for(exc) is again  # type: ignore[arg-type]
    assert report.counter("errors") == errors
