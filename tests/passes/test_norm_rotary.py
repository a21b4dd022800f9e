from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kernels.transformers import torch_rms_norm, torch_rotary
from sfast_ext.kernels.pointwise import modulated_norm
from sfast_ext.kernels.pointwise import norm_rotary as kernel
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.cse import cse
from sfast_ext.passes.norm_rotary import norm_rotary, rotary
from sfast_ext.passes.rms_norm import rms_norm

from .diffusion_transformers import HALF, available, pairs
from .support import Traced, randn

X = randn(2, 7, 3, 16).to(HALF)
HEADS_FIRST = randn(2, 3, 7, 16).to(HALF)
COS, SIN = randn(1, 7, 1, 16), randn(1, 7, 1, 16).cos()
TABLE = pairs(2, 7, 8)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)


class Heads(nn.Module):
    """Operations on heads, with the weight of their norm."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(randn(16).to(HALF)), body

    def forward(self, x: Tensor, *angles: Tensor) -> Any:
        return self.body(torch_rms_norm(x, self.weight, 1e-5), *angles)


def complexes(x: Tensor, table: Tensor) -> Tensor:
    """As Z-Image and Lumina."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table.unsqueeze(2)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def sliced_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    return ((x.float() * cos) + (turned.float() * sin)).to(x.dtype)


def chunked_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (sin * torch.cat([-second, first], -1) + x.float() * cos).to(x.dtype)


def strided_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def selected_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    both = x.unflatten(-1, (-1, 2))
    turned = torch.stack([-both[..., 1], both[..., 0]], -1).reshape(x.shape)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


REAL: dict[str, tuple[Callable[..., Tensor], str]] = {
    "neighbours": (lambda x, cos, sin: torch_rotary(x, cos, sin, "neighbours"), "neighbours"),
    "halves": (lambda x, cos, sin: torch_rotary(x, cos, sin, "halves"), "halves"),
    "halves, sliced": (sliced_halves, "halves"),
    "halves, in chunks": (chunked_halves, "halves"),
    "neighbours, by steps": (strided_neighbours, "neighbours"),
    "neighbours, selected": (selected_neighbours, "neighbours"),
}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("how", REAL)
def test_rotations_become_one(how: str, heads_first: bool) -> None:
    body, form = REAL[how]
    x, cos, sin = (HEADS_FIRST, COS.transpose(1, 2), SIN.transpose(1, 2)) if heads_first else (X, COS, SIN)
    traced = Traced(Heads(body), x, cos, sin)
    assert traced.rewrite(cleanup, rotary) == 1
    assert not traced.find("cat") and not traced.find("stack") and not traced.find("neg")
    assert traced.launches(kernel)[0].args[1:3] == (None, None) and traced.launches(kernel)[0].args[5] == form
    assert traced.error() < 1e-2
    assert traced.rewrite(rms_norm, norm_rotary) == 1
    (rotated,) = traced.launches(kernel)
    assert rotated.args[2] == 1e-5 and not traced.launches(modulated_norm)
    assert traced.error() < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_complex_numbers_become_one(dtype: torch.dtype) -> None:
    traced = Traced(Heads(complexes).to(dtype), X.to(dtype), TABLE)
    assert traced.rewrite(cleanup, rotary) == 1
    assert not traced.find("view_as_complex") and len(traced.find("view_as_real")) == 1
    assert traced.rewrite(rms_norm, norm_rotary) == 1
    assert traced.launches(kernel)[0].args[5] == "complex" and traced.ops()["norm_rotary"] == 1
    assert traced.error() < 1e-2


def test_a_table_in_float64_as_lumina_has_it() -> None:
    def forward(x: Tensor, table: Tensor) -> list[Tensor]:
        return [complexes(x.sin(), table), complexes(x.cos(), table)]

    traced = Traced(forward, X, TABLE.to(torch.complex128))
    assert traced.rewrite(cleanup, cse, rotary) == 2
    casts = [node for node in traced.find("to") if node.args[1] == torch.complex64]
    assert traced.ops()["view_as_real"] == len(casts) == 1  # once for both
    assert traced.error() < 1e-2
    for dtype in (torch.float32, torch.float64):  # the original is more exact than the kernel
        wide = Traced(forward, X.to(dtype), TABLE.to(torch.complex128))
        assert wide.rewrite(cleanup, cse, rotary) == 0


def filled(x: Tensor, table: Tensor) -> Tensor:
    """Of a table that is written piece by piece, as the refiners of Lumina 2 have it."""
    whole = torch.zeros(2, 7, 8, dtype=table.dtype)
    for i in range(2):
        whole[i, : 5 + i] = table[i, : 5 + i]
    return complexes(x, whole)


