from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.layer_norm import layer_norm
from sfast_ext.passes.rewrite import is_cast, strip_lossless_casts, widens

from .support import Traced, randn

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(("old", "new"), itertools.product(FLOATS, FLOATS), ids=str)
def test_what_widens_keeps_every_value(old: torch.dtype, new: torch.dtype) -> None:
    info = torch.finfo(old)
    one = torch.ones((), dtype=old)
    values = torch.stack([one + info.eps, one * info.max, one * info.tiny, one * info.smallest_normal * info.eps])
    assert widens(old, new) == torch.equal(values.to(new).to(old), values)


@pytest.mark.parametrize("dtype", [None, torch.int64])
def test_what_is_not_known_does_not_widen(dtype: torch.dtype | None) -> None:
    assert not widens(dtype, torch.float32)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_a_cast_that_rounds_is_not_stripped(narrow: torch.dtype) -> None:
    traced = Traced(lambda x: x.to(narrow).to(torch.float32) * 2, randn(3, 4) * 1e3)
    before = traced.ops()
    traced.rewrite(cleanup)
    assert traced.ops() == before and traced.error() == 0
    rounded, back = (n for n in traced.graph.nodes if is_cast(n))
    assert strip_lossless_casts(back) is rounded


def test_a_norm_of_what_was_rounded_is_of_what_was_rounded() -> None:
    weight, bias = randn(8), randn(8)

    def forward(x: Tensor) -> Tensor:
        rounded = x.to(torch.float16).to(torch.float32)
        return torch.nn.functional.layer_norm(rounded, (8,), weight, bias)

    # nearer to each other than float16 can tell
    traced = Traced(forward, 1000 + randn(4, 8) / 10)
    traced.rewrite(layer_norm)
    assert traced.error() < 1e-5
