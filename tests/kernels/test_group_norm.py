from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sfast_ext.kernels import group_norm

from .support import close, each_dtype, expected, half_dtype, needs_memory, randn

SHAPES = [
    ((2, 320, 8, 8), 32),  # groups of 10, in blocks of 120 channels and a rest
    ((1, 640, 5, 7), 32),
    ((3, 960, 3, 5), 32),  # groups of 30
    ((2, 1280, 1, 1), 32),  # a single pixel
    ((1, 1920, 3, 3), 32),
    ((2, 2560, 2, 3), 32),  # one group a block
    ((1, 30, 9, 7), 3),
    ((2, 30, 1, 1), 30),  # a single value a group: the variance is 0
    ((1, 128, 4, 4), 128),  # groups of one channel
    ((1, 300, 3, 5), 1),  # a group wider than a block
    ((2, 1000, 2, 2), 8),  # groups of 125: no 16 bytes of whole groups
    ((1, 8, 40, 25), 2),  # a thousand pixels, many splits
    ((2, 20, 63), 4),  # (N, C, L)
    ((5, 40), 8),
    ((2, 12, 2, 3, 5), 4),
]


@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_shapes(device, shape, groups):
    x = randn(*shape, dtype=torch.float32, device=device)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = (randn(shape[1], dtype=torch.float32, device=device) for _ in range(2))
    y = group_norm.launch(x, groups, weight, bias, 1e-5)
    close(y, expected(group_norm, x, groups, weight, bias, 1e-5))
    assert y.shape == x.shape
    assert len(shape) != 4 or y.is_contiguous(memory_format=torch.channels_last)


