from __future__ import annotations

import math

import pytest
import torch

from kernels.support import close, each_dtype, expected, few_parts, half_dtype, paths, randn
from sfast_ext.kernels.group_norm import cat_group_norm, group_norm

# channels of both, height and width, groups
SHAPES = [
    ((320, 160, 8, 8), 32),
    ((640, 320, 5, 7), 32),  # groups of 30: one has channels of both
    ((1280, 640, 3, 3), 32),
    ((20, 10, 9, 7), 3),
    ((1, 29, 1, 1), 30),
    ((200, 100, 3, 5), 1),
    ((7, 9, 40, 25), 2),
    ((100, 60, 9, 11), 8),
    ((8, 8, 35, 31), 2),
    ((24, 36, 129, 1), 6),
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


# shapes for kernels one after the other, beside those that no path takes: these kernels have tests of their own
ONE_BY_ONE = ((320, 160, 8, 8), (20, 10, 9, 7))


def taken(cases):
    """Shapes and groups, each with the paths that do something of their own there."""
    found = []
    for shape, groups in cases:
        *own, rest = paths("none", math.prod(shape[2:]), groups, sum(shape[:2]) // groups)
        found += [(path, shape, groups) for path in own]
        if not own or shape in ONE_BY_ONE:
            found.append((rest, shape, groups))
    return found


def operands(batch, shape, dtype, device):
    first, second, *size = shape
    a, b = (
        randn(batch, channels, *size, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        for channels in (first, second)
    )
    bias = randn(first, dtype=dtype, device=device)
    weight, term = (randn(first + second, dtype=dtype, device=device) for _ in range(2))
    return a, bias, b, weight, term


@pytest.mark.parametrize(("path", "shape", "groups"), taken(SHAPES), indirect=["path"], ids=str)
def test_shapes(device, path, shape, groups):
    a, bias, b, weight, term = operands(2, shape, torch.float32, device)
    residual = randn(*a.shape, dtype=a.dtype, device=device)
    args = (a, bias, residual, b, groups, weight, term, 1e-5)
    for y, exact in zip(cat_group_norm.launch(*args), expected(cat_group_norm, *args), strict=True):
        assert y.is_contiguous(memory_format=torch.channels_last)
        close(y, exact)


IMAGES = [((320, 160, 8, 8), 8), ((640, 320, 5, 7), 8), ((24, 16, 16, 16), 8)]


@pytest.mark.parametrize(("path", "shape", "groups"), taken(IMAGES), indirect=["path"], ids=str)
def test_patches(device, path, shape, groups):
    a, bias, b, weight, term = operands(2, shape, torch.float32, device)
    args = (a, bias, None, b, groups, weight, term, 1e-5, True, None, True)
    for y, exact in zip(cat_group_norm.launch(*args), expected(cat_group_norm, *args), strict=True):
        close(y, exact)


@pytest.mark.thinned
@each_path
@pytest.mark.parametrize("path", ["whole", "parts", "none"], indirect=True)
@each_dtype
@pytest.mark.parametrize("has", ["bias", "residual", "both", "neither"])
def test_dtypes(device, dtype, has):
    a, bias, b, weight, term = operands(3, (40, 24, 7, 9), dtype, device)
    bias = bias if has in ("bias", "both") else None
    residual = randn(*a.shape, dtype=dtype, device=device) if has in ("residual", "both") else None
    joined, y = cat_group_norm.launch(a, bias, residual, b, 4, weight, term, 1e-5, silu=True)
    assert joined.dtype == y.dtype == dtype
    if has == "neither":
        assert torch.equal(joined, torch.cat([a, b], 1))
    close(joined, expected(cat_group_norm, a, bias, residual, b, 4, weight, term, 1e-5)[0])
    close(y, expected(group_norm, joined, 4, weight, term, 1e-5, silu=True))


@each_path
@half_dtype
def test_mixed_dtypes(device, dtype):
    a, _, b, weight, _ = operands(1, (40, 24, 5, 5), dtype, device)
    joined, y = cat_group_norm.launch(a, None, None, b, 8, weight.float(), None, 1e-6, out_dtype=torch.float32)
    assert (joined.dtype, y.dtype) == (dtype, torch.float32)
    close(y, expected(group_norm, joined, 8, weight.float(), None, 1e-6))


@each_path
def test_strided_inputs(device):
    last = randn(3, 48, 6, 6, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    for x in (last[1:], last[:, 8:40], last[:, :, 1:], last[..., ::2], last.contiguous(), last.transpose(2, 3)):
        other = randn(x.shape[0], 16, *x.shape[2:], dtype=torch.float16, device=device)
        for a, b in ((x, other), (other, x)):
            joined, y = cat_group_norm.launch(a, None, None, b, 4, None, None, 1e-5)
            assert torch.equal(joined, torch.cat([a, b], 1))
            close(y, expected(group_norm, joined, 4, None, None, 1e-5))


@each_path
def test_nan_of_one_half_stays_there(device):
    a, _, b, *_ = operands(2, (32, 16, 6, 6), torch.float16, device)
    clean = cat_group_norm.launch(a, None, None, b, 6, None, None, 1e-5)[1].reshape(2, 6, -1)
    b[1, 9, 2, 2] = float("nan")
    y = cat_group_norm.launch(a, None, None, b, 6, None, None, 1e-5)[1].reshape(2, 6, -1)
    bad = torch.zeros(2, 6, dtype=torch.bool, device=device)
    bad[1, 5] = True
    assert y[bad].isnan().all() and torch.equal(y[~bad], clean[~bad])


def test_float64(device):
    a, b = (torch.randn(1, c, 3, 3, dtype=torch.float64, device=device) for c in (8, 4))
    args = (a, None, None, b, 2, None, None, 1e-5)
    for y, exact in zip(cat_group_norm.launch(*args), cat_group_norm.reference(*args)):
        torch.testing.assert_close(y, exact)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("shape", [(640, 320, 64), (1280, 640, 32), (1280, 1280, 16), (320, 320, 128), (1280, 1280, 8)])
def test_unet_shapes(dtype, shape):
    first, second, size = shape
    a, bias, b, weight, term = operands(2, (first, second, size, size), dtype, torch.device("cuda"))
    joined, y = cat_group_norm.launch(a, bias, None, b, 32, weight, term, 1e-5, silu=True)
    close(joined, expected(cat_group_norm, a, bias, None, b, 32, weight, term, 1e-5)[0])
    close(y, expected(group_norm, joined, 32, weight, term, 1e-5, silu=True))
