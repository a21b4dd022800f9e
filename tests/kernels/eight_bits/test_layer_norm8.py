from __future__ import annotations

import math

import pytest
import torch

from kernels.eight_bits.codes import same_codes
from kernels.support import each_dtype, half_dtype, randn
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.eight_bits import layer_norm8
from sfast_ext.kernels.pointwise import layer_norm


@pytest.fixture
def device(quantiser_device):
    return quantiser_device


SHAPES = [(63, 30), (1, 1), (3, 7, 320), (190, 40), (5, 1000), (2, 3, 1280), (1, 8192), (4,), (1, 640), (3, 77)]


def norm(x, weight, bias, eps=1e-5):
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    return layer_norm.reference(*wide, eps)


@pytest.mark.thinned("shape", "dtype")
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    x = randn(*shape, dtype=dtype, device=device, mean=0.5)
    weight, bias = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    # float32 adds up to some thousand values
    same_codes(*layer_norm8.launch(x, weight, bias, 1e-5), norm(x, weight, bias), decided=2e-3, ulps=60)


@pytest.mark.parametrize("has_weight", [False, True])
def test_without_weight_or_bias(device, has_weight):
    x, vector = (randn(*shape, dtype=torch.float16, device=device) for shape in ((5, 320), (320,)))
    weight, bias = (vector, None) if has_weight else (None, vector)
    same_codes(*layer_norm8.launch(x, weight, bias, 1e-5), norm(x, weight, bias), decided=2e-3, ulps=60)


def test_views(device):
    x = randn(12, 9, 64, dtype=torch.float16, device=device)
    for view in (x[1:], x[:, ::2], x[..., 3:60], x.transpose(0, 1), x.transpose(1, 2)):
        same_codes(*layer_norm8.launch(view, None, None, 1e-5), norm(view, None, None), decided=2e-3, ulps=60)


def test_rows_of_equal_values_and_of_what_is_no_number(device):
    x = randn(9, 40, dtype=torch.float16, device=device)
    x[1] = 3  # of which the norm is zeros
    x[4, 7], x[6, 3] = math.nan, math.inf
    q, scale = layer_norm8.launch(x, None, None, 1e-5)
    assert scale.isnan().tolist() == [row in (4, 6) for row in range(9)]
    assert not q[[4, 6]].any()
    # a GPU rounds the mean of 40 equal values
    assert (q[1] * scale[1]).abs().max() <= 1e-4 and (device.type == "cuda" or scale[1] == 1)
    fine = [0, 2, 3, 5, 7, 8]
    same_codes(q[fine], scale[fine], norm(x[fine], None, None), decided=2e-3, ulps=60)


def test_it_is_the_norm_before_it_is_rounded(device):
    x = randn(64, 320, dtype=torch.float16, device=device)
    q, scale = layer_norm8.launch(x, None, None, 1e-5)
    wanted = layer_norm8.reference(x, None, None, 1e-5)
    assert (q != wanted[0]).sum() <= 20
    torch.testing.assert_close(scale, wanted[1], rtol=1e-5, atol=0)
    rounded = layer_norm.reference(x, None, None, 1e-5)
    assert not torch.equal(rounded.float().abs().amax(-1) / 127, scale)


def test_what_it_does_not_take(monkeypatch):
    x = torch.ones(3, 8, dtype=torch.float64)
    y = torch.randn(2, 20000)
    for operands in ((x, None, None), (y, None, None), (y.half(), torch.ones(20000), None)):
        q, scale = layer_norm8.launch(*operands, 1e-5)
        assert q.dtype == torch.int8 and scale.dtype == torch.float32 and q.shape == operands[0].shape
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    assert "several dtypes" in str(layer_norm8.accepts(layer_norm8.Operands(y, weight=x[0])))
    assert "too long" in str(layer_norm8.accepts(layer_norm8.Operands(y)))
    assert "another shape" in str(layer_norm8.accepts(layer_norm8.Operands(y[:, :8], y[:1, :8])))


def test_an_empty_tensor(device):
    q, scale = layer_norm8.launch(torch.ones(0, 8, dtype=torch.float16, device=device), None, None, 1e-5)
    assert q.shape == (0, 8) and scale.shape == (0,)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns"), [(8192, 320), (2048, 640), (512, 1280), (2048, 1280), (154, 2048)])
def test_unet_shapes(dtype, rows, columns):
    x = randn(rows, columns, dtype=dtype, device=torch.device("cuda"), mean=0.5)
    weight, bias = (randn(columns, dtype=dtype, device=x.device) for _ in range(2))
    same_codes(*layer_norm8.launch(x, weight, bias, 1e-5), norm(x, weight, bias), decided=2e-3, ulps=60)
