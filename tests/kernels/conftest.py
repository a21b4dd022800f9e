"""Where the kernels run.

Without a card, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`, a run of its own, since
Triton reads the variable when it is first imported. In any other run those tests are skipped by name. On a
card: `pytest -m gpu`, without the variable.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sfast_ext import kernels


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        if kernels.interpreted():
            pytest.skip("the interpreter is on: unset TRITON_INTERPRET to test on the GPU")
        return torch.device("cuda", torch.cuda.current_device())
    if not kernels.interpreted():
        pytest.skip("runs in Triton's interpreter: set TRITON_INTERPRET=1 (Triton 3.0 or newer)")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that what a kernel leaves unwritten shows."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grid, arguments and constants of launches of the module's `kernel`, of which there are none then."""
    found: list[Any] = []

    def start(source: Any, grid: Any, *args: Any, **constants: Any) -> None:
        found.append((grid, args, constants))

    monkeypatch.setattr(request.module.kernel, "start", start)
    return found
