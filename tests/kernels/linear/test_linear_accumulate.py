from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, half_dtype, randn
from sfast_ext.kernels.linear import linear_accumulate


def operands(rows, columns, depth, dtype, device):
    x = randn(*rows, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, std=depth**-0.5)
    return x, weight, randn(*rows, columns, dtype=dtype, device=device)


def test_reference_is_torch():
    x, weight, total = operands((2, 5), 8, 3, torch.float32, torch.device("cpu"))
    before = total.clone()
    torch.testing.assert_close(linear_accumulate.reference(x, weight, total), F.linear(x, weight) + total)
    assert torch.equal(total, before)
    assert torch.equal(linear_accumulate.launch(x, weight, total), linear_accumulate.reference(x, weight, total))


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [((2, 4096), 320, 1280), ((2, 256), 1280, 5120), ((2, 1024), 1280, 5120), ((3, 37), 24, 40), ((1,), 8, 8)],
)
def test_written_over_the_sum(dtype, rows, columns, depth):
    x, weight, total = operands(rows, columns, depth, dtype, torch.device("cuda"))
    product = F.linear(x.double(), weight.double()).cpu()
    wanted = product + total.double().cpu()
    y = linear_accumulate.launch(x, weight, total)
    assert y.data_ptr() == total.data_ptr()
    # cuBLAS may round the product before it adds, as torch's own operations do
    rounding = torch.finfo(dtype).eps / 2 * (product.abs() + wanted.abs())
    assert bool(((y.double().cpu() - wanted).abs() <= 1.5 * rounding + 1e-4).all())


@pytest.mark.gpu
def test_what_it_does_not_write_over():
    x, weight, total = operands((4, 6), 8, 16, torch.float16, torch.device("cuda"))
    for some in (total.transpose(0, 1).contiguous().transpose(0, 1), total.float()):
        before = some.clone()
        close(linear_accumulate.launch(x, weight, some), linear_accumulate.reference(x, weight, before).double().cpu())
        assert torch.equal(some, before)
