"""RMS and layer norms with scales and shifts of samples, gated sums before them: against float64, at odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, each_dtype, expected, expected_there, half_dtype, randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.pointwise import gated_norm, gated_residual, modulated_norm

SHAPES = [(2, 5, 64), (1, 3, 768), (3, 2, 77), (1, 2, 3840), (2, 2, 2, 96), (4, 1), (1, 2, 5120)]


@pytest.fixture
def device(cuda_device):
    return cuda_device


def per_sample(shape, dtype, device, count=1):
    """Vectors of samples as a model has them: parts of a wider product, not next to each other."""
    wide = randn(shape[0], *[1] * (len(shape) - 2), (count + 1) * shape[-1], dtype=dtype, device=device)
    return wide.chunk(count + 1, -1)[1:]


@pytest.mark.thinned("shape", "dtype")
@each_dtype
@pytest.mark.parametrize("rms", [True, False], ids=["RMS", "layer"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, rms, shape):
    x = randn(*shape, dtype=dtype, device=device, mean=2.0)
    weight, bias = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    scale, shift = per_sample(shape, dtype, device, 2)
    for given in ((weight, None, 1e-5), (None, None, 1e-3, scale, shift), (weight, bias, 1e-6, scale, shift)):
        for plus_one in (False, True):
            y = modulated_norm.launch(x, *given, rms=rms, plus_one=plus_one)
            assert y.dtype == dtype
            close(y, expected(modulated_norm, x, *given, rms=rms, plus_one=plus_one), scale=2)


GATED = [(1e-5, True, True), (1e-5, False, True), (None, False, True), (1e-6, True, False), (None, True, True)]
"""Epsilon of the inner norm, whether tanh is applied, whether there is a gate."""


@pytest.mark.thinned("inner_eps", "shape", "dtype", rounds=2)
@each_dtype
@pytest.mark.parametrize(("inner_eps", "tanh", "gated"), GATED)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] not in (768, 96, 5120)], ids=str)
def test_gated_sums(device, dtype, inner_eps, tanh, gated, shape):
    x, y = (randn(*shape, dtype=dtype, device=device, std=2.0) for _ in range(2))
    weight, bias, inner_weight = (randn(shape[-1], dtype=dtype, device=device) for _ in range(3))
    gate, scale, shift = per_sample(shape, dtype, device, 3)
    operands = (x, y, gate if gated else None, None if inner_eps is None else inner_weight, inner_eps, tanh)
    total = gated_residual.launch(*operands)
    close(total, expected(gated_residual, *operands), scale=2)
    for norm in ((weight, None, 1e-5, scale, None, True, True), (None, bias, 1e-6, scale, shift, False, True)):
        both, normed = gated_norm.launch(*operands, *norm)
        assert torch.equal(both, total)
        # of the sum as it is rounded: rounding it another way moves the norm
        close(normed, expected(modulated_norm, total, *norm), scale=2)


def test_an_inner_norm_without_weight(device):
    x, y = (randn(2, 3, 96, dtype=torch.bfloat16, device=device) for _ in range(2))
    close(gated_residual.launch(x, y, None, None, 1e-6), expected(gated_residual, x, y, None, None, 1e-6), scale=2)


SHARED = {
    "of all rows": lambda b, s, c: (c,),
    "of all rows, with dimensions": lambda b, s, c: (1, 1, c),
    "of a sample": lambda b, s, c: (b, 1, c),
    "of a token": lambda b, s, c: (b, s, c),
}


@half_dtype
@pytest.mark.parametrize("how", SHARED)
def test_who_shares_a_vector(device, dtype, how):
    shape = (3, 4, 96)
    x, y = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    gate, scale, shift = (randn(*SHARED[how](*shape), dtype=dtype, device=device) for _ in range(3))
    close(modulated_norm.launch(x, None, None, 1e-6, scale, shift), expected(
        modulated_norm, x, None, None, 1e-6, scale, shift), scale=2)  # fmt: skip
    close(gated_residual.launch(x, y, gate), expected(gated_residual, x, y, gate), scale=2)


def test_vectors_that_are_expanded(device):
    x = randn(2, 5, 64, dtype=torch.float16, device=device)
    scale = randn(2, 1, 64, dtype=torch.float16, device=device).expand(2, 5, 64)
    close(modulated_norm.launch(x, None, None, 1e-6, scale), expected(modulated_norm, x, None, None, 1e-6, scale))
    one = randn(1, 1, 64, dtype=torch.float16, device=device).expand(2, 1, 64)
    close(modulated_norm.launch(x, None, None, 1e-6, one), expected(modulated_norm, x, None, None, 1e-6, one))


@pytest.mark.parametrize("start", [1, 2, 3, 4, 8])
def test_odd_places(device, start):
    """Vectors, rows and weights that begin at other places than 16 bytes."""
    whole = randn(2, 3, 200, dtype=torch.bfloat16, device=device)
    x = whole[..., start : start + 96]
    scale = whole[:, :1, start : start + 96]
    weight = randn(200, dtype=torch.bfloat16, device=device)[start : start + 96]
    given = (weight, None, 1e-5, scale)
    close(modulated_norm.launch(x, *given, rms=True), expected(modulated_norm, x, *given), scale=2)
    sums, normed = gated_norm.launch(x, x, scale, weight, 1e-5, True, *given)
    close(sums, expected(gated_residual, x, x, scale, weight, 1e-5, True), scale=2)
    close(normed, expected(modulated_norm, sums, *given), scale=2)


def test_rows_do_not_mix(device):
    x = randn(4, 3, 64, dtype=torch.float16, device=device)
    x[1, 1] = torch.inf
    x[0, 0] = 0
    for rms in (True, False):
        y = modulated_norm.launch(x, None, None, 1e-6, rms=rms)
        finite = torch.isfinite(y.cpu()).all(-1)
        assert not finite[1, 1] and int(finite.sum()) == 11 and not y[0, 0].any()
    scale = torch.ones(4, 1, 64, dtype=torch.float16, device=device)
    scale[2] = torch.nan
    broken = torch.isnan(modulated_norm.launch(torch.ones_like(x), None, None, 1e-6, scale).cpu()).all(-1)
    assert broken.tolist() == [[False] * 3, [False] * 3, [True] * 3, [False] * 3]


def test_values_that_half_precision_barely_holds(device):
    """The original computes squares in float32 as well."""
    x = torch.full((1, 2, 512), 6e4, dtype=torch.float16, device=device)
    close(modulated_norm.launch(x, None, None, 1e-6), torch.ones(1, 2, 512, dtype=torch.float64))
    y, gate = x.clone(), torch.full((512,), 20.0, dtype=torch.float16, device=device)
    close(gated_residual.launch(-x, y, gate, None, None, True), torch.zeros(1, 2, 512, dtype=torch.float64))


def test_closer_to_float32_than_the_operations_one_by_one(device):
    """What a model computes rounds after the norm, after the weight, the sum with 1, and each product and sum."""
    for dtype in (torch.float16, torch.bfloat16):
        x, y = (randn(2, 9, 768, dtype=dtype, device=device) for _ in range(2))
        weight = randn(768, dtype=dtype, device=device)
        gate, scale = per_sample((2, 9, 768), dtype, device, 2)
        normed = (y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight
        eager = x + gate.tanh() * normed
        exact = expected(gated_residual, x, y, gate, weight, 1e-5, True)
        ours = gated_residual.launch(x, y, gate, weight, 1e-5, True)
        assert (ours.cpu().double() - exact).norm() < (eager.cpu().double() - exact).norm()
        eager = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight * (1 + scale)
        exact = expected(modulated_norm, x, weight, None, 1e-5, scale, plus_one=True)
        ours = modulated_norm.launch(x, weight, None, 1e-5, scale, plus_one=True)
        assert (ours.cpu().double() - exact).norm() < (eager.cpu().double() - exact).norm()


REFUSED = {
    "float64": lambda x, v: (x.double(), None, None, 1e-6),
    "a weight of another dtype": lambda x, v: (x, v[0, 0].float(), None, 1e-6),
    "a scale of distant rows": lambda x, v: (x, None, None, 1e-6, v.transpose(0, 1)),
    "rows that are too long": lambda x, v: (torch.ones(1, 70000, dtype=torch.float16, device=x.device), None, None, 1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_take(device, what, monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    x, vectors = (randn(3, 3, 64, dtype=torch.float16, device=device) for _ in range(2))
    args = REFUSED[what](x, vectors[:, :1])
    y = modulated_norm.launch(*args)
    torch.testing.assert_close(y.cpu().double(), expected(modulated_norm, *args), rtol=2e-3, atol=2e-3)
    assert len(counted) == 1


def test_references_are_torch():
    x, weight, bias = torch.randn(3, 5, 24), torch.randn(24), torch.randn(24)
    layer = modulated_norm.reference(x, weight, bias, 1e-5, rms=False)
    torch.testing.assert_close(layer, F.layer_norm(x, [24], weight, bias, 1e-5))
    scale = torch.randn(3, 1, 24)
    scaled = modulated_norm.reference(x, None, None, 1e-5, scale, scale, False, True)
    torch.testing.assert_close(scaled, F.layer_norm(x, [24], None, None, 1e-5) * (1 + scale) + scale)
    if hasattr(F, "rms_norm"):
        rms = modulated_norm.reference(x, weight, None, 1e-5)
        torch.testing.assert_close(rms, F.rms_norm(x, [24], weight, 1e-5))
        total, normed = gated_norm.reference(x, x, scale, weight, 1e-5, True, None, None, 1e-5)
        torch.testing.assert_close(total, x + scale.tanh() * rms)
        torch.testing.assert_close(normed, F.rms_norm(total, [24], None, 1e-5))


def test_no_rows(device):
    x = randn(2, 0, 64, dtype=torch.float16, device=device)
    assert modulated_norm.launch(x, None, None, 1e-6).shape == gated_residual.launch(x, x, None).shape == x.shape


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("shape", [(1, 4352, 3840), (2, 4352, 2304), (2, 4096, 2048), (1, 4608, 3072)], ids=str)
def test_shapes_of_transformers(dtype, shape):
    device = torch.device("cuda")
    x, y = (randn(*shape, dtype=dtype, device=device, std=2.0) for _ in range(2))
    weight, inner_weight = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    gate, scale, shift = per_sample(shape, dtype, device, 3)
    total, normed = gated_norm.launch(x, y, gate, inner_weight, 1e-5, True, weight, None, 1e-5, scale, None, True, True)
    close(total, expected_there(gated_residual, x, y, gate, inner_weight, 1e-5, True), scale=2)
    close(normed, expected_there(modulated_norm, total, weight, None, 1e-5, scale, None, True, True), scale=2)
    given = (None, None, 1e-6, scale, shift, False, True)
    close(modulated_norm.launch(x, *given), expected_there(modulated_norm, x, *given), scale=2)


@pytest.mark.gpu(gigabytes=16)
def test_beyond_32_bits():
    x = torch.randn(1, 850_001, 2560, dtype=torch.float16, device="cuda")  # 2.2e9 elements
    close(modulated_norm.launch(x, None, None, 1e-6)[:, -9:], expected(modulated_norm, x[:, -9:], None, None, 1e-6))
