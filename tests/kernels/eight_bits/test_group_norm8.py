from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.eight_bits.codes import same_codes
from kernels.support import half_dtype, randn
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.registry import Declined
from sfast_ext.kernels.eight_bits import add_group_norm8, cat_group_norm8, group_norm8
from sfast_ext.kernels.group_norm import group_norm, portable
from sfast_ext.kernels.pointwise import bias_add

NEAR = {"decided": 4e-3, "ulps": 400}
"""Of what float32 adds up, and of a GPU's exponential function."""


@pytest.fixture
def device(quantiser_device, monkeypatch):
    if quantiser_device.type == "cpu":
        monkeypatch.setattr(portable, "multiprocessors", lambda device: 6)
    return quantiser_device


def image(*shape: int, dtype: torch.dtype = torch.float16, device: torch.device, mean: float = 0.0) -> Tensor:
    return randn(*shape, dtype=dtype, device=device, mean=mean).contiguous(memory_format=torch.channels_last)


def norm(x, groups, weight, bias, eps=1e-5, shift=None, silu=False):
    wide = [None if t is None else t.double().cpu() for t in (x, weight, bias, shift)]
    return group_norm.reference(wide[0], groups, wide[1], wide[2], eps, wide[3], silu)


def same(q: Tensor, scales: Tensor, values: Tensor, silu: bool = False) -> None:
    """Compares with the codes of images in float64; `values` are the norm's, or SiLU's of them."""
    assert q.is_contiguous(memory_format=torch.channels_last) and scales.shape == (2, len(q))
    scale, zero = scales
    if not silu:
        assert not zero.any()
        same_codes(q.flatten(1), scale, values.flatten(1), **NEAR)
        return
    scale, zero, q = scale.cpu().double(), zero.cpu().double(), q.flatten(1).cpu().double()
    wanted = (values.flatten(1).amax(1) + group_norm8.LEAST_SILU) / group_norm8.CODES
    assert torch.allclose(scale, wanted, rtol=1e-4, atol=0)
    assert torch.equal(zero, (group_norm8.LEAST_SILU / scale).round() - 127) and (zero >= -127).all()
    codes = values.flatten(1) / scale[:, None] + zero[:, None]
    assert ((q - codes).abs() <= 0.5 + 2e-2).all() and (q.amax(1) >= 126).all()


SIZES = [((2, 64, 5, 7), 32), ((3, 320, 9, 6), 32), ((1, 40, 1, 1), 1), ((2, 96, 16, 16), 3), ((1, 960, 3, 11), 32),
         ((2, 30, 7, 3), 5), ((1, 128, 31, 2), 128), ((2, 2560, 2, 3), 32)]  # fmt: skip


@half_dtype
@pytest.mark.parametrize(("size", "groups"), SIZES, ids=str)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.thinned
def test_sizes(device, dtype, size, groups, silu, shifted):
    x = image(*size, dtype=dtype, device=device, mean=0.5)
    weight, bias = (randn(size[1], dtype=dtype, device=device) for _ in range(2))
    shift = randn(*size[:2], dtype=dtype, device=device) if shifted else None
    q, scale = group_norm8.launch(x, groups, weight, bias, 1e-5, shift, silu)
    target = norm(x, groups, weight, bias, 1e-5, shift, silu)
    same(q, scale, target, silu)


@pytest.mark.parametrize("has_weight", [False, True])
def test_without_weight_or_bias(device, has_weight):
    x, vector = image(2, 64, 6, 5, device=device), randn(64, dtype=torch.float16, device=device)
    weight, bias = (vector, None) if has_weight else (None, vector)
    same(*group_norm8.launch(x, 4, weight, bias, 1e-5), norm(x, 4, weight, bias))


def test_other_layouts_and_shifts_with_rows_apart(device):
    x = randn(2, 64, 6, 8, dtype=torch.float16, device=device)
    shift = randn(2, 200, dtype=torch.float16, device=device)[:, 72:136]
    for view in (x, x.transpose(2, 3), x[..., 1:6]):
        same(*group_norm8.launch(view, 8, None, None, 1e-5, shift), norm(view, 8, None, None, 1e-5, shift))
    odd = randn(2, 65, dtype=torch.float16, device=device)[:, 1:]
    same(*group_norm8.launch(x, 8, None, None, 1e-5, odd), norm(x, 8, None, None, 1e-5, odd))


