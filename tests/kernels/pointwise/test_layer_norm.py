from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, each_dtype, expected, half_dtype, randn
from sfast_ext.kernels.pointwise import layer_norm

SHAPES = [(63, 30), (1, 1), (3, 7, 320), (190, 40), (5, 1000), (2, 3, 1280), (3, 8192), (1, 10000), (4,)]


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    x = randn(*shape, dtype=dtype, device=device)
    weight, bias = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    y = layer_norm.launch(x, weight, bias, 1e-5)
    assert y.shape == x.shape
    assert y.dtype == dtype
    close(y, expected(layer_norm, x, weight, bias, 1e-5))


@half_dtype
def test_mixed_dtypes(device, dtype):
    x = randn(9, 63, dtype=dtype, device=device)
    weight = randn(63, dtype=torch.float32, device=device)
    bias = randn(63, dtype=torch.float16, device=device)
    for out_dtype in (torch.float32, dtype):
        y = layer_norm.launch(x, weight, bias, 1e-5, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        close(y, expected(layer_norm, x, weight, bias, 1e-5))


@pytest.mark.parametrize("has_weight", [False, True])
def test_without_weight_or_bias(device, has_weight):
    x, vector = (randn(*shape, dtype=torch.float32, device=device) for shape in ((5, 20), (20,)))
    weight, bias = (vector, None) if has_weight else (None, vector)
    close(layer_norm.launch(x, weight, bias, 1e-5), expected(layer_norm, x, weight, bias, 1e-5))


def test_strided_and_offset_inputs(device):
    x = randn(12, 9, 64, dtype=torch.float16, device=device)
    for view in (x[1:], x[:, ::2], x[..., 3:60], x.transpose(0, 1), x.transpose(1, 2)):
        y = layer_norm.launch(view, None, None, 1e-5)
        assert y.is_contiguous()
        close(y, expected(layer_norm, view, None, None, 1e-5))


def test_large_mean(device):
    x = randn(7, 320, dtype=torch.float32, device=device, mean=3000.0, std=0.3)
    # the mean itself is only known to 2**-24 * 3000, which is 6e-4 of a standard deviation
    close(layer_norm.launch(x, None, None, 1e-5), expected(layer_norm, x, None, None, 1e-5), scale=200)


def test_nan_stays_in_its_row(device):
    x = randn(9, 40, dtype=torch.float16, device=device)
    x[4, 7] = float("nan")
    rows = layer_norm.launch(x, None, None, 1e-5).isnan().any(1)
    assert rows.tolist() == [row == 4 for row in range(9)]


def test_what_the_kernel_does_not_take(device):
    assert layer_norm.launch(randn(0, 8, dtype=torch.float16, device=device), None, None, 1e-5).shape == (
        0,
        8,
    )
    for x in (
        torch.randn(3, 8, dtype=torch.float64, device=device),
        torch.randn(1, 20000, device=device),  # wider than a block
    ):
        torch.testing.assert_close(layer_norm.launch(x, None, None, 1e-5), F.layer_norm(x, x.shape[-1:]))


def test_reference_is_torch_layer_norm():
    x, weight, bias = torch.randn(5, 24), torch.randn(24), torch.randn(24)
    torch.testing.assert_close(layer_norm.reference(x, weight, bias, 1e-5), F.layer_norm(x, (24,), weight, bias, 1e-5))


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns"), [(8192, 320), (2048, 640), (512, 1280), (2048, 1280), (154, 2048)])
def test_unet_shapes(dtype, rows, columns):
    x = randn(rows, columns, dtype=dtype, device=torch.device("cuda"), mean=0.5)
    weight, bias = (randn(columns, dtype=dtype, device=x.device) for _ in range(2))
    close(layer_norm.launch(x, weight, bias, 1e-5), expected(layer_norm, x, weight, bias, 1e-5))


@pytest.mark.gpu(gigabytes=16)
def test_beyond_32_bits():
    x = torch.randn(7_000_001, 320, dtype=torch.float16, device="cuda")  # 2.2e9 elements
    y = layer_norm.launch(x, None, None, 1e-5)
    close(y[-9:], expected(layer_norm, x[-9:], None, None, 1e-5))