@each_dtype
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_shift_and_silu(device, dtype, shifted, silu):
    x = randn(2, 40, 7, 9, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    weight, bias = (randn(40, dtype=dtype, device=device) for _ in range(2))
    # rows of a wider tensor at an odd offset, as slices of a packed time projection are
    shift = randn(2, 99, dtype=dtype, device=device)[:, 7:47] if shifted else None
    y = group_norm.launch(x, 4, weight, bias, 1e-5, shift=shift, silu=silu)
    assert y.dtype == dtype
    close(y, expected(group_norm, x, 4, weight, bias, 1e-5, shift=shift, silu=silu))


@half_dtype
def test_mixed_dtypes(device, dtype):
    x = randn(1, 40, 5, 5, dtype=dtype, device=device)
    weight = randn(40, dtype=torch.float32, device=device)
    bias = randn(40, dtype=torch.float16, device=device)
    shift = randn(1, 40, dtype=torch.float32, device=device)
    for out_dtype in (torch.float32, dtype):
        y = group_norm.launch(x, 8, weight, bias, 1e-6, shift=shift, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        close(y, expected(group_norm, x, 8, weight, bias, 1e-6, shift=shift))


@pytest.mark.parametrize("has_weight", [False, True])
def test_without_weight_or_bias(device, has_weight):
    x = randn(2, 24, 3, 3, dtype=torch.float32, device=device)
    vector = randn(24, dtype=torch.float32, device=device)
    weight, bias = (vector, None) if has_weight else (None, vector)
    close(group_norm.launch(x, 4, weight, bias, 1e-5), expected(group_norm, x, 4, weight, bias, 1e-5))


def _layouts(x):
    last = x.to(memory_format=torch.channels_last)
    yield "contiguous", x.contiguous()
    yield "offset", last[1:]  # dense, but not at the start of its memory
    yield "rows", last[:, :, 1:]
    yield "columns", last[..., ::2]
    yield "channels", last[:, 8:40]
    yield "transposed", last.transpose(2, 3)


def test_strided_inputs(device):
    for name, x in _layouts(randn(2, 48, 5, 6, dtype=torch.float16, device=device)):
        y = group_norm.launch(x, 4, None, None, 1e-5)
        assert y.is_contiguous(memory_format=torch.channels_last), name
        close(y, expected(group_norm, x, 4, None, None, 1e-5))


def test_large_mean(device):
    """E[x^2] - E[x]^2 would be off by more than the variance here."""
    x = randn(2, 40, 9, 9, dtype=torch.float32, device=device, mean=3000.0, std=0.3)
    # the mean itself is only known to 2**-24 * 3000, which is 6e-4 of a standard deviation
    close(group_norm.launch(x, 4, None, None, 1e-5), expected(group_norm, x, 4, None, None, 1e-5), scale=200)


def test_large_mean_only_in_some_channels(device):
    """Means that differ inside a group are variance, not offset."""
    x = randn(1, 40, 8, 8, dtype=torch.float32, device=device)
    x[:, ::3] += 500.0
    close(group_norm.launch(x, 4, None, None, 1e-5), expected(group_norm, x, 4, None, None, 1e-5), scale=10)


def test_outlier_at_the_first_pixel(device):
    """The first pixel is what the deviations are taken from."""
    x = randn(1, 40, 8, 8, dtype=torch.float32, device=device)
    x[:, :, 0, 0] = 1e4
    close(group_norm.launch(x, 4, None, None, 1e-5), expected(group_norm, x, 4, None, None, 1e-5), scale=10)


def test_nan_stays_in_its_group(device):
    x = randn(2, 40, 6, 6, dtype=torch.float16, device=device)
    clean = group_norm.launch(x, 4, None, None, 1e-5)
    x[0, 12, 3, 3] = float("nan")
    x[1, 5, 0, 0] = float("inf")
    y = group_norm.launch(x, 4, None, None, 1e-5)
    bad = torch.zeros(2, 4, dtype=torch.bool, device=device)
    bad[0, 1] = bad[1, 0] = True
    per_group = y.reshape(2, 4, -1)
    assert per_group[bad].isnan().all()
    assert torch.equal(per_group[~bad], clean.reshape(2, 4, -1)[~bad])


def test_results_repeat(device):
    x = randn(2, 320, 9, 9, dtype=torch.float16, device=device)
    assert torch.equal(*(group_norm.launch(x, 32, None, None, 1e-5, silu=True) for _ in range(2)))


def test_empty_batch_and_float64(device):
    assert group_norm.launch(randn(0, 8, 3, 3, dtype=torch.float16, device=device), 2, None, None, 1e-5).shape[0] == 0
    x = torch.randn(1, 8, 3, 3, dtype=torch.float64, device=device)
    torch.testing.assert_close(group_norm.launch(x, 2, None, None, 1e-5), F.group_norm(x, 2))


def test_channel_blocks_hold_all_groups():
    for groups in (1, 2, 3, 8, 30, 32, 64, 1000):
        for width in (1, 2, 3, 8, 10, 20, 30, 40, 60, 80, 125, 128, 200):
            blocks, each = group_norm._channel_blocks(groups, width)
            assert blocks * each >= groups > (blocks - 1) * each
            assert each * width <= max(128, width)


def test_reference_is_torch_group_norm():
    x, weight, bias, shift = torch.randn(2, 24, 5, 5), torch.randn(24), torch.randn(24), torch.randn(2, 24)
    target = F.silu(F.group_norm(x + shift[:, :, None, None], 6, weight, bias, 1e-5))
    torch.testing.assert_close(group_norm.reference(x, 6, weight, bias, 1e-5, shift=shift, silu=True), target)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("channels", "size"), [(320, 64), (960, 64), (1920, 32), (2560, 16), (2560, 8), (320, 128)])
def test_unet_shapes(dtype, channels, size):
    device = torch.device("cuda")
    x = randn(2, channels, size, size, dtype=dtype, device=device, mean=0.5)
    x = x.to(memory_format=torch.channels_last)
    weight, bias = (randn(channels, dtype=dtype, device=device) for _ in range(2))
    shift = randn(2, 2 * channels, dtype=dtype, device=device)[:, channels:]
    y = group_norm.launch(x, 32, weight, bias, 1e-5, shift=shift, silu=True)
    close(y, expected(group_norm, x, 32, weight, bias, 1e-5, shift=shift, silu=True))


@pytest.mark.gpu
def test_beyond_32_bits():
    needs_memory(24)
    x = torch.randn(72, 320, 320, 320, dtype=torch.float16, device="cuda")  # 2.4e9 elements
    x = x.to(memory_format=torch.channels_last)
    y = group_norm.launch(x, 32, None, None, 1e-5)
    for image in (0, 65, 71):
        close(y[image : image + 1], expected(group_norm, x[image : image + 1], 32, None, None, 1e-5))
