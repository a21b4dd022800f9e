from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.cse import LARGEST_CONSTANT, cse, fold_constants

from .support import Traced, randn

X = randn(2, 3)


def test_equal_operations_become_one() -> None:
    traced = Traced(lambda x: (x.sin() + 1) * (x.sin() + 1) + torch.cat([x, x], 1)[:, :3], X)
    assert traced.rewrite(cse) == 2
    assert traced.ops()["sin"] == 1 and traced.ops()["add"] == 2
    assert traced.error() == 0


def test_numbers_differ_by_kind() -> None:
    traced = Traced(lambda n: (n * 1, n * 1.0, n * True), torch.arange(3))
    assert traced.rewrite(cse) == 0
    assert traced.error() == 0


def test_results_of_one_operation_stay_apart() -> None:
    traced = Traced(lambda x: x.chunk(2, 0)[0] - x.chunk(2, 0)[1], X)
    assert traced.rewrite(cse) == 3
    assert traced.ops() == {"chunk": 1, "getitem": 2, "sub": 1}
    assert traced.error() == 0


def test_random_numbers_stay_apart() -> None:
    traced = Traced(lambda x: x + torch.rand_like(x) + torch.rand_like(x), X)
    assert traced.rewrite(cse) == 0


def test_what_is_written_to_stays_apart() -> None:
    def forward(x: Tensor) -> Tensor:
        a, b = x.sin(), x.sin()
        a.add_(1)
        return a * b

    traced = Traced(forward, X)
    assert traced.rewrite(cse) == 0
    assert traced.error() == 0


def test_before_and_after_a_write_stay_apart() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.clone()
        before = y.sin()
        y.add_(1)
        return before * y.sin()

    traced = Traced(forward, X)
    assert traced.rewrite(cse) == 0
    assert traced.error() == 0


def test_constants_are_folded() -> None:
    def forward(x: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(3, dtype=torch.float32) * -0.5 / 3)
        return x * frequencies[None] + torch.tensor([1.0, 2.0, 3.0]).exp()

    traced = Traced(forward, X)
    assert traced.rewrite(cleanup, fold_constants) == 2
    assert traced.ops() == {"mul": 1, "add": 1}
    assert traced.error() == 0


def test_constants_are_real_whatever_the_caller_does() -> None:
    traced = Traced(lambda x: x @ torch.ones(3, 3).exp(), X)
    fakes = next(iter(traced.graph.nodes)).meta["val"].fake_mode
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), fakes:
        assert traced.rewrite(fold_constants) == 1
    assert traced.error() == 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + torch.zeros_like(x),  # shaped by the input; its value could be known, its layout not
        lambda x: x + torch.rand(3),
        lambda x: x[None, None] * torch.ones(LARGEST_CONSTANT // 4, 5, 1, 1).sum(0),
    ],
)
def test_not_constant(forward: object) -> None:
    traced = Traced(forward, X)
    before = traced.ops()
    traced.rewrite(fold_constants)
    for op in ("zeros_like", "rand", "ones"):
        assert traced.ops()[op] == before[op]


def test_weights_are_no_constants() -> None:
    linear = nn.Linear(3, 3)
    traced = Traced(linear, X)
    assert traced.rewrite(fold_constants) == 0

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.exp()

    traced = Traced(Scaled(), X)
    assert traced.rewrite(fold_constants) == 0
    assert traced.error() == 0


def test_written_constants_stay() -> None:
    def forward(x: Tensor) -> Tensor:
        table = torch.zeros(3)
        table[1] = 5
        return x + table

    traced = Traced(forward, X)
    assert traced.rewrite(fold_constants) <= 1  # the 5
    assert traced.error() == 0
    assert traced.error() == 0  # again: the table was not kept