def test_the_largest_value_is_found_wherever_it_is(device):
    """Outliers of each channel in turn, and a channel whose factor is negative."""
    weight = torch.ones(48, dtype=torch.float16, device=device)
    weight[::3] = -2
    for place in range(0, 48 * 35, 97):
        x = image(2, 48, 5, 7, device=device)
        channel, pixel = place % 48, place % 35
        x[1, channel, pixel // 7, pixel % 7] += 40 if place % 2 else -40
        for silu in (False, True):
            same(*group_norm8.launch(x, 6, weight, None, 1e-5, None, silu), norm(x, 6, weight, None, silu=silu), silu)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("silu", [False, True])
def test_an_image_with_a_value_that_is_not_finite(device, value, silu):
    x = image(4, 64, 5, 3, device=device)
    x[1, 7, 2, 1], x[3, 63, 4, 2] = value, value
    q, scale = group_norm8.launch(x, 8, None, None, 1e-5, None, silu)
    assert scale[0].isnan().tolist() == [False, True, False, True] and not q[[1, 3]].any()
    fine = q[[0, 2]].contiguous(memory_format=torch.channels_last)
    same(fine, scale[:, ::2], norm(x[::2], 8, None, None, silu=silu), silu)
    for weight, bias in ((value, 0.0), (1.0, value)):
        vectors = [torch.full((64,), each, dtype=torch.float16, device=device) for each in (1.0, 0.0)]
        vectors[0][9], vectors[1][9] = weight, bias
        assert group_norm8.launch(image(2, 64, 5, 3, device=device), 8, *vectors, 1e-5, None, silu)[1][0].isnan().all()


def test_silu_of_negative_values_alone(device):
    """Codes stand for what is between its minimum and 0."""
    x, bias = image(2, 32, 6, 6, device=device), torch.full((32,), -9.0, dtype=torch.float16, device=device)
    q, (scale, zero) = group_norm8.launch(x, 4, None, bias, 1e-5, None, True)
    target = norm(x, 4, None, bias, silu=True)
    assert torch.allclose(scale.cpu(), torch.full((2,), 2 * group_norm8.LEAST_SILU / group_norm8.CODES), rtol=1e-6)
    assert (zero == 0).all()
    error = (q.cpu().double() * scale.cpu()[:, None, None, None] - target).abs()
    assert target.abs().max() <= group_norm8.LEAST_SILU and error.max() <= 0.51 * scale.max()
    wanted = group_norm8.reference(x, 4, None, bias, 1e-5, None, True)
    assert torch.allclose(wanted[1][0], scale) and (q != wanted[0]).float().mean() < 0.01


def test_silu_of_positive_values_alone(device):
    x, bias = image(2, 32, 6, 6, device=device), torch.full((32,), 9.0, dtype=torch.float16, device=device)
    q, (scale, zero) = group_norm8.launch(x, 4, None, bias, 1e-5, None, True)
    target = norm(x, 4, None, bias, silu=True)
    assert (zero == -127).all() and torch.allclose(scale.cpu().double(), target.flatten(1).amax(1) / 253, rtol=1e-4)
    assert ((q.cpu().double() + 127) * scale.cpu()[:, None, None, None] - target).abs().max() <= 0.51 * scale.max()


def test_zeros(device):
    x = torch.zeros(2, 32, 4, 4, dtype=torch.float16, device=device)
    for silu in (False, True):
        q, scale = group_norm8.launch(x, 4, None, None, 1e-5, None, silu)
        assert (scale[0] == 1).all() and not scale[1].any() and not q.any()


def test_it_is_the_norm_before_it_is_rounded(device):
    x = image(2, 320, 8, 8, device=device)
    for silu in (False, True):
        q, scale = group_norm8.launch(x, 32, None, None, 1e-5, None, silu)
        wanted = group_norm8.reference(x, 32, None, None, 1e-5, None, silu)
        torch.testing.assert_close(scale, wanted[1], rtol=2e-5, atol=0)
        codes = group_norm8.CODES if silu else 127
        assert (q != wanted[0]).float().mean() < 0.01
        rounded = group_norm.reference(x, 32, None, None, 1e-5, None, silu)
        below = group_norm8.LEAST_SILU if silu else 0.0
        assert not torch.equal((rounded.float().abs().flatten(1).amax(1) + below) / codes, scale[0])


@half_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.thinned
def test_of_a_sum(device, dtype, with_bias, with_residual, scale):
    x, residual = (image(2, 80, 7, 9, dtype=dtype, device=device) for _ in range(2))
    residual = residual if with_residual else None
    conv_bias, weight, bias = (randn(80, dtype=dtype, device=device) for _ in range(3))
    conv_bias = conv_bias if with_bias else None
    total, q, q_scale = add_group_norm8.launch(x, conv_bias, residual, scale, 8, weight, bias, 1e-5, True)
    wanted = bias_add.reference(x, conv_bias, residual, scale)
    assert (total - wanted).abs().max() <= 2 * torch.finfo(dtype).eps * wanted.abs().max()
    same(q, q_scale, norm(total, 8, weight, bias, silu=True), True)


@half_dtype
@pytest.mark.parametrize(("first", "second"), [(64, 32), (320, 640), (24, 72), (1280, 640), (8, 8)], ids=str)
@pytest.mark.parametrize("with_sum", [False, True])
def test_of_a_concatenation(device, dtype, first, second, with_sum):
    channels = first + second
    a, residual, b = (image(2, each, 5, 3, dtype=dtype, device=device) for each in (first, first, second))
    conv_bias = randn(first, dtype=dtype, device=device)
    weight, bias = (randn(channels, dtype=dtype, device=device) for _ in range(2))
    added = (conv_bias, residual) if with_sum else (None, None)
    joined, q, scale = cat_group_norm8.launch(a, *added, b, 8, weight, bias, 1e-5, True)
    wanted = torch.cat([bias_add.reference(a, *added), b], 1)
    assert (joined - wanted).abs().max() <= 2 * torch.finfo(dtype).eps * wanted.abs().max()
    same(q, scale, norm(joined, 8, weight, bias, silu=True), True)


def test_what_it_does_not_take(monkeypatch):
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    half = torch.ones(2, 8, 4, 4, dtype=torch.float16)

    def told(x: Tensor = half, *others: Tensor | None, groups: int = 2) -> str:
        return str(group_norm8.accepts(x.movedim(1, -1), x.shape[1], groups, *others))

    assert told() == "None"
    assert "half precision" in told(half.float()) and "several dtypes" in told(half, half[0, :, 0, 0].float())
    assert "divide" in told(groups=3) and "divide" in told(groups=0) and "divide" in told(half[:0])
    assert "divide" in told(torch.ones(1, 258, 1, 1, dtype=torch.float16), groups=129)
    for function, operands in (
        (group_norm8.launch.function, (half[:, :, 0, 0], 2, None, None, 1e-5)),
        (group_norm8.launch.function, (half, 2, None, None, 1e-5, half[:1, :, 0, 0])),
        (add_group_norm8.launch.function, (half, None, half[:1], 1.0, 2, None, None, 1e-5)),
        (add_group_norm8.launch.function, (half, half[0, :4, 0, 0], None, 1.0, 2, None, None, 1e-5)),
        (cat_group_norm8.launch.function, (half, None, None, half[:1], 2, None, None, 1e-5)),
        (cat_group_norm8.launch.function, (half, None, half[:1], half, 2, None, None, 1e-5)),
        (cat_group_norm8.launch.function, (half, half[0, :4, 0, 0], None, half, 2, None, None, 1e-5)),
    ):
        with pytest.raises(Declined):
            function(*operands)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "size"), [(320, 128), (640, 64), (1280, 32), (960, 64), (1920, 32), (2560, 16)], ids=str
)
def test_sizes_of_models(channels, size):
    device = torch.device("cuda")
    x = image(2, channels, size, size, device=device)
    weight, bias = (randn(channels, dtype=torch.float16, device=device) for _ in range(2))
    same(*group_norm8.launch(x, 32, weight, bias, 1e-5, None, True), norm(x, 32, weight, bias, silu=True), True)
    assert F.silu(torch.tensor(-1.2784645)).abs() <= group_norm8.LEAST_SILU
