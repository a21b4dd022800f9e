from __future__ import annotations

import math

import pytest
import torch

from kernels.support import close, each_dtype, expected, few_parts, half_dtype, paths, randn
from sfast_ext.kernels.group_norm import add_group_norm, group_norm

SHAPES = [
    ((2, 320, 8, 8), 32),
    ((1, 640, 5, 7), 32),
    ((2, 1280, 1, 1), 32),
    ((1, 1920, 3, 3), 32),
    ((1, 30, 9, 7), 3),
    ((2, 30, 1, 1), 30),
    ((1, 300, 3, 5), 1),
    ((2, 1000, 2, 2), 8),
    ((1, 8, 40, 25), 2),
    ((3, 160, 9, 11), 8),
    ((2, 96, 23, 17), 4),
    ((2, 512, 16, 16), 4),
    ((1, 16, 35, 31), 2),
    ((1, 60, 129, 1), 6),
]


# if an image is of one part, many parts are the same once more
@pytest.fixture(params=["whole", "parts", "none"])
def path(request, monkeypatch):
    """One path; what it does not take is done by kernels one after the other."""
    name = request.param.removeprefix("many ")
    monkeypatch.setattr(group_norm, "_PATHS", () if name == "none" else (name,))
    if name != request.param:
        few_parts(monkeypatch)


each_path = pytest.mark.usefixtures("path")
every_path = pytest.mark.parametrize("path", ["whole", "parts", "many parts", "none"], indirect=True)


# shapes for kernels one after the other, beside those that no path takes: these kernels have tests of their own
ONE_BY_ONE = ((2, 320, 8, 8), (1, 30, 9, 7))


