from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close_rows, half_dtype, randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.linear import linear_gelu


def operands(rows, columns, depth, dtype, device):
    x = randn(*rows, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, std=2 * depth**-0.5)
    return x, weight, randn(columns, dtype=dtype, device=device)


def test_reference_is_torch():
    x, weight, bias = operands((2, 5), 8, 3, torch.float32, torch.device("cpu"))
    wanted = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    torch.testing.assert_close(linear_gelu.reference(x, weight, bias), wanted)
    torch.testing.assert_close(linear_gelu.launch(x, weight, bias), wanted)


def test_why_it_declines(monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = operands((2, 5), 8, 3, dtype, torch.device("cpu"))
        assert linear_gelu.launch(x, weight, bias).dtype == dtype
    assert counted == ["no half precision, or several dtypes"] * 2


SHAPES = [((2, 512), 3072, 768), ((3, 37), 24, 40), ((1,), 8, 8), ((1, 4096), 12288, 3072), ((7, 3, 5), 96, 64)]


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_one_product(dtype, rows, columns, depth, monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    x, weight, bias = operands(rows, columns, depth, dtype, torch.device("cuda"))
    y = linear_gelu.launch(x, weight, bias)
    assert not counted and y.shape == (*rows, columns) and y.dtype == dtype
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh").cpu()
    close_rows(y, exact, scale=1.5)
    eager = F.gelu(F.linear(x, weight, bias), approximate="tanh").cpu().double()
    assert (y.cpu().double() - exact).norm() <= 1.02 * (eager - exact).norm()


@pytest.mark.gpu
def test_rows_that_lie_apart():
    x, weight, bias = operands((4, 6), 16, 16, torch.float16, torch.device("cuda"))
    for some in (x.transpose(0, 1), x[:, ::2], x[..., :16]):
        exact = F.gelu(F.linear(some.double(), weight.double(), bias.double()), approximate="tanh").cpu()
        close_rows(linear_gelu.launch(some, weight, bias), exact, scale=1.5)
