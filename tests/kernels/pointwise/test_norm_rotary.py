"""RMS norm of heads and rotary embedding: every form against float64, odd sizes, packed operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.support import close, each_dtype, expected, expected_there, half_dtype, randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.pointwise import norm_rotary

FORMS = ["none", "complex", "neighbours", "halves", "matrices", "matrices of halves"]
# batch, tokens, heads, columns
SHAPES = [(2, 5, 3, 64), (1, 3, 24, 96), (2, 2, 30, 128), (1, 7, 1, 2), (3, 1, 5, 30), (1, 1, 40, 120), (1, 2, 9, 44)]


@pytest.fixture
def device(cuda_device):
    return cuda_device


def angles(form: str, shape: tuple[int, ...], device: torch.device, batch: int | None = None) -> list[Tensor | None]:
    """Cosines and sines for x of this shape, other ones for each column."""
    if form == "none":
        return [None, None]
    rows = (shape[0] if batch is None else batch, shape[1], 1)
    if form == "complex":
        angle = randn(*rows, shape[3] // 2, dtype=torch.float32, device=device, std=9.0)
        return [torch.view_as_real(torch.polar(torch.ones_like(angle), angle)), None]
    if form in norm_rotary.MATRICES:
        return [randn(*rows, shape[3] // 2, 2, 2, dtype=torch.float32, device=device), None]
    return [randn(*rows, shape[3], dtype=torch.float32, device=device, std=9.0).cos() for _ in range(2)]


@pytest.mark.thinned("shape", "form", "dtype", rounds=2)
@each_dtype
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, form, shape):
    x = randn(*shape, dtype=dtype, device=device, std=3.0)
    weight = randn(shape[3], dtype=dtype, device=device)
    given = angles(form, shape, device)
    for norm in ((weight, 1e-5), (None, 1e-2), (None, None)):
        y = norm_rotary.launch(x, *norm, *given, form)
        assert y.dtype == dtype and y.is_contiguous()
        close(y, expected(norm_rotary, x, *norm, *given, form), scale=2)


@pytest.mark.thinned("form", "dtype")
@half_dtype
@pytest.mark.parametrize("form", FORMS[1:])
def test_parts_of_packed_queries_keys_and_values(device, dtype, form):
    packed = randn(2, 6, 3 * 4 * 64 + 8, dtype=dtype, device=device)
    weight = randn(64, dtype=dtype, device=device)
    for start in (0, 256, 512, 8, 1):  # what lies at an odd place is read in smaller accesses
        x = packed[..., start : start + 256].unflatten(-1, (4, 64))
        for some, shape in ((x, x.shape), (x[:, ::2], (2, 3, 4, 64)), (x[..., ::2, :], (2, 6, 2, 64))):
            if start == 1:
                some, shape = some[..., :32], (*shape[:3], 32)
            given = angles(form, tuple(shape), device)
            y = norm_rotary.launch(some, weight[: shape[3]], 1e-6, *given, form)
            close(y, expected(norm_rotary, some, weight[: shape[3]], 1e-6, *given, form), scale=2)


@pytest.mark.thinned("form", "dtype")
@half_dtype
@pytest.mark.parametrize("form", ["none", "neighbours", "matrices of halves"])
@pytest.mark.parametrize("sizes", [(2, 5, 3, 3, 64), (1, 7, 1, 24, 128), (3, 1, 4, 5, 30)], ids=str)
def test_tokens_of_two_tensors(device, dtype, form, sizes):
    batch, first, second, heads, columns = sizes
    packed = randn(batch, first, 3, heads, columns, dtype=dtype, device=device, std=3.0)
    of_second = randn(batch, heads, second, columns, dtype=dtype, device=device).transpose(1, 2)
    weights = [randn(columns, dtype=dtype, device=device) for _ in range(2)]
    given = angles(form, (batch, first + second, heads, columns), device)
    for norm, other in (((weights[0], 1e-5), weights[1]), ((None, 1e-2), weights[1]), ((None, None), None)):
        for x, y in ((packed[:, :, 1], of_second), (of_second, packed[:, :, 2])):
            z = norm_rotary.launch(x, *norm, *given, form, y, other)
            assert z.shape == (batch, first + second, heads, columns) and z.is_contiguous()
            close(z, expected(norm_rotary, x, *norm, *given, form, y, other), scale=2)


@pytest.mark.parametrize("form", FORMS[1:])
def test_angles_that_are_broadcast(device, form):
    x = randn(3, 5, 2, 64, dtype=torch.bfloat16, device=device)
    cosine, sine = angles(form, (3, 5, 2, 64), device, batch=1)
    wanted = expected(norm_rotary, x, None, 1e-6, cosine, sine, form)
    close(norm_rotary.launch(x, None, 1e-6, cosine, sine, form), wanted, scale=2)
    # without the leading dimensions, and apart in memory
    rest = [None if t is None else t[0] for t in (cosine, sine)]
    close(norm_rotary.launch(x, None, 1e-6, *rest, form), wanted, scale=2)
    dim = -2 if form == "complex" else -3 if form in norm_rotary.MATRICES else -1
    apart = [None if t is None else torch.cat([t, t], dim).tensor_split(2, dim)[1] for t in (cosine, sine)]
    close(norm_rotary.launch(x, None, 1e-6, *apart, form), wanted, scale=2)
    one = [None if t is None else t[:, :1] for t in (cosine, sine)]  # the same for all tokens
    close(norm_rotary.launch(x, None, 1e-6, *one, form), expected(norm_rotary, x, None, 1e-6, *one, form), scale=2)


def test_a_transposed_result_of_other_layouts(device):
    x = randn(2, 3, 7, 64, dtype=torch.bfloat16, device=device)  # heads before tokens
    given = angles("halves", (2, 7, 3, 64), device)
    y = norm_rotary.launch(x.transpose(1, 2), None, 1e-6, *given, "halves")
    close(y, expected(norm_rotary, x.transpose(1, 2), None, 1e-6, *given, "halves"), scale=2)


def test_the_forms_are_what_models_compute(device):
    """The three ways in which models write it, in float64."""
    x = torch.randn(1, 4, 2, 16, dtype=torch.float64)
    angle = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    table = torch.polar(torch.ones_like(angle), angle)
    wanted = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(3)
    torch.testing.assert_close(norm_rotary.reference(x, None, None, torch.view_as_real(table), None, "complex"), wanted)
    twice = angle.repeat_interleave(2, -1)
    torch.testing.assert_close(norm_rotary.reference(x, None, None, twice.cos(), twice.sin(), "neighbours"), wanted)
    order = torch.arange(16).view(2, 8).t().flatten()  # of halves: pairs are apart
    twice = torch.cat([angle, angle], -1)
    apart = torch.empty_like(x)
    apart[..., :8], apart[..., 8:] = x[..., ::2], x[..., 1::2]
    halves = norm_rotary.reference(apart, None, None, twice.cos(), twice.sin(), "halves")
    torch.testing.assert_close(halves[..., order], wanted)


def test_each_row_is_normed_by_itself(device):
    x = randn(2, 3, 5, 96, dtype=torch.float16, device=device)
    x[1, 1, 2] = torch.inf
    x[0, 0, 0] = 0
    y = norm_rotary.launch(x, None, 1e-6)
    finite = torch.isfinite(y.cpu()).all(-1)
    assert not finite[1, 1, 2] and int(finite.sum()) == 29 and not y[0, 0, 0].any()


def test_large_magnitudes(device):
    for size in (1e-4, 6e4):
        x = randn(1, 3, 2, 128, dtype=torch.bfloat16, device=device, std=size)
        given = angles("complex", (1, 3, 2, 128), device)
        close(norm_rotary.launch(x, None, 1e-6, *given, "complex"),
              expected(norm_rotary, x, None, 1e-6, *given, "complex"), scale=2)  # fmt: skip


REFUSED = {
    "an odd number of columns": lambda x, c: ((x[..., :63],), {}),
    "too many columns": lambda x, c: ((torch.cat([x] * 5, -1),), {}),
    "three dimensions": lambda x, c: ((x[0],), {}),
    "angles of each head": lambda x, c: ((x, None, None, c.expand(2, 3, 4, 64).contiguous(), c), {"form": "halves"}),
    "angles in half precision": lambda x, c: ((x, None, None, c.half(), c.half()), {"form": "halves"}),
    "angles of other tokens": lambda x, c: ((x, None, None, c[:, :2], c[:, :2]), {"form": "neighbours"}),
    "a weight of another dtype": lambda x, c: ((x, torch.ones(64, device=x.device), 1e-6), {}),
    "float64": lambda x, c: ((x.double(), None, 1e-6), {}),
    "tokens of other heads": lambda x, c: ((x, None, 1e-6), {"second": x[:, :, :2]}),
    "tokens of another dtype": lambda x, c: ((x, None, 1e-6), {"second": x.float()}),
    "a weight without a norm": lambda x, c: ((x,), {"second": x, "second_weight": x[0, 0, 0]}),
    "a table that is none of matrices": lambda x, c: ((x, None, None, c), {"form": "matrices"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_take(device, what, monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    x = randn(2, 3, 4, 64, dtype=torch.float16, device=device)
    cosine = randn(2, 3, 1, 64, dtype=torch.float32, device=device)
    args, options = REFUSED[what](x, cosine)
    try:
        norm_rotary.launch(*args, **options)
    except (RuntimeError, ValueError):
        pass  # the reference takes no such operands either
    assert len(counted) == 1


def test_heads_that_are_too_wide_where_they_lie(device, monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    x = randn(1, 2, 3, 129, dtype=torch.float16, device=device)[..., 1:]
    close(norm_rotary.launch(x, None, 1e-6), expected(norm_rotary, x, None, 1e-6), scale=2)
    assert counted == ["heads that are too wide where they lie"]


def test_no_tokens(device):
    assert norm_rotary.launch(randn(2, 0, 4, 64, dtype=torch.float16, device=device), None, 1e-6).shape == (2, 0, 4, 64)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((1, 4352, 30, 128), "complex"),
        ((2, 4352, 24, 96), "complex"),
        ((2, 352, 8, 96), "complex"),
        ((2, 4096, 16, 128), "halves"),
        ((1, 4608, 24, 128), "neighbours"),
        ((1, 512, 24, 128), "none"),
        ((1, 4608, 24, 128), "matrices"),
        ((2, 4096, 16, 128), "matrices of halves"),
    ],
    ids=str,
)
def test_shapes_of_transformers(dtype, shape, form):
    device = torch.device("cuda")
    batch, tokens, heads, columns = shape
    packed = randn(batch, tokens, 3 * heads * columns, dtype=dtype, device=device)
    weight = randn(columns, dtype=dtype, device=device)
    given = angles(form, shape, device, batch=1)
    for part in packed.chunk(3, -1)[:2]:
        x = part.unflatten(-1, (heads, columns))
        y = norm_rotary.launch(x, weight, 1e-5, *given, form)
        close(y, expected_there(norm_rotary, x, weight, 1e-5, *given, form), scale=2)
        text, other = x[:, : tokens // 9].cos(), weight.flip(0)
        rest = x[:, : tokens - tokens // 9]
        y = norm_rotary.launch(text, other, 1e-5, *given, form, rest, weight)
        close(y, expected_there(norm_rotary, text, other, 1e-5, *given, form, rest, weight), scale=2)
