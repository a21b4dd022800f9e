"""Hopper's products of 8 bits against float64, on one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from kernels.support import TOLERANCE, half_dtype
from sfast_ext.kernels.backend import pdl
from sfast_ext.kernels.eight_bits import wgmma_gemm8 as kernel
from sfast_ext.kernels.eight_bits.wgmma_gemm8 import GEGLU, KINDS, PLAIN, RESIDUAL, TILES

CUDA = torch.device("cuda")
SDXL = [(3840, 1280), (1280, 1280), (1280, 5120), (1920, 640), (640, 640), (640, 2560)]
GATED = [(5120, 1280), (2560, 640)]
ODD = list(product((1, 77, 130, 2049), (8, 72, 1288), (48, 320, 1296)))
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def values(kind, *shape):
    """int8 of the whole range; small integers in float8, whose sums are exact in what its products are added up in."""
    if kind == torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=CUDA)
    return torch.randint(-2, 3, shape, device=CUDA).float().to(kind)


def operands(rows, columns, depth, kind, dtype):
    """x, x_scale, weight, weight_scale, bias and residual; products are about 1."""
    x, weight = values(kind, rows, depth), values(kind, columns, depth)
    std = 73.3 if kind == torch.int8 else 2**0.5
    x_scale = (torch.rand(rows, device=CUDA) + 0.5) / std
    weight_scale = (torch.rand(columns, device=CUDA) + 0.5) / (std * depth**0.5)
    bias, residual = (torch.randn(*shape, device=CUDA).to(dtype) for shape in ((columns,), (rows, columns)))
    return x, x_scale, weight, weight_scale, bias, residual


def target(x, x_scale, weight, weight_scale, bias=None, residual=None):
    """In float64."""
    rows = x.double() if x.dtype == torch.int8 else x.float().double()
    columns = weight.double() if x.dtype == torch.int8 else weight.float().double()
    out = (rows * x_scale.double()[:, None]) @ (columns * weight_scale.double()[:, None]).T
    out = out if bias is None else out + bias.double()
    return out if residual is None else out + residual.double()


def near(y, wanted, scale=1):
    """As `support.close`, on the GPU."""
    relative, absolute = TOLERANCE[y.dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=relative * scale, atol=absolute * scale)


def gated(product_, gate_first=False, approximate="none"):
    first, second = product_.chunk(2, -1)
    value, gate = (second, first) if gate_first else (first, second)
    return value * F.gelu(gate, approximate=approximate)


def check(rows, columns, depth, kind, dtype, epilogue, tile=None):
    if epilogue == GEGLU:
        *given, _ = operands(rows, 2 * columns, depth, kind, dtype)
        assert kernel.accepts(*given, None, dtype, geglu=True) is None
        y = kernel.geglu(*given, dtype=dtype, tile=tile)
        near(y, gated(target(*given)), scale=4)
    else:
        *given, residual = operands(rows, columns, depth, kind, dtype)
        residual = residual if epilogue == RESIDUAL else None
        assert kernel.accepts(*given, residual, dtype) is None
        wanted = target(*given, residual)
        y = kernel.linear(*given, residual, dtype, tile=tile)
        assert residual is None or y is residual
        near(y, wanted)
    assert y.shape == (rows, columns) and y.dtype == dtype


@each_kind
@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL, GEGLU])
def test_one_tile_says_where_every_value_lies(kind, epilogue):
    """A weight of one value in each row, each with its scale: a wrong swizzle, row or column shows as another value."""
    rows, columns, depth = 128, 128, 128
    x = values(kind, rows, depth)
    weight = torch.eye(columns, depth, device=CUDA).roll(5, 1).to(kind)
    scales = [torch.rand(n, device=CUDA) + 0.5 for n in (rows, columns)]
    bias, residual = torch.randn(columns, device=CUDA).half(), torch.randn(rows, columns, device=CUDA).half()
    if epilogue == GEGLU:
        given = x, scales[0] / 32, weight, scales[1], bias
        near(kernel.geglu(*given), gated(target(*given)), scale=4)
    else:
        given = x, scales[0], weight, scales[1], bias
        wanted = target(*given, residual if epilogue == RESIDUAL else None)
        near(kernel.linear(*given, residual if epilogue == RESIDUAL else None), wanted)


@each_kind
@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL, GEGLU])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile, epilogue, kind):
    if not kernel.fits(tile, epilogue):
        pytest.skip("no such tile")
    # one step of K; several tiles of each block, of fewer steps than stages; more steps than stages
    for rows, columns, depth in ((130, 72, 48), (5000, 1288, 320), (2049, 640, 1296)):
        check(rows, columns, depth, kind, torch.float16, epilogue, tile)


@each_kind
@half_dtype
@pytest.mark.parametrize("rows", [2048, 4096, 8192])
@pytest.mark.parametrize(("columns", "depth"), SDXL, ids=str)
def test_linear_shapes(columns, depth, rows, dtype, kind):
    check(rows, columns, depth, kind, dtype, PLAIN)
    check(rows, columns, depth, kind, dtype, RESIDUAL)


@each_kind
@half_dtype
@pytest.mark.parametrize("rows", [2048, 4096, 8192])
@pytest.mark.parametrize(("columns", "depth"), GATED, ids=str)
def test_geglu_shapes(columns, depth, rows, dtype, kind):
    check(rows, columns, depth, kind, dtype, GEGLU)


@each_kind
@half_dtype
@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL, GEGLU])
def test_odd_shapes(epilogue, dtype, kind):
    for rows, columns, depth in ODD:
        check(rows, columns, depth, kind, dtype, epilogue)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_which_half_which_gelu(biased, approximate, gate_first):
    for tile in [tile for tile in TILES if kernel.fits(tile, GEGLU)]:
        *given, bias, _ = operands(333, 2 * 168, 640, torch.int8, torch.float16)
        bias = bias if biased else None
        y = kernel.geglu(*given, bias, gate_first, approximate, tile=tile)
        near(y, gated(target(*given, bias), gate_first, approximate), scale=4)


@each_kind
def test_without_a_bias(kind):
    for tile in TILES:
        *given, _, residual = operands(333, 168, 640, kind, torch.float16)
        wanted = target(*given), target(*given, None, residual)
        near(kernel.linear(*given, tile=tile), wanted[0])
        near(kernel.linear(*given, None, residual, tile=tile), wanted[1])


def test_sums_of_the_largest_values_are_exact():
    rows, columns, depth = 64, 64, 5120
    x, weight = (torch.full((n, depth), 127, dtype=torch.int8, device=CUDA) for n in (rows, columns))
    weight[1::2] = -127
    one = torch.ones(64, device=CUDA)
    y = kernel.linear(x, one * 2**-12, weight, one, dtype=torch.bfloat16)
    near(y, target(x, one * 2**-12, weight, one))


def test_float8_of_any_value():
    """Products are added up in 14 bits or so, so the error grows with the depth."""
    if len(KINDS) < 2:
        pytest.skip("no float8")
    for rows, columns, depth in ((2048, 640, 640), (2048, 1280, 5120)):
        _, x_scale, _, weight_scale, bias, residual = operands(rows, columns, depth, torch.float8_e4m3fn, torch.float16)
        x, weight = (torch.randn(n, depth, device=CUDA).to(torch.float8_e4m3fn) for n in (rows, columns))
        wanted = target(x, x_scale, weight, weight_scale, bias, residual)
        y = kernel.linear(x, x_scale, weight, weight_scale, bias, residual)
        error = (y.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max() <= 1e-3 + depth / 32 * 2**-13


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nan_stays_in_its_row_and_column(tile):
    x, x_scale, weight, weight_scale, bias, residual = operands(333, 168, 320, torch.int8, torch.float16)
    for more in ((), (residual,)):
        first = kernel.linear(x, x_scale, weight, weight_scale, bias, *[t.clone() for t in more], tile=tile)
        scales = x_scale.clone(), weight_scale.clone()
        scales[0][[3, 200]], scales[1][[0, 167]] = float("nan"), float("nan")
        x[3] = 0
        y = kernel.linear(x, scales[0], weight, scales[1], bias, *[t.clone() for t in more], tile=tile)
        assert y[[3, 200]].isnan().all() and y[:, [0, 167]].isnan().all()
        rows = [i for i in range(333) if i not in (3, 200)]
        assert torch.equal(y[rows, 1:167], first[rows, 1:167])
    if kernel.fits(tile, GEGLU):
        y = kernel.geglu(x, scales[0], weight[:160], scales[1][:160], bias[:160], tile=tile)
        assert y[[3, 200]].isnan().all() and y[:, 0].isnan().all()
        assert y.isnan().sum() == 2 * 80 + 331


def test_infinite_and_large_results():
    x, x_scale, weight, weight_scale, *_ = operands(130, 72, 320, torch.int8, torch.float16)
    y, wanted = kernel.linear(x, x_scale * 1e5, weight, weight_scale), target(x, x_scale * 1e5, weight, weight_scale)
    large, small = wanted.abs() > 65600, wanted.abs() < 65400
    assert large.any() and small.any() and torch.equal(y[large].double(), wanted[large].sign() * float("inf"))
    near(y[small], wanted[small])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nothing_else_is_written(tile):
    """Memory around the result, which is the residual's."""
    for rows, columns in ((77, 8), (129, 168), (2049, 1288)):
        *given, residual = operands(rows, columns, 320, torch.int8, torch.float16)
        around = torch.full((rows * columns + 8192,), 7.0, dtype=torch.float16, device=CUDA)
        place = around[4096:-4096].view(rows, columns)
        place.copy_(residual)
        wanted = target(*given, residual)
        y = kernel.linear(*given, place, tile=tile)
        assert y.data_ptr() == place.data_ptr() and (around[:4096] == 7).all() and (around[-4096:] == 7).all()
        near(y, wanted)


