"""SwiGLU against float64: odd shapes, halves of a packed product, extreme gates."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, each_dtype, expected, expected_there, half_dtype, randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.pointwise import swiglu

SHAPES = [(63, 15), (1, 1), (3, 7, 320), (2, 500), (3, 5, 257), (2, 2, 3, 40), (1, 10240), (9,), (300, 8), (5, 2, 688)]


@pytest.fixture
def device(cuda_device):
    return cuda_device


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    gate, value = (randn(*shape, dtype=dtype, device=device, std=3.0) for _ in range(2))
    y = swiglu.launch(gate, value)
    assert y.shape == shape and y.dtype == dtype
    close(y, expected(swiglu, gate, value))


@each_dtype
@pytest.mark.parametrize("columns", [64, 30, 33])
def test_halves_of_a_packed_product(device, dtype, columns):
    packed = randn(2, 5, 2 * columns + 8, dtype=dtype, device=device)
    first, second = packed[..., :columns], packed[..., columns : 2 * columns]
    for gate, value in ((first, second), (second, first), (first[:, ::2], second[:, 1::2][:, [0, 1, 0]])):
        close(swiglu.launch(gate, value), expected(swiglu, gate, value))


def test_extreme_gates(device):
    gate = torch.tensor([-65504.0, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 65504.0], device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        given = gate.to(dtype)
        y = swiglu.launch(given[None], torch.ones_like(given)[None])
        close(y, expected(swiglu, given[None], torch.ones_like(given)[None]))
    assert torch.isnan(swiglu.launch(torch.full((1, 8), torch.nan, device=device), gate[None])).all()


def test_strided_and_transposed(device):
    x = randn(12, 10, 64, dtype=torch.float16, device=device)
    for view in (x[1:], x[:, ::2], x[..., 3:61], x.transpose(1, 2), x.transpose(0, 1)):
        close(swiglu.launch(view, view.sin()), expected(swiglu, view, view.sin()))


def test_what_it_does_not_take(device, monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    x = torch.randn(3, 8, device=device)
    torch.testing.assert_close(swiglu.launch(x.double(), x.double()), F.silu(x.double()) * x.double())
    torch.testing.assert_close(swiglu.launch(x[:1], x), F.silu(x[:1]) * x)
    assert len(counted) == 2
    assert swiglu.launch(x[:0], x[:0]).shape == (0, 8)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns"), [(4352, 10240), (8704, 9216), (4096, 8192)])
def test_shapes_of_transformers(dtype, rows, columns):
    packed = randn(rows, 2 * columns, dtype=dtype, device=torch.device("cuda"))
    gate, value = packed.chunk(2, -1)
    close(swiglu.launch(gate, value), expected_there(swiglu, gate, value))