def written_later(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    table = table.clone()
    rotated = complexes(x, table)
    table.mul_(2)
    return rotated, table.abs()


def written_inside(x: Tensor, table: Tensor) -> Tensor:
    table = table.clone()
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table.unsqueeze(2)
    table.mul_(2)
    return torch.view_as_real(turned).flatten(3).type_as(x) + table.abs().mean().to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_tables_that_are_written_are_copied(dtype: torch.dtype) -> None:
    for body, count in ((filled, 1), (written_later, 1), (written_inside, 0)):
        traced = Traced(Heads(body), X, TABLE.to(dtype))
        assert traced.rewrite(cleanup, rotary) == count
        assert traced.rewrite(rms_norm, norm_rotary) == 1
        assert traced.ops()["norm_rotary"] == 1 and bool(traced.find("view_as_complex")) == (not count)
        assert traced.error() < 1e-2


def test_parts_of_a_packed_product() -> None:
    def forward(x: Tensor, table: Tensor) -> list[Tensor]:
        return [complexes(part.unflatten(-1, (3, 16)), table) for part in x.sin().chunk(3, -1)[:2]]

    traced = Traced(forward, randn(2, 7, 144).to(HALF), TABLE)
    assert traced.rewrite(cleanup, rotary) == 2 and traced.error() < 1e-2


def test_norms_of_heads_alone() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch_rms_norm(x.sin(), None, 1e-6)

    traced = Traced(forward, X)
    assert traced.rewrite(cleanup, rms_norm, norm_rotary) == 1
    assert traced.launches(kernel)[0].args[1:] == (None, 1e-6) and traced.error() < 1e-2
    for other in (randn(2, 7, 16), randn(2, 7, 3, 300), randn(2, 7, 3, 15)):
        assert Traced(forward, other.to(HALF)).rewrite(cleanup, rms_norm, norm_rotary) == 0


def test_a_norm_that_others_read_is_computed_once() -> None:
    traced = Traced(Heads(lambda x, *angles: (torch_rotary(x, *angles, "halves"), x)), X, COS, SIN)
    assert traced.rewrite(cleanup, rotary, rms_norm, norm_rotary) == 1
    assert [node.args[2] for node in traced.launches(kernel)] == [1e-5, None]
    assert traced.error() < 1e-2


def test_angles_of_more_dimensions_or_of_heads_stay() -> None:
    for angles in (randn(1, 7, 3, 16), randn(2, 7, 3, 16), randn(7, 1, 16), randn(1, 7, 1, 1)):
        traced = Traced(Heads(lambda x, a: torch_rotary(x, a, a, "halves")), X, angles)
        assert traced.rewrite(cleanup, rotary) == 0


def written(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    x = x.clone()
    turned = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    x.add_(1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def used_again(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    straight = x.float() * cos
    turned = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    return (straight + turned.float() * sin).to(x.dtype), straight


def straight_and(turned: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda x, cos, sin: (x.float() * cos + turned(x).float() * sin).to(x.dtype)


STAYS: dict[str, Callable[..., Any]] = {
    "written between": written,
    "a product used elsewhere": used_again,
    "turned the other way": straight_and(lambda x: torch.cat((x[..., 8:], -x[..., :8]), -1)),
    "without a sign": straight_and(lambda x: torch.cat((x[..., 8:], x[..., :8]), -1)),
    "the same half twice": straight_and(lambda x: torch.cat((-x[..., 8:], x[..., 8:]), -1)),
    "not quite halves": straight_and(lambda x: torch.cat((-x[..., 7:], x[..., :7]), -1)),
    "of another value": straight_and(lambda x: torch.cat((-x.sin()[..., 8:], x[..., :8]), -1)),
    "neighbours in another order": straight_and(lambda x: torch.stack([-x[..., ::2], x[..., 1::2]], -1).flatten(-2)),
    "neighbours behind one another": straight_and(lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1)),
    "halves side by side": straight_and(lambda x: torch.stack((-x[..., 8:], x[..., :8]), -1).flatten(-2)),
    "tokens": straight_and(lambda x: torch.cat((-x[:, 4:], x[:, :4]), 1)),
    "a factor": lambda x, cos, sin: torch.add(
        x.float() * cos, torch.cat((-x[..., 8:], x[..., :8]), -1).float() * sin, alpha=2
    ).to(x.dtype),
    "angles in half precision": lambda x, cos, sin: torch_rotary(x, cos.half(), sin.half(), "halves"),
    "products in half precision": lambda x, cos, sin: torch_rotary(x, cos.to(HALF), sin.to(HALF), "halves"),
    "a difference": lambda x, cos, sin: (
        x.float() * cos - torch.cat((-x[..., 8:], x[..., :8]), -1).float() * sin
    ).to(x.dtype),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(STAYS[what], X, COS, SIN)
    traced.rewrite(cleanup)
    before = traced.ops()
    assert traced.rewrite(rotary) == 0
    assert traced.ops() == before


def conjugate(x: Tensor, table: Tensor) -> Any:
    return complexes(x, table.conj())


def of_columns(x: Tensor, table: Tensor) -> Any:
    turned = torch.view_as_complex(x.float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()) * table.unsqueeze(2)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def product_again(x: Tensor, table: Tensor) -> Any:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table.unsqueeze(2)
    return torch.view_as_real(turned).flatten(3).type_as(x), turned.abs()


COMPLEX_STAYS = {"halves as complex numbers": of_columns, "product used elsewhere": product_again}
COMPLEX_STAYS["another place of the flatten"] = lambda x, table: torch.view_as_real(
    torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table.unsqueeze(2)
).flatten(2)
COMPLEX_STAYS["a sum"] = lambda x, table: torch.view_as_real(
    torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) + table.unsqueeze(2)
).flatten(3).type_as(x)


@pytest.mark.parametrize("what", COMPLEX_STAYS)
def test_other_complex_numbers_stay(what: str) -> None:
    traced = Traced(COMPLEX_STAYS[what], X, TABLE)
    traced.rewrite(cleanup)
    assert traced.rewrite(rotary) == 0 and traced.find("view_as_complex")


def test_a_conjugate_table() -> None:
    traced = Traced(conjugate, X, TABLE)
    traced.rewrite(cleanup, rotary)
    assert traced.error() < 1e-2