def taken(cases):
    """Shapes and groups, each with the paths that do something of their own there."""
    found = []
    for shape, groups in cases:
        *own, rest = paths("none", math.prod(shape[2:]), groups, shape[1] // groups)
        found += [(path, shape, groups) for path in own]
        if not own or shape in ONE_BY_ONE:
            found.append((rest, shape, groups))
    return found


def operands(shape, dtype, device):
    x, residual = (randn(*shape, dtype=dtype, device=device).to(memory_format=torch.channels_last) for _ in range(2))
    bias, weight, term = (randn(shape[1], dtype=dtype, device=device) for _ in range(3))
    return x, bias, residual, weight, term


def check(got, target, dtype):
    for y, exact in zip(got, target, strict=True):
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        close(y, exact)


@pytest.mark.parametrize(("path", "shape", "groups"), taken(SHAPES), indirect=["path"], ids=str)
def test_shapes(device, path, shape, groups):
    x, bias, residual, weight, term = operands(shape, torch.float32, device)
    args = (x, bias, residual, 0.7, groups, weight, term, 1e-5)
    check(add_group_norm.launch(*args), expected(add_group_norm, *args), torch.float32)


IMAGES = [((2, 320, 8, 8), 8), ((1, 640, 5, 7), 8), ((2, 40, 16, 16), 8)]


@pytest.mark.parametrize(("path", "shape", "groups"), taken(IMAGES), indirect=["path"], ids=str)
def test_patches(device, path, shape, groups):
    x, bias, residual, weight, term = operands(shape, torch.float32, device)
    args = (x, bias, residual, 0.7, groups, weight, term, 1e-5, True, None, True)
    for y, exact in zip(add_group_norm.launch(*args), expected(add_group_norm, *args), strict=True):
        close(y, exact)


@pytest.mark.thinned
@each_path
@pytest.mark.parametrize("path", ["whole", "parts", "none"], indirect=True)
@each_dtype
@pytest.mark.parametrize("has", ["bias", "residual", "both", "neither"])
def test_operands(device, dtype, has):
    x, bias, residual, weight, term = operands((2, 48, 7, 9), dtype, device)
    bias = bias if has in ("bias", "both") else None
    residual = residual if has in ("residual", "both") else None
    total, y = add_group_norm.launch(x, bias, residual, 1.0, 4, weight, term, 1e-5, silu=True)
    exact, _ = expected(add_group_norm, x, bias, residual, 1.0, 4, weight, term, 1e-5, silu=True)
    close(total, exact)
    # the norm of the sum as it was stored: rounding it is part of the operation
    close(y, expected(group_norm, total, 4, weight, term, 1e-5, silu=True))


@each_path
@half_dtype
def test_mixed_dtypes_and_no_affine(device, dtype):
    x, bias, residual, *_ = operands((1, 64, 5, 5), dtype, device)
    weight = randn(64, dtype=torch.float32, device=device)
    for out_dtype in (torch.float32, dtype):
        total, y = add_group_norm.launch(x, bias.float(), residual, 1.0, 8, weight, None, 1e-6, out_dtype=out_dtype)
        assert (total.dtype, y.dtype) == (dtype, out_dtype)
        close(y, expected(group_norm, total, 8, weight, None, 1e-6))
    wide = residual.float()  # the kernel reads both alike: the sum is made by the other one
    total, y = add_group_norm.launch(x, bias, wide, 1.0, 8, None, None, 1e-6)
    close(total, expected(add_group_norm, x, bias, wide, 1.0, 8, None, None, 1e-6)[0])
    close(y, expected(group_norm, total, 8, None, None, 1e-6))


@pytest.mark.thinned("shape", "dtype")
@every_path
@half_dtype
@pytest.mark.parametrize(("shape", "groups"), [((2, 96, 23, 17), 4), ((1, 60, 129, 1), 6), ((2, 320, 8, 8), 32)])
def test_over_a_summand(device, path, shape, groups, dtype):
    x, bias, residual, weight, term = operands(shape, dtype, device)
    args = (bias, residual, 0.7, groups, weight, term, 1e-5, True)
    apart = add_group_norm.launch(x, *args)
    total, over = add_group_norm.launch(x, *args, out=(None, x))
    assert torch.equal(total, apart[0]) and torch.equal(over, apart[1])
    taken = group_norm.fitting(shape[2] * shape[3], groups, shape[1] // groups)[0] != "whole"
    assert (over.data_ptr() == x.data_ptr()) == taken == group_norm.accepts_out(x, groups, fused=True)
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())


@each_path
def test_strided_inputs(device):
    last = randn(3, 48, 6, 6, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    for x in (last[1:], last[:, 8:40], last[:, :, 1:], last[..., ::2], last.contiguous(), last.transpose(2, 3)):
        residual = randn(*x.shape, dtype=torch.float16, device=device)
        for a, b in ((x, residual), (residual, x)):
            total, y = add_group_norm.launch(a, None, b, 1.0, 4, None, None, 1e-5)
            close(total, expected(add_group_norm, a, None, b, 1.0, 4, None, None, 1e-5)[0])
            close(y, expected(group_norm, total, 4, None, None, 1e-5))


@every_path
def test_results_repeat_and_large_means(device, path):
    x, bias, residual, weight, term = operands((2, 96, 12, 12), torch.float32, device)
    args = (x + 3000.0, bias, residual, 1.0, 8, weight, term, 1e-5)
    first, again = add_group_norm.launch(*args), add_group_norm.launch(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    close(first[1], expected(group_norm, first[0], 8, weight, term, 1e-5), scale=200)


def test_float64_and_empty(device):
    x = torch.randn(1, 8, 3, 3, dtype=torch.float64, device=device)
    args = (x, None, x, 1.0, 2, None, None, 1e-5)
    for y, exact in zip(add_group_norm.launch(*args), add_group_norm.reference(*args)):
        torch.testing.assert_close(y, exact)
    total, y = add_group_norm.launch(x[:0].float(), None, None, 1.0, 2, None, None, 1e-5)
    assert total.shape == y.shape == (0, 8, 3, 3)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("channels", "size"), [(320, 64), (640, 32), (1280, 16), (1280, 8), (320, 128), (320, 192)])
def test_unet_shapes(dtype, channels, size):
    x, bias, residual, weight, term = operands((2, channels, size, size), dtype, torch.device("cuda"))
    total, y = add_group_norm.launch(x, bias, residual, 1.0, 32, weight, term, 1e-5, silu=True)
    close(total, expected(add_group_norm, x, bias, residual, 1.0, 32, weight, term, 1e-5)[0])
    close(y, expected(group_norm, total, 32, weight, term, 1e-5, silu=True))
