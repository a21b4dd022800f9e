from __future__ import annotations

import pytest
import torch

from kernels.eight_bits.codes import same_codes
from kernels.support import close, each_dtype, half_dtype, randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.eight_bits import add_layer_norm8
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm


@pytest.fixture
def device(quantiser_device):
    return quantiser_device


VECTORS = [(), ("shift",), ("post_bias",), ("shift", "post_bias")]


def check(x, residual, weight, bias, **options):
    total, q, scale = add_layer_norm8.launch(x, residual, weight, bias, 1e-5, **options)
    wanted, _ = add_layer_norm.reference(x, residual, weight, bias, 1e-5, **options)
    close(total, wanted.double().cpu())
    # of the sum as it is rounded: rounding it another way moves the norm
    before = {name: value for name, value in options.items() if name != "post_bias"}
    rounded, _ = add_layer_norm.reference(x, residual, None, None, 1e-5, **before)
    y = layer_norm.reference(*(None if t is None else t.double() for t in (rounded, weight, bias)), 1e-5)
    same_codes(q, scale, y, decided=0.05 if x.dtype != torch.float32 else 5e-3, ulps=4e4)
    assert (q.cpu() != (y.cpu() / scale.cpu().double()[..., None]).round()).float().mean() < 2e-3


@pytest.mark.thinned("shape", "dtype")
@each_dtype
@pytest.mark.parametrize("shape", [(63, 30), (3, 7, 320), (2, 1280), (1, 640), (5, 77)], ids=str)
@pytest.mark.parametrize("vectors", VECTORS, ids=str)
def test_sums(device, dtype, shape, vectors):
    x, residual = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    check(x, residual, weight, bias, **{name: randn(shape[-1], dtype=dtype, device=device) for name in vectors})


def test_the_sum_is_the_other_kernel_s(device):
    x, residual = (randn(9, 320, dtype=torch.float16, device=device) for _ in range(2))
    shift, post_bias = (randn(320, dtype=torch.float16, device=device) for _ in range(2))
    ours = add_layer_norm8.launch(x, residual, None, None, 1e-5, shift, post_bias)[0]
    assert torch.equal(ours, add_layer_norm.launch(x, residual, None, None, 1e-5, None, shift, post_bias)[0])


def test_views(device):
    x = randn(12, 9, 64, dtype=torch.float16, device=device)
    for view in (x[1:], x[:, ::2], x.transpose(0, 1), x[..., 3:60]):
        check(view, view.flip(0), None, None)


def test_what_it_does_not_take():
    registry._declined.clear()
    x = torch.ones(3, 8).half()
    total, q, scale = add_layer_norm8.launch(x, torch.ones(8).half(), None, None, 1e-5)
    assert total.shape == q.shape == (3, 8) and not q.any() and scale.tolist() == [1, 1, 1]
    assert "another shape" in next(iter(registry.declined()["add_layer_norm8"]))


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("rows", "columns"), [(8192, 320), (8192, 640), (2048, 1280)])
def test_unet_shapes(dtype, rows, columns):
    x, residual = (randn(rows, columns, dtype=dtype, device=torch.device("cuda")) for _ in range(2))
    check(x, residual, *(randn(columns, dtype=dtype, device=x.device) for _ in range(2)))
