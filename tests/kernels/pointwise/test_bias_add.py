from __future__ import annotations

import pytest
import torch

from kernels.support import close, each_dtype, expected, half_dtype, randn
from sfast_ext.kernels.pointwise import bias_add

SHAPES = [(2, 320, 5, 7), (1, 30, 9, 7), (3, 4, 1, 1), (1, 1000, 2, 2), (2, 1, 3, 3), (2, 30, 63)]


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    x, residual = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    bias = randn(shape[1], dtype=dtype, device=device)
    y = bias_add.launch(x, bias, residual, 0.5)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert len(shape) != 4 or y.is_contiguous(memory_format=torch.channels_last)
    close(y, expected(bias_add, x, bias, residual, 0.5))


@half_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_operands_and_dtypes(device, dtype, has_bias, has_residual):
    x = randn(2, 24, 3, 5, dtype=dtype, device=device)
    bias = randn(24, dtype=torch.float32, device=device) if has_bias else None
    residual = randn(2, 24, 3, 5, dtype=torch.float32, device=device) if has_residual else None
    y = bias_add.launch(x, bias, residual)
    assert y.dtype == dtype
    close(y, expected(bias_add, x, bias, residual))


def test_strided_inputs(device):
    last = randn(3, 48, 6, 6, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    bias = randn(96, dtype=torch.float16, device=device)[::2]
    for x in (
        last[1:],
        last[:, 8:40],
        last[:, :, 1:],
        last[..., ::2],
        last.contiguous(),
        last.transpose(2, 3),
    ):
        residual = randn(*x.shape, dtype=torch.float16, device=device)
        some = bias[: x.shape[1]]
        close(bias_add.launch(x, some, residual), expected(bias_add, x, some, residual))
        close(bias_add.launch(residual, some, x), expected(bias_add, residual, some, x))


def test_what_the_kernel_does_not_take(device):
    x = torch.randn(2, 8, 3, 3, device=device)
    broadcast = torch.randn(1, 8, 1, 1, device=device)
    torch.testing.assert_close(bias_add.launch(x, None, broadcast, 2.0), (x + broadcast) * 2)
    double = x.double()
    torch.testing.assert_close(bias_add.launch(double, None, double), double * 2)
    assert bias_add.launch(x[:0], None, None).shape == (0, 8, 3, 3)


def test_reference_is_torch():
    x, bias, residual = torch.randn(2, 24, 5, 5), torch.randn(24), torch.randn(2, 24, 5, 5)
    torch.testing.assert_close(
        bias_add.reference(x, bias, residual, 0.7), (x + bias[None, :, None, None] + residual) * 0.7
    )


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("channels", "size"), [(320, 64), (640, 32), (1280, 16), (1280, 8), (320, 128), (4, 64)])
def test_unet_shapes(dtype, channels, size):
    x, residual = (
        randn(2, channels, size, size, dtype=dtype, device=torch.device("cuda")).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    bias = randn(channels, dtype=dtype, device=x.device)
    close(bias_add.launch(x, bias, residual), expected(bias_add, x, bias, residual))
