from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import each_dtype, half_dtype, randn
from sfast_ext.kernels.conv import upsample

SIZES = [
    ((3, 5), (6, 10)),
    ((15, 9), (29, 17)),
    ((8, 8), (8, 8)),
    ((7, 4), (3, 2)),
    ((1, 1), (5, 3)),
    ((21, 13), (41, 25)),
]


def torchs(x, size):
    return F.interpolate(x, size=size, mode="nearest")


def steps(x, size):
    return tuple(float(torch.tensor(a / b, dtype=torch.float32)) for a, b in zip(x.shape[2:], size))


@each_dtype
@pytest.mark.parametrize(("before", "after"), SIZES, ids=str)
def test_sizes(device, dtype, before, after):
    x = randn(2, 24, *before, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    y = upsample.launch(x, after, steps(x, after))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, torchs(x, after))


def test_strided_inputs(device):
    dense = randn(3, 80, 6, 6, dtype=torch.float16, device=device)
    last = dense.to(memory_format=torch.channels_last)
    for x in (dense, last[1:], last[:, 8:40], last[:, :, 1:], last[..., ::2], last.transpose(2, 3)):
        size = (2 * x.shape[2], 2 * x.shape[3])
        assert torch.equal(upsample.launch(x, size, (0.5, 0.5)), torchs(x, size))


@each_dtype
def test_of_a_sum(device, dtype):
    x, residual = (randn(2, 24, 7, 5, dtype=dtype, device=device) for _ in range(2))
    for some in (residual, residual.to(memory_format=torch.channels_last)):
        y = upsample.launch(x.to(memory_format=torch.channels_last), (14, 10), (0.5, 0.5), some)
        if device.type == "cuda" or dtype != torch.bfloat16:
            assert torch.equal(y, torchs(x + residual, (14, 10)))
        else:  # if the interpreter cuts off instead of rounding
            torch.testing.assert_close(y, torchs(x + residual, (14, 10)), rtol=2**-7, atol=0)
    other = residual.double()
    assert torch.equal(upsample.launch(x, (14, 10), (0.5, 0.5), other), torchs(x + other, (14, 10)))


def test_what_the_kernel_does_not_take(device):
    x = torch.randn(2, 8, 3, 3, dtype=torch.float64, device=device)
    assert torch.equal(upsample.launch(x, (6, 6), (0.5, 0.5)), torchs(x, (6, 6)))
    assert upsample.launch(x[:0], (6, 6), (0.5, 0.5)).shape == (0, 8, 6, 6)


def test_reference_is_torch():
    for before, after in SIZES:
        x = torch.randn(2, 3, *before)
        assert torch.equal(upsample.reference(x, after, steps(x, after)), torchs(x, after))
    x = torch.randn(1, 2, 5, 7)
    for scale in (2.0, 1.6, 0.7):
        y = F.interpolate(x, scale_factor=scale, mode="nearest")
        step = float(torch.tensor(1 / scale, dtype=torch.float32))
        assert torch.equal(upsample.reference(x, tuple(y.shape[2:]), (step, step)), y)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("channels", "size"), [(1280, 8), (1280, 16), (640, 32), (640, 64), (1280, 32)])
def test_unet_shapes(dtype, channels, size):
    x = randn(2, channels, size, size, dtype=dtype, device=torch.device("cuda"))
    x = x.to(memory_format=torch.channels_last)
    assert torch.equal(upsample.launch(x, (2 * size, 2 * size), (0.5, 0.5)), torchs(x, (2 * size, 2 * size)))
