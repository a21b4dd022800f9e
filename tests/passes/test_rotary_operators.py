"""Rotations by operators of comfy_kitchen become the kernel's, with the norms in front of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kitchen_operators import NAMES, operators, table
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.pointwise import norm_rotary as kernel
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.norm_rotary import norm_rotary
from sfast_ext.passes.rms_norm import rms_norm
from sfast_ext.passes.rotary_operators import rotary_operators

from .diffusion_transformers import HALF, available
from .support import Traced, randn

Q, K = randn(2, 7, 3, 16).to(HALF), randn(2, 7, 3, 16).to(HALF)
TABLE = table(1, 7, 1, columns=16)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)


def op(name: str) -> Callable[..., Any]:
    return getattr(operators(), name)  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Norms of queries and keys, and their rotation."""

    def __init__(self, name: str, heads_first: bool) -> None:
        super().__init__()
        self.q, self.k = (nn.Parameter(randn(16).to(HALF)) for _ in range(2))
        self.name, self.heads_first = name, heads_first

    def forward(self, q: Tensor, k: Tensor, matrices: Tensor) -> Any:
        q, k = F.rms_norm(q, (16,), self.q, 1e-6), F.rms_norm(k, (16,), self.k, 1e-6)
        if self.heads_first:
            q, k, matrices = q.transpose(1, 2), k.transpose(1, 2), matrices.transpose(1, 2)
        if self.name.endswith("1"):
            return op(self.name)(q, matrices), op(self.name)(k, matrices)
        return op(self.name)(q, k, matrices)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_norms_and_rotations_become_one(name: str, heads_first: bool) -> None:
    traced = Traced(Heads(name, heads_first), Q, K, TABLE)
    assert traced.rewrite(cleanup, rotary_operators) == (2 if name.endswith("1") else 1)
    assert not traced.ops()[name] and traced.error() < 1e-2
    assert traced.rewrite(rms_norm, norm_rotary) == 2
    for launch in traced.launches(kernel):
        assert launch.args[2] == 1e-6 and launch.args[5] == ("matrices of halves" if "half" in name else "matrices")
    assert len(traced.launches(kernel)) == 2 and traced.error() < 1e-2


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a table of each image": ((2, 7, 3, 16), (2, 7, 1)),
    "one image": ((1, 5, 4, 8), (1, 5, 1)),
    "one head, tokens after it": ((2, 1, 9, 32), (1, 1, 9)),
    "one token": ((3, 1, 2, 4), (1, 1, 1)),
    "fewer keys' heads": ((2, 6, 8, 10), (2, 6, 1)),
}


@pytest.mark.parametrize("what", SHAPES)
def test_matrices_of_any_kind(what: str) -> None:
    """No rotations: what a table has cannot be known."""
    size, rows = SHAPES[what]
    x, y = randn(*size).to(HALF), randn(*size[:2], max(1, size[2] // 2 if rows[2] == 1 else size[2]), size[3]).to(HALF)
    matrices = randn(*rows, size[3] // 2, 2, 2)
    for name in NAMES[::2]:
        traced = Traced(lambda a, b, m, name=name: op(name)(a.sin(), b, m), x, y, matrices)
        assert traced.rewrite(cleanup, rotary_operators) == 1 and len(traced.launches(kernel)) == 2
        assert traced.error() < 1e-2


def test_one_of_two_that_is_read() -> None:
    traced = Traced(lambda q, k, m: op("apply_rope")(q, k, m)[1], Q, K, TABLE)
    assert traced.rewrite(cleanup, rotary_operators) == 1 and len(traced.launches(kernel)) == 1
    assert traced.error() < 1e-2


def written_between(q: Tensor, k: Tensor, m: Tensor) -> Any:
    q = q.clone()
    y, _ = op("apply_rope")(q, k, m)
    return y, q.add_(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_in_half_precision_as_lumina_has_it_in_forge_neo(dtype: torch.dtype) -> None:
    def forward(q: Tensor, k: Tensor, m: Tensor) -> list[Tensor]:
        return [*op("apply_rope")(q, k, m), *op("apply_rope")(q.sin(), k.sin(), m)]

    given = Q.to(dtype), K.to(dtype), TABLE.to(dtype)
    traced = Traced(forward, *given)
    assert traced.rewrite(cleanup, rotary_operators) == 2 and len(traced.find("to")) == 1  # cast once for both
    assert traced.error() < 1e-2
    wanted = forward(*(t.double() for t in given))
    for ours, eager, exact in zip(traced.outputs(), traced.expected, wanted, strict=True):
        assert (ours.double() - exact).norm() <= (eager.double() - exact).norm()


STAYS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a table in another half precision": (lambda q, k, m: op("apply_rope")(q, k, m), (Q, K, TABLE.half())),
    "float32 by a table in half precision": (
        lambda q, k, m: op("apply_rope")(q, k, m), (Q.float(), K.float(), TABLE.half()),
    ),
    "a table in float64": (lambda q, k, m: op("apply_rope")(q, k, m), (Q, K, TABLE.double())),
    "matrices of each head": (lambda q, k, m: op("apply_rope")(q, k, m), (Q, K, table(1, 7, 3, columns=16))),
    "matrices for both": (lambda q, k, m: op("apply_rope_split_half")(q, k, m), (Q, K, table(1, 1, 1, columns=16))),
    "five dimensions": (lambda q, k, m: op("apply_rope")(q, k, m), (Q[None], K[None], TABLE[None])),
    "keys of other tokens": (lambda q, k, m: op("apply_rope")(q, k, m), (Q, K[:, :1], TABLE)),
    "heads of many columns": (
        lambda q, k, m: op("apply_rope1")(torch.cat([q] * 17, -1), torch.cat([m] * 17, 3)), (Q, K, TABLE),
    ),
    "float64": (lambda q, k, m: op("apply_rope1")(q.double(), m), (Q, K, TABLE)),
    "what is written to": (written_between, (Q, K, TABLE)),
}  # fmt: skip


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    body, given = STAYS[what]
    traced = Traced(body, *given)
    assert traced.rewrite(cleanup, rotary_operators) == 0 and not traced.launches(kernel)
    assert traced.error() == 0