def test_results_repeat():
    for tile in TILES:
        *given, residual = operands(4000, 1288, 1296, torch.int8, torch.bfloat16)
        first = kernel.linear(*given, residual.clone(), torch.bfloat16, tile=tile)
        for _ in range(20):
            assert torch.equal(kernel.linear(*given, residual.clone(), torch.bfloat16, tile=tile), first)


def test_leading_dimensions_and_strides():
    x, x_scale, weight, weight_scale, bias, residual = operands(6 * 40, 72, 64, torch.int8, torch.float16)
    wanted = target(x, x_scale, weight, weight_scale, bias)
    shaped = x.view(6, 40, 64), x_scale.view(6, 40)
    y = kernel.linear(*shaped, weight, weight_scale, bias)
    assert y.shape == (6, 40, 72)
    near(y.view(-1, 72), wanted)
    some = shaped[0][:, ::2], shaped[1][:, ::2]
    assert kernel.accepts(*some, weight, weight_scale, bias) is None
    near(kernel.linear(*some, weight, weight_scale, bias), wanted.view(6, 40, 72)[:, ::2])


def test_in_a_cuda_graph_whose_kernels_begin_early():
    """Each result is the next one's residual, and the weight and the scales are written in the graph."""
    x, x_scale, weight, weight_scale, bias, residual = operands(2048, 640, 640, torch.int8, torch.float16)
    made = [torch.zeros_like(t) for t in (x, x_scale, weight, weight_scale)]
    total = torch.zeros_like(residual)

    def run():
        total.copy_(residual)
        for _ in range(4):
            for to, source in zip(made, (x, x_scale, weight, weight_scale)):
                to.zero_()
                to.copy_(source)
            for tile in TILES:
                kernel.linear(*made, bias, total, tile=tile)
        return total

    run()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side), pdl.pdl_capture([]):
        graph.capture_begin()
        run()
        graph.capture_end()
    torch.cuda.synchronize()
    for _ in range(5):
        x.copy_(values(torch.int8, *x.shape))
        wanted = run().clone()
        total.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, wanted)


@pytest.mark.gpu(gigabytes=40)
def test_beyond_32_bits():
    x, x_scale, weight, weight_scale, bias, _ = operands(140000, 16384, 64, torch.int8, torch.float16)
    y = kernel.linear(x, x_scale, weight, weight_scale, bias)  # 2.3e9 values
    for rows in (slice(0, 8), slice(131000, 131200), slice(-5, None)):
        near(y[rows], target(x[rows], x_scale[rows], weight, weight_scale, bias))
