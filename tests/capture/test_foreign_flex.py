"""PyTorch's flex_attention, which SD.Next offers: scaled dot product attention if it changes no score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign import Layer, X, captured, refused, sdpa
from torch import Tensor
from torch.nn import functional as F

from sfast_ext import Config, accelerate
from sfast_ext.plans.graph_facts import digest

flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no flex_attention")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def by_flex(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Over (N, L, H, D)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return attend


@pytest.mark.parametrize("scale", [None, 8**-0.5, 0.2])
def test_it_is_recorded_as_scaled_dot_product_attention(scale: float | None) -> None:
    options = {"scale": 0.2} if scale == 0.2 else {}
    attend = by_flex(scale=scale, score_mod=None, block_mask=None, enable_gqa=False)
    ours, theirs = captured(attend), captured(lambda q, k, v: sdpa(q, k, v, **options))
    assert digest(ours.graph_module) == digest(theirs.graph_module)


def test_a_plan_for_each_size() -> None:
    # a run in earnest is not recorded, as its operator is met by no mode: a further size takes a capture of its own
    module = Layer(by_flex())
    stock = module.forward
    accelerator = accelerate(module, Config(allow_cpu=True, drop_slower=False))
    for x in (X, torch.cat([X, X])):
        for _ in range(2):
            torch.testing.assert_close(module(x), stock(x))
    assert len(accelerator.plans) == 2 and accelerator.report.counter("eager_runs") == 2


def test_scores_that_a_function_changes_are_refused_by_name() -> None:
    assert "score_mod" in refused(by_flex(score_mod=lambda score, b, h, i, j: score + i - j))
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")
    assert "block_mask" in refused(by_flex(block_mask=mask))
    assert "return_lse" in refused(lambda q, k, v: by_flex(return_lse=True)(q, k, v)[0])


def test_in_the_place_of_pytorchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = captured(sdpa)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flex.flex_attention)
    assert digest(captured(sdpa).graph_module) == digest(theirs.graph_module)
