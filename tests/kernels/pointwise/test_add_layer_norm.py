from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, each_dtype, expected, half_dtype, randn
from sfast_ext.kernels.pointwise import add_layer_norm

SHAPES = [(63, 30), (1, 1), (3, 7, 320), (5, 1000), (2, 3, 1280), (3, 8192)]


def _check(x, residual, weight, bias, **kwargs):
    """The sum is torch's own; y is the layer norm of that rounded sum."""
    total, y = add_layer_norm.launch(x, residual, weight, bias, 1e-5, **kwargs)
    assert total.dtype == x.dtype
    # the interpreter cuts off where a card rounds to nearest bfloat16
    close(total, (x.double() + residual.double()).cpu())
    close(y, expected(add_layer_norm, total, torch.zeros_like(total), weight, bias, 1e-5)[1])
    return total, y


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    x, residual = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    total, y = _check(x, residual, weight, bias)
    assert total.shape == y.shape == x.shape
    assert y.dtype == dtype


@each_dtype
def test_shift(device, dtype):
    x, residual = (randn(9, 63, dtype=dtype, device=device) for _ in range(2))
    shift, weight, bias = (randn(63, dtype=dtype, device=device) for _ in range(3))
    for some in (shift, randn(126, dtype=torch.float32, device=device)[::2]):
        total, y = add_layer_norm.launch(x, residual, weight, bias, 1e-5, shift=some)
        close(total, expected(add_layer_norm, x, residual, weight, bias, 1e-5, shift=some)[0])
        close(y, expected(add_layer_norm, total, torch.zeros_like(total), weight, bias, 1e-5)[1])


@each_dtype
def test_after(device, dtype):
    """What is handed out has a bias more than what is normed."""
    x, residual = (randn(9, 63, dtype=dtype, device=device) for _ in range(2))
    after, weight, bias = (randn(63, dtype=dtype, device=device) for _ in range(3))
    plain, y = add_layer_norm.launch(x, residual, weight, bias, 1e-5)
    total, same = add_layer_norm.launch(x, residual, weight, bias, 1e-5, post_bias=after)
    assert torch.equal(y, same)
    close(total, (plain.double() + after.double()).cpu())


@half_dtype
def test_mixed_dtypes(device, dtype):
    x = randn(9, 63, dtype=dtype, device=device)
    residual = randn(9, 63, dtype=torch.float32, device=device)
    weight = randn(63, dtype=torch.float32, device=device)
    for out_dtype in (torch.float32, dtype):
        assert _check(x, residual, weight, None, out_dtype=out_dtype)[1].dtype == out_dtype


def test_sum_is_that_of_torch(device):
    """Bit for bit: the next residual add starts from it."""
    x, residual = (randn(9, 63, dtype=torch.float16, device=device) for _ in range(2))
    assert torch.equal(add_layer_norm.launch(x, residual, None, None, 1e-5)[0], x + residual)


def test_strided_and_offset_inputs(device):
    x = randn(12, 9, 64, dtype=torch.float16, device=device)
    for view in (x[1:], x[:, ::2], x[..., 3:60], x.transpose(1, 2)):
        _check(view, randn(*view.shape, dtype=torch.float16, device=device), None, None)
    _check(x.transpose(0, 1).contiguous(), x.transpose(0, 1), None, None)


def test_large_mean(device):
    x, residual = (randn(7, 320, dtype=torch.float32, device=device, mean=mean, std=0.3) for mean in (3000.0, -500.0))
    total, y = add_layer_norm.launch(x, residual, None, None, 1e-5)
    # the mean itself is only known to 2**-24 * 2500, which is 4e-4 of a standard deviation
    close(y, expected(add_layer_norm, total, torch.zeros_like(total), None, None, 1e-5)[1], scale=200)


def test_what_the_kernel_does_not_take(device):
    x = torch.randn(3, 8, device=device)
    for residual in (torch.randn(8, device=device), torch.randn(3, 8, dtype=torch.float64, device=device)):
        total, y = add_layer_norm.launch(x, residual, None, None, 1e-5)
        torch.testing.assert_close(total, (x + residual).float())
        torch.testing.assert_close(y, F.layer_norm((x + residual).float(), (8,)))
    empty = randn(0, 8, dtype=torch.float16, device=device)
    assert add_layer_norm.launch(empty, empty, None, None, 1e-5)[1].shape == (0, 8)


def test_reference_is_torch():
    x, residual, weight, bias = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24), torch.randn(24)
    total, y = add_layer_norm.reference(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.layer_norm(x + residual, (24,), weight, bias, 1e-5))


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns"), [(8192, 320), (2048, 640), (512, 1280), (2048, 1280), (8192, 640)])
def test_unet_shapes(dtype, rows, columns):
    x, residual = (randn(rows, columns, dtype=dtype, device=torch.device("cuda")) for _ in range(2))
    weight, bias = (randn(columns, dtype=dtype, device=x.device) for _ in range(2))
    total, _ = _check(x, residual, weight, bias)
    assert torch.equal(total, x + residual)
