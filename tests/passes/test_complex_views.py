"""What is computed with complex views of pairs of numbers, whatever the layout of the pairs has become."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.passes import run_passes
from sfast_ext.passes.complex_views import complex_views

from .support import Traced, randn

X = randn(2, 6, 4, 8)
TABLE = torch.view_as_complex(randn(6, 1, 4, 2))


def rotated(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.ones_like(pairs)).flatten(3).type_as(x)


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "rotary embedding": rotated,
    "of a transpose": lambda x: torch.view_as_real(torch.view_as_complex(x.transpose(1, 2).reshape(2, 4, 6, 4, 2))),
    "of rows of a cast": lambda x: torch.view_as_complex(x.double()[:, 1:].unflatten(-1, (-1, 2))).abs(),
    "of channels-last pixels": lambda x: torch.view_as_complex(
        F.conv2d(x, torch.ones(4, 6, 1, 1)).permute(0, 2, 3, 1)[..., :2].contiguous()
    ).angle(),
}


@pytest.mark.parametrize("what", TAKEN)
def test_pairs_are_next_to_each_other(what: str) -> None:
    traced = Traced(TAKEN[what], X)
    taken = traced.rewrite(complex_views)
    assert taken == (0 if "contiguous" in traced.ops() and what.startswith("of channels") else 1)
    assert traced.error() < 1e-6


@pytest.mark.parametrize("what", TAKEN)
def test_all_passes_may_follow(what: str) -> None:
    traced = Traced(TAKEN[what], X)
    run_passes(traced.gm, traced.ctx)
    traced.rewrite()
    assert traced.error() < 1e-5


def test_a_second_time_nothing_is_left_to_do() -> None:
    traced = Traced(rotated, X)
    assert traced.rewrite(complex_views) == 1
    assert traced.rewrite(complex_views) == 0


def test_a_view_that_is_written_stays_a_view() -> None:
    def written(x: Tensor) -> Tensor:
        x = x.transpose(1, 2).clone().unflatten(-1, (-1, 2))
        torch.view_as_complex(x).mul_(2)
        return x

    traced = Traced(written, X)
    assert traced.rewrite(complex_views) == 0
    assert traced.error() < 1e-6
