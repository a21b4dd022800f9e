from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, each_dtype, expected, half_dtype, randn
from sfast_ext.kernels.pointwise import geglu

SHAPES = [(63, 30), (1, 2), (3, 7, 640), (2, 1000), (3, 5, 514)]


@each_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape, approximate):
    x = randn(*shape, dtype=dtype, device=device, std=2.0)
    y = geglu.launch(x, approximate=approximate)
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert y.dtype == dtype
    close(y, expected(geglu, x, approximate=approximate))


@each_dtype
def test_gate_first(device, dtype):
    x = randn(9, 46, dtype=dtype, device=device)
    y = geglu.launch(x, gate_first=True)
    close(y, expected(geglu, x, gate_first=True))
    swapped = torch.cat([x[:, 23:], x[:, :23]], -1)
    torch.testing.assert_close(y, geglu.launch(swapped), rtol=0, atol=0)


def test_exact_gelu_is_exact(device):
    """Over all gates that matter, in float32, to some of its last bits."""
    gate = torch.linspace(-9, 9, 4001, device=device)
    x = torch.stack([torch.ones_like(gate), gate], -1)
    torch.testing.assert_close(geglu.launch(x).double().cpu(), expected(geglu, x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_extreme_gates(device, approximate):
    gate = torch.tensor([-60000.0, -100.0, -6.0, -0.0, 0.0, 6.0, 100.0, 60000.0], device=device)
    x = torch.cat([torch.ones_like(gate), gate]).half()[None]
    close(geglu.launch(x, approximate=approximate), expected(geglu, x, approximate=approximate))


def test_strided_and_offset_inputs(device):
    x = randn(12, 10, 64, dtype=torch.float16, device=device)
    for view in (x[1:], x[:, ::2], x[..., 3:61], x.transpose(1, 2)):
        close(geglu.launch(view), expected(geglu, view))


def test_what_the_kernel_does_not_take(device):
    assert geglu.launch(randn(0, 8, dtype=torch.float16, device=device)).shape == (0, 4)
    x = torch.randn(3, 8, dtype=torch.float64, device=device)
    torch.testing.assert_close(geglu.launch(x), x[:, :4] * F.gelu(x[:, 4:]))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_reference_is_torch(approximate):
    x = torch.randn(5, 24)
    target = x[:, :12] * F.gelu(x[:, 12:], approximate=approximate)
    torch.testing.assert_close(geglu.reference(x, approximate=approximate), target)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns"), [(8192, 2560), (2048, 5120), (512, 10240), (8192, 5120)])
def test_unet_shapes(dtype, rows, columns):
    x = randn(rows, columns, dtype=dtype, device=torch.device("cuda"))
    close(geglu.launch(x), expected(geglu, x))


@pytest.mark.gpu(gigabytes=16)
def test_beyond_32_bits():
    x = torch.randn(850_001, 2560, dtype=torch.float16, device="cuda")  # 2.2e9 elements
    close(geglu.launch(x)[-9:], expected(geglu, x[-9:]))
