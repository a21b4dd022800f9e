from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sfast_ext.passes import packed_linear as packed_linear_module
from sfast_ext.passes.cse import cse
from sfast_ext.passes.packed_linear import packed_linear

from .support import Traced, randn

X = randn(2, 7, 8)


class Siblings(nn.Module):
    def __init__(self, *linears: nn.Module) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.linears)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("x", [X, X[0]], ids=["tokens", "rows"])
def test_siblings_become_one(bias: bool, x: Tensor) -> None:
    module = Siblings(*[nn.Linear(8, width, bias=bias) for width in (8, 4, 12)])
    traced = Traced(module, x)
    assert traced.rewrite(packed_linear) == 1
    assert traced.ops() == {"linear": 1, "slice": 3}
    assert traced.error() < 1e-6
    # the module's own parameters are views of the packed weight: a change reaches it
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
        traced.expected = module(x)
    assert traced.error() < 1e-6


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_with_gelu_by_tanh_stays_for_its_epilogue(bias: bool, approximate: str) -> None:
    class Gelu(Siblings):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first, *rest = super().forward(x)
            return nn.functional.gelu(first, approximate=approximate), *rest

    for dtype, alone in ((torch.bfloat16, bias and approximate == "tanh"), (torch.float32, False)):
        module = Gelu(*[nn.Linear(8, width, bias=bias) for width in (8, 4, 12)]).to(dtype)
        traced = Traced(module, X.to(dtype))
        assert traced.rewrite(packed_linear) == 1
        assert traced.ops()["linear"] == 1 + alone and traced.error() < 1e-2


def test_two_groups_on_one_input() -> None:
    module = Siblings(nn.Linear(8, 4), nn.Linear(8, 4, bias=False), nn.Linear(8, 4), nn.Linear(8, 4, bias=False))
    traced = Traced(module, X)
    assert traced.rewrite(packed_linear) == 2
    assert traced.ops() == {"linear": 2, "slice": 4}
    assert traced.error() < 1e-6


@pytest.mark.parametrize(
    ("most", "parts"),
    [(46, [[4, 8, 4, 8, 6, 8, 8]]), (45, [[4, 4], [8, 8, 8, 8], [6]]), (24, [[4, 4], [8, 8], [8, 8], [6]])],
)
def test_a_group_that_is_too_wide_is_parted(most: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear_module, "MAX_N", most)
    module = Siblings(*[nn.Linear(8, width) for width in (4, 8, 4, 8, 6, 8, 8)])
    traced = Traced(module, X)
    assert traced.rewrite(packed_linear) == sum(len(part) > 1 for part in parts)
    widths = sorted(node.meta["val"].shape[-1] for node in traced.find("linear"))
    assert widths == sorted(sum(part) for part in parts)
    assert traced.error() < 1e-6


def test_weights_under_autocast_casts() -> None:
    class Cast(Siblings):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            half = x.to(torch.bfloat16)
            return tuple(
                nn.functional.linear(half, linear.weight.to(half.dtype), linear.bias.to(half.dtype))
                for linear in self.linears
            )

    traced = Traced(Cast(nn.Linear(8, 4), nn.Linear(8, 8)), X)
    assert traced.rewrite(packed_linear) == 1
    assert traced.ops() == {"to": 3, "linear": 1, "slice": 2}
    assert traced.error() < 1e-2


def test_later_siblings_need_not_stand_together() -> None:
    class Layers(Siblings):
        def forward(self, x: Tensor, prompt: Tensor) -> tuple[Tensor, ...]:
            for linear in self.linears:
                x = (x + linear(prompt)).sin()
            return (x,)

    traced = Traced(Layers(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), X, randn(2, 1, 8))
    assert traced.rewrite(packed_linear) == 1
    assert traced.error() < 1e-6


def test_equal_inputs_are_one_after_cse() -> None:
    class Blocks(Siblings):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(linear(nn.functional.silu(x)) for linear in self.linears)

    module = Blocks(nn.Linear(8, 8), nn.Linear(8, 4))
    assert Traced(module, X).rewrite(packed_linear) == 0
    traced = Traced(module, X)
    assert traced.rewrite(cse, packed_linear) == 1
    assert traced.ops() == {"silu": 1, "linear": 1, "slice": 2}
    assert traced.error() < 1e-6


def refused(module: nn.Module, *inputs: Tensor) -> None:
    traced = Traced(module, *inputs)
    before = traced.ops()
    assert traced.rewrite(packed_linear) == 0
    assert traced.ops() == before
    assert traced.error() == 0


def test_one_is_no_sibling() -> None:
    refused(nn.Linear(8, 8), X)


def test_other_inputs() -> None:
    class Two(Siblings):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.linears[0](x) + self.linears[1](y)

    refused(Two(nn.Linear(8, 8), nn.Linear(8, 8)), X, X + 1)


def test_bias_here_and_none_there() -> None:
    refused(Siblings(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)), X)


def test_weight_used_twice() -> None:
    linear = nn.Linear(8, 8)

    class Again(Siblings):
        def forward(self, x: Tensor) -> Tensor:
            y, z = self.linears[0](x), self.linears[1](x)
            return self.linears[0](y) + z

    refused(Again(linear, nn.Linear(8, 8)), X)
    refused(Siblings(linear, linear), X)


def test_computed_weight() -> None:
    class Merged(Siblings):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(nn.functional.linear(x, linear.weight * 2) for linear in self.linears)

    refused(Merged(nn.Linear(8, 8), nn.Linear(8, 8)), X)


def test_input_written_between() -> None:
    class Writes(Siblings):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.linears[0](x)
            x.add_(1)
            return y + self.linears[1](x)

    refused(Writes(nn.Linear(8, 8), nn.Linear(8, 8)), X)


def test_result_written_to() -> None:
    class Writes(Siblings):
        def forward(self, x: Tensor) -> Tensor:
            y, z = self.linears[0](x), self.linears[1](x)
            y.add_(1)
            return y * z

    refused(Writes(nn.Linear(8, 8), nn.Linear(8, 8)), X)


def test_arena_that_refuses() -> None:
    module = Siblings(nn.Linear(8, 8), nn.Linear(8, 8))
    traced = Traced(module, X)
    traced.arena.bind([node.meta["weight"] for node in traced.graph.nodes if node.op == "get_attr"])
    assert traced.rewrite(packed_linear) == 0
    assert traced.error() == 0
