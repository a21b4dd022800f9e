"""Rows as int8: codes and scales against float64, the rotation against an explicit Hadamard matrix, odd rows."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.eight_bits.codes import same_codes
from kernels.support import half_dtype, randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.eight_bits import quantise_rows


@pytest.fixture
def device(quantiser_device):
    return quantiser_device


SHAPES = [(320,), (1, 640), (5, 1280), (2, 3, 2560), (17, 40), (7, 30), (3, 77), (2, 1), (33, 8), (1, 10240), (9, 1288)]
ROTATED = [(5, 320, 64), (3, 640, 128), (1, 1280, 256), (6, 2560, 256), (2, 5120, 128), (1, 10240, 256), (4, 64, 64)]
ROTATED += [(3, 192, 64), (2, 384, 128), (5, 768, 256), (1, 1280, 64)]


@pytest.mark.thinned("shape", "dtype")
@half_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    x = randn(*shape, dtype=dtype, device=device, std=3.0)
    same_codes(*quantise_rows.launch(x), x)


@pytest.mark.thinned("rows", "dtype")
@half_dtype
@pytest.mark.parametrize(("rows", "columns", "group"), ROTATED)
def test_rotation(device, dtype, rows, columns, group):
    x = randn(rows, columns, dtype=dtype, device=device)
    x[0, 7] = 100  # an outlier
    matrix = quantise_rows.hadamard(group)
    assert torch.equal(matrix, matrix.t())
    rotated = x.cpu().double().unflatten(-1, (-1, group)) @ matrix
    # float32 adds up to 256 values
    same_codes(*quantise_rows.launch(x, group), rotated.flatten(-2), decided=1e-3, ulps=8)


def test_the_matrix_is_that_of_walsh_and_hadamard():
    for group in quantise_rows.GROUPS[1:]:
        matrix = quantise_rows.hadamard(group)
        torch.testing.assert_close(matrix @ matrix, torch.eye(group, dtype=torch.float64))
        assert bool((matrix.abs() == group**-0.5).all())
        signs = [(-1) ** bin(i & j).count("1") for i in range(group) for j in range(group)]
        assert torch.equal(matrix.sign().flatten(), torch.tensor(signs, dtype=torch.float64))
        x = torch.randn(3, 2 * group, dtype=torch.float64)
        wanted = (x.unflatten(-1, (-1, group)) @ matrix).flatten(-2)
        torch.testing.assert_close(quantise_rows.rotated(x, group), wanted)


@pytest.mark.parametrize("group", quantise_rows.GROUPS)
def test_products_of_what_is_rotated_alike_are_the_same(device, group):
    x, weight = (randn(rows, 512, dtype=torch.float16, device=device) for rows in (9, 6))
    x[:, 3] *= 60
    (q, scale), (other, other_scale) = (quantise_rows.launch(t, group) for t in (x, weight))
    product = (q.double() @ other.double().t()) * scale.double()[:, None] * other_scale.double()
    wanted = x.double() @ weight.double().t()
    error = ((product - wanted).norm() / wanted.norm()).item()
    # an outlier leaves little to the rest of its row; the rotation spreads it
    assert error < 0.015 if group else 0.02 < error < 0.1
    turned = quantise_rows.rotated(x.double(), group) @ quantise_rows.rotated(weight.double(), group).t()
    assert (turned - wanted).norm() < 1e-9 * wanted.norm()


@pytest.mark.parametrize("group", [0, 64])
def test_ties_go_to_even(device, group):
    # codes are halves of integers: the scale is a power of two
    halves = torch.arange(-127, 127) + 0.5
    x = torch.zeros(3, 320)
    x[:, :254], x[:, 319] = halves, 127
    x = (x * torch.tensor([[1.0], [2**-9], [2**6]])).half().to(device)
    if group:  # the rotation of its own rotation: a symmetric matrix is its inverse
        x = torch.eye(64)[:2].repeat(1, 5).half().to(device)
        q, scale = quantise_rows.launch(x, group)
        assert torch.equal(q[0], torch.full((320,), 127, dtype=torch.int8, device=device))
        assert torch.equal(q[1], torch.tensor([127, -127] * 160, dtype=torch.int8, device=device))
        assert bool((scale == torch.tensor(0.125) / 127).all())
        return
    q, scale = quantise_rows.launch(x)
    assert torch.equal(q.cpu(), (x.cpu().double() / scale.cpu().double()[:, None]).round().to(torch.int8))
    assert torch.equal(q[0, :254].cpu(), halves.double().round().to(torch.int8)) and bool((q[:, 319] == 127).all())


@half_dtype
@pytest.mark.parametrize("columns", [320, 77])
def test_rows_of_zeros_and_of_what_is_no_number(device, dtype, columns):
    x = randn(12, columns, dtype=dtype, device=device)
    x[1] = 0
    x[2] = -0.0
    x[3, 5] = math.nan
    x[4, 6] = math.inf
    x[5, columns - 1] = -math.inf
    x[6, 0], x[6, 1] = math.inf, math.nan
    x[7] = 0
    x[7, 9] = torch.finfo(dtype).smallest_normal / 4  # subnormal
    x[8] *= torch.finfo(dtype).max / 8
    x[9, :] = torch.finfo(dtype).max
    x[10, :] = -1
    for group in (0, 64) if columns == 320 else (0,):
        q, scale = quantise_rows.launch(x, group)
        assert scale[:8].isnan().tolist() == [3 <= row < 7 for row in range(8)]
        assert bool((scale[1:3] == 1).all()) and not q[1:7].any()
        rotated = quantise_rows.rotated(x.double(), group)
        # sums of the largest numbers of bfloat16 are beyond float32
        fine = [row for row in range(12) if row not in (8, 9) or not group or dtype == torch.float16]
        same_codes(q[fine], scale[fine], rotated[fine], decided=1e-3, ulps=8 if group else 1)
        assert len(fine) == 12 or bool(scale[9].isnan() & ~q[9].any())


def test_bfloat16_below_what_has_a_scale(device):
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = 9e-31, 1.1e-30, 1e-40, 1e-38
    q, scale = quantise_rows.launch(x)
    assert q.abs().sum(-1).tolist() == [0, 127, 0, 0] and scale[[0, 2, 3]].tolist() == [1, 1, 1]


def test_views_and_odd_places(device):
    whole = randn(6, 9, 320, dtype=torch.float16, device=device)
    flat = randn(1 + 5 * 320, dtype=torch.float16, device=device)
    for view in (whole[1:], whole[:, ::2], whole[..., 3:260], whole.transpose(0, 1), flat[1:].view(5, 320)):
        q, scale = quantise_rows.launch(view)
        assert q.is_contiguous() and scale.is_contiguous()
        same_codes(q, scale, view)
    for view in (flat[1:].view(5, 320), whole[..., 64:192], whole.transpose(0, 1)):
        rotated = quantise_rows.rotated(view.double(), 64)
        same_codes(*quantise_rows.launch(view, 64), rotated, decided=1e-3, ulps=8)


def test_an_empty_tensor(device):
    q, scale = quantise_rows.launch(torch.ones(0, 64, dtype=torch.float16, device=device), 64)
    assert q.shape == (0, 64) and scale.shape == (0,) and q.dtype == torch.int8 and scale.dtype == torch.float32


def test_each_kind_of_block_is_right(device, monkeypatch):
    """The threads of a row that other sizes have."""
    x = randn(5, 512, dtype=torch.float16, device=device)
    wanted = quantise_rows.launch(x, 256)
    for elements in (8, 16, 32):
        monkeypatch.setattr(quantise_rows, "_ELEMENTS", elements)
        for ours, theirs in zip(quantise_rows.launch(x, 256), wanted):
            assert torch.equal(ours, theirs)


REFUSED = [
    (torch.ones(3, 64), 0, "half precision"),
    (torch.ones(3, 64, dtype=torch.float64), 0, "half precision"),
    (torch.ones(3, 96, dtype=torch.float16), 64, "divided"),
    (torch.ones(3, 64, dtype=torch.float16), 32, "divided"),
    (torch.ones(3, 0, dtype=torch.float16), 0, "empty"),
    (torch.ones((), dtype=torch.float16), 0, "empty"),
    (torch.ones(1, 50000, dtype=torch.float16), 0, "too long"),
    (torch.ones(3, 64, dtype=torch.float16), 0, "not for this device"),
]


@pytest.mark.parametrize(("x", "group", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_it_does_not_take(x, group, reason):
    if x.dim():
        assert reason in str(quantise_rows.accepts(x, group))
    if x.numel() > 1 and not group:
        registry._declined.clear()
        same_codes(*quantise_rows.launch(x), x)
        assert reason in next(iter(registry.declined()["quantise_rows"]))


def test_a_reference_of_a_reference():
    """In float32 and float64, whose codes differ only in the middle between two integers."""
    x = torch.randn(7, 256)
    for group in quantise_rows.GROUPS:
        same_codes(*quantise_rows.reference(x, group), quantise_rows.rotated(x.double(), group), ulps=8)
        same_codes(*quantise_rows.reference(x.double(), group), quantise_rows.rotated(x.double(), group), decided=1e-9)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns", "group"), [(8192, 320, 64), (8192, 640, 128), (2048, 1280, 256)])
def test_unet_shapes(dtype, rows, columns, group):
    for x in (randn(rows, columns, dtype=dtype, device=torch.device("cuda")) for columns in (columns, 4 * columns)):
        same_codes(*quantise_rows.launch(x), x)
        same_codes(*quantise_rows.launch(x, group), quantise_rows.rotated(x.double(), group), decided=1e-3, ulps=8)


@pytest.mark.gpu(gigabytes=16)
def test_beyond_32_bits():
    x = torch.randn(7_000_001, 320, dtype=torch.float16, device="cuda")  # 2.2e9 elements
    q, scale = quantise_rows.launch(x, 64)
    same_codes(q[-9:], scale[-9:], quantise_rows.rotated(x[-9:].double(), 64), decided=1e-3, ulps=8)
