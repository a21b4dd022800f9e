from __future__ import annotations

import functools
import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from kernels.support import half_dtype, randn
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.linear import linear_layer_norm as kernel
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.float16

# rows, columns, terms of a sum
SIZES = [(1, 1280, 1280), (63, 640, 640), (129, 320, 72), (700, 160, 64), (700, 80, 8), (1, 80, 1280), (1, 320, 8)]
SIZES += [(129, 1280, 8), (63, 160, 72), (2048, 1280, 1280), (1976, 1280, 640), (5000, 640, 640), (5000, 1280, 72)]
SIZES += [(1976, 320, 320), (129, 640, 1280), (2048, 160, 640), (20000, 320, 64), (40001, 80, 72), (18432, 640, 64)]
FITTING = [(size, tile) for size in SIZES for tile in kernel.TILES if kernel._fits(tile, size[1])]
each_tile = pytest.mark.parametrize("tile", kernel.TILES, ids=str)


def operands(size, dtype=HALF, device=CUDA):
    """x, weight, bias, residual, factor, offset, eps, such that the sums are of the size of one."""
    rows, columns, depth = size
    x = randn(rows, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, std=depth**-0.5)
    residual = randn(rows, columns, dtype=dtype, device=device)
    bias, factor, offset = (randn(columns, dtype=dtype, device=device) for _ in range(3))
    return [x, weight, bias, residual, factor, offset, 1e-5]


def by(tile, args, after=None, records=None):
    return kernel._launch(*args, after, records, tile)


def widened(args):
    """In float64, where they are: a GPU is quicker at it."""
    return [t.double() if isinstance(t, torch.Tensor) else t for t in args]


def once(actual, target, absolute=1e-4):
    """One rounding, and what sums in float32 leave."""
    rounding = torch.finfo(actual.dtype).eps / 2
    torch.testing.assert_close(actual.double(), target, rtol=1.05 * rounding, atol=absolute)


def right(results, args, absolute=1e-4):
    """The sum by one rounding; the norm as that of the sum that was rounded."""
    (total, y), (x, weight, bias, residual, *norm) = results, widened(args)
    wanted = F.linear(x, weight, bias)
    once(total, wanted if residual is None else wanted + residual)
    once(y, layer_norm.reference(total.double(), *norm), absolute)
    assert total.dtype == y.dtype == args[0].dtype
    assert total.is_contiguous() and y.is_contiguous()


def alike(results, args):
    """As right as kernels are that round between them."""
    for result, wanted in zip(results, kernel.reference(*widened(args)), strict=True):
        assert result.shape == wanted.shape
        assert (result.double() - wanted).norm() <= 2e-3 * wanted.norm()


def same(results, others):
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@functools.lru_cache(maxsize=2)  # tiles follow each other
def case(size, dtype):
    return operands(size, dtype)


@pytest.fixture
def fused(monkeypatch):
    """A failure if the two kernels run that the one stands for."""
    monkeypatch.setattr(add_layer_norm, "launch", None)
    monkeypatch.setattr(layer_norm, "launch", None)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("size", "tile"), FITTING, ids=str)
def test_sizes(size, tile, dtype):
    args = case(size, dtype)
    first = by(tile, args)
    right(first, args)
    assert same(first, by(tile, args))


@pytest.mark.gpu
@each_tile
@half_dtype
def test_what_is_there(tile, dtype):
    x, weight, *rest, eps = operands((2 * 350, 640, 72), dtype)
    x, rest[1] = x.view(2, 350, 72), rest[1].view(2, 350, 640)
    after = randn(640, dtype=dtype, device=CUDA)
    for there in product((False, True), repeat=4):
        args = [x, weight, *(t if given else None for t, given in zip(rest, there, strict=True)), eps]
        total, y = by(tile, args)
        assert total.shape == y.shape == (2, 350, 640)
        right((total, y), args)
        # the norm is of the sum before
        assert same(by(tile, args, after), (total + after, y))


@pytest.mark.gpu
@each_tile
@pytest.mark.parametrize("rows", [1, 129, 200, 700])
def test_nothing_is_written_beyond_the_last_row(monkeypatch, rows, tile):
    def roomy(shape, **options):
        count = math.prod(shape)
        memory = torch.full((count + 256 * 640,), math.nan, **options)
        beyond.append(memory[count:])
        return memory[:count].view(shape)

    args, beyond = operands((rows, 640, 64)), []
    needed = kernel._records_of(rows, 640, tile)
    records = torch.zeros(needed + 4096, dtype=torch.int64, device=CUDA)
    monkeypatch.setattr(torch, "empty", roomy)
    right(by(tile, args, records=records), args)
    assert len(beyond) == 2 and all(memory.isnan().all() for memory in beyond)
    assert records[needed:].eq(0).all()
    # each block leaves the number of the launch twice for each of its rows
    assert records[:needed].view(torch.int32).view(-1, 4)[:, 1::2].eq(1).all()


@pytest.mark.gpu
@each_tile
@pytest.mark.parametrize("few", [1, 19, 40])
def test_blocks_that_take_several_tiles(monkeypatch, few, tile):
    for columns in (columns for columns in (320, 640, 1280) if kernel._fits(tile, columns)):
        args = operands((1976, columns, 200))
        wanted = by(tile, args)
        right(wanted, args)
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "multiprocessors", lambda device: few)
            records = torch.zeros(kernel._records_of(1976, columns, tile), dtype=torch.int64, device=CUDA)
            for _ in range(3):
                assert same(by(tile, args, records=records), wanted)


@pytest.mark.gpu
@each_tile
def test_records_serve_launch_after_launch(tile):
    rows, columns, depths = 1000, 640, (64, 640, 8, 200)
    records = torch.zeros(kernel._records_of(rows, columns, tile), dtype=torch.int64, device=CUDA)
    cases = [operands((rows, columns, depth)) for depth in depths]
    cases[1][3] = cases[2][2] = None
    wanted = [by(tile, args) for args in cases]
    results = [[by(tile, args, records=records) for args in cases] for _ in range(25)]
    for results_ in results:
        assert all(map(same, results_, wanted))
    # wherever the count stands
    for start in (-1, 2**31 - 1, -(2**31)):
        records.view(torch.int32).view(-1, 4)[:, 1::2] = start
        assert all(same(by(tile, args, records=records), other) for args, other in zip(cases, wanted, strict=True))


@pytest.mark.gpu
@each_tile
def test_in_a_cuda_graph(tile):
    cases = [operands((700, 1280, depth)) for depth in (64, 640, 1280)]
    count = kernel._records_of(700, 1280, tile)
    by(tile, cases[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        records = torch.zeros(count, dtype=torch.int64, device=CUDA)
        results = [by(tile, args, records=records) for args in cases]
    for _ in range(3):
        for args in cases:
            args[0].copy_(torch.randn_like(args[0]))
        for _ in range(20):
            graph.replay()
        for result, args in zip(results, cases, strict=True):
            assert same(result, by(tile, args))


@pytest.mark.gpu
@each_tile
def test_two_streams_at_once(tile):
    """Blocks of each wait for such as the other's may keep from beginning."""
    pairs = [(tile, operands((2048, 1280, 320))), (kernel.TILES[3], operands((500, 1280, 1280)))]
    wanted = [by(*pair) for pair in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    records = [
        torch.zeros(kernel._records_of(len(args[0]), 1280, tile), dtype=torch.int64, device=CUDA)
        for tile, args in pairs
    ]
    for _ in range(3):
        torch.cuda._sleep(30_000_000)  # while these are queued
        results = [[], []]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(40):
            for i, (stream, (some, args)) in enumerate(zip(streams, pairs, strict=True)):
                with torch.cuda.stream(stream):
                    results[i].append(by(some, args, records=records[i]))
        torch.cuda.synchronize()
        for some, other in zip(results, wanted, strict=True):
            assert all(same(result, other) for result in some)


@pytest.mark.gpu
@each_tile
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_stay_in_their_row(tile, bad):
    args = operands((300, 640, 72))
    total, y = by(tile, args)
    rows = [0, 63, 130, 299]
    others = [i for i in range(300) if i not in rows]
    spoilt = [args[0].clone(), *args[1:]]
    spoilt[0][rows, 5] = bad
    found, normed = by(tile, spoilt)
    assert not found[rows].isfinite().any() and normed[rows].isnan().all()
    assert same((found[others], normed[others]), (total[others], y[others]))
    spoilt = [*args[:3], args[3].clone(), *args[4:]]
    spoilt[3][rows, 177] = bad
    found, normed = by(tile, spoilt)
    assert normed[rows].isnan().any(1).all() and torch.equal(normed[others], y[others])
    assert not found[rows, 177].isfinite().any()
    found[rows, 177] = total[rows, 177]
    assert torch.equal(found, total)


@pytest.mark.gpu
@each_tile
def test_a_large_mean_costs_no_digits(tile):
    args = operands((700, 640, 72))
    args[3] = args[3] * 4 + 1500  # in steps of 1
    right(by(tile, args), args, absolute=1e-3)  # of means near 1500 float32 knows 1e-4


@pytest.mark.gpu
@each_tile
def test_rows_that_are_constant(tile):
    args = operands((130, 640, 64))
    x, weight, bias, residual, factor, offset, eps = args
    bias.fill_(0.25)
    args = [x.zero_(), weight, bias, residual.fill_(3.0), factor, offset, eps]
    total, y = by(tile, args)
    assert total.eq(3.25).all()
    torch.testing.assert_close(y, offset.expand(130, 640), rtol=1e-3, atol=1e-3)


UNETS = [(8192, 320, 320), (2048, 640, 640), (512, 1280, 1280), (2048, 1280, 1280), (2048, 1280, 5120)]
UNETS += [(8192, 640, 640), (1976, 1280, 1280), (18432, 640, 640), (32768, 320, 320), (4608, 1280, 1280)]
UNETS += [(4608, 1280, 5120)]


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("size", UNETS, ids=str)
def test_unet_shapes(fused, size, dtype):
    args = operands(size, dtype)
    args[0], args[3] = args[0].view(2, size[0] // 2, size[2]), args[3].view(2, size[0] // 2, size[1])
    first = kernel.launch(*args)
    right(first, args)
    records = torch.zeros(kernel.record_count(*size, args[0].device), dtype=torch.int64, device=CUDA)
    for _ in range(2):
        assert same(kernel.launch(*args, records=records), first)
    after = randn(size[1], dtype=dtype, device=CUDA)
    assert same(kernel.launch(*args, after, records), (first[0] + after, first[1]))
    args[3] = None
    right(kernel.launch(*args, records=records), args)


@pytest.mark.gpu
def test_strided_rows(fused, monkeypatch):
    monkeypatch.setattr(kernel, "profitable", lambda *args: True)
    _, weight, bias, _, *norm = operands((1, 1280, 1280))
    wide = randn(4, 600, 1300, dtype=HALF, device=CUDA)
    for x in (wide[1:, :, :1280], wide[:, ::2, 20:], wide.transpose(0, 1)[..., 8:1288], wide[:, 3:, 1:1281]):
        args = [x, weight, bias, randn(*x.shape, dtype=HALF, device=CUDA), *norm]
        right(kernel.launch(*args), args)


def others():
    """What has the sizes that pay, and cannot be read."""
    x, weight, bias, residual, factor, offset, eps = operands((2048, 1280, 1280))
    wide = randn(1280, 1288, dtype=HALF, device=CUDA, std=1280**-0.5)
    norm = factor, offset, eps
    floats = [t.float() for t in (x, weight, bias, residual, factor, offset)]
    yield "all in float32", [*floats, eps]
    yield "weight by rows of more", [x, wide[:, :1280], bias, residual, *norm]
    yield "weight at 2 bytes", [x, wide.view(-1)[1 : 1 + 1280 * 1280].view(1280, 1280), bias, residual, *norm]
    odd = randn(1 + x.numel(), dtype=HALF, device=CUDA)[1:].view(x.shape)
    yield "x at 2 bytes", [odd, weight, bias, residual, *norm]
    yield "bias at 2 bytes", [x, weight, randn(1281, dtype=HALF, device=CUDA)[1:], residual, *norm]
    yield "every other factor", [x, weight, bias, residual, randn(2560, dtype=HALF, device=CUDA)[::2], offset, eps]
    yield "a residual for all rows", [x, weight, bias, bias, *norm]
    yield "a residual in float32", [x, weight, bias, residual.float(), *norm]
    yield "a residual by columns", [x, weight, bias, residual.T.contiguous().T, *norm]
    yield "a factor in float32", [x, weight, bias, residual, factor.float(), offset, eps]
    yield "1288 columns", operands((2048, 1288, 1280))
    yield "1284 terms", operands((2048, 1280, 1284))
    yield "too few rows", operands((100, 1280, 1280))
    yield "no rows", [x[:0], weight, bias, residual[:0], *norm]


@pytest.mark.gpu
def test_what_the_kernel_does_not_take():
    assert kernel.accepts(*operands((2048, 1280, 1280))[:6]) is None
    for name, args in others():
        x, weight, *_ = args
        if name in ("1288 columns", "too few rows"):
            assert not kernel.profitable(len(x), *weight.shape, x.device), name
        elif name != "x at 2 bytes":  # which only the maps refuse
            assert kernel.accepts(*args[:6]), name
        alike(kernel.launch(*args), args)
    x, weight, *rest, _ = operands((2048, 1280, 1280))
    assert kernel.accepts(x, weight, rest[0].view(1, 1280), *rest[1:])
    assert kernel.accepts(x, weight, *rest, rest[0].float())
    assert kernel.accepts(x.cpu(), weight, *rest)
    assert kernel.accepts(x, weight.bfloat16(), *rest)
    assert kernel.accepts(x[:, :640], weight, *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
def test_without_the_kernel(monkeypatch, added):
    def unavailable(*args):
        raise nvrtc.Unavailable("no")

    args = operands((2048, 1280, 1280))
    args[3] = args[3] if added else None
    after = randn(1280, dtype=HALF, device=CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_launch", unavailable)
        alike(kernel.launch(*args), args)
        total, y = kernel.launch(*args)
        assert same(kernel.launch(*args, after)[1:], [y])
        alike(kernel.launch(*args, after), [*args, after])


@pytest.mark.gpu(gigabytes=24)
@each_tile
def test_beyond_31_bits(tile):
    rows = (1 << 31) // 1280 + 1000
    x, weight, bias, _, *norm = operands((8, 1280, 64))
    x = torch.randn(rows, 64, dtype=HALF, device=CUDA)
    total, y = by(tile, [x, weight, bias, None, *norm])
    assert total.numel() > 2**31
    for some in (slice(0, 300), slice(rows // 2, rows // 2 + 300), slice(rows - 300, rows)):
        right((total[some], y[some]), [x[some], weight, bias, None, *norm])


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_on_a_cpu_the_kernels_follow_each_other(added, later):
    x, weight, bias, residual, *norm = operands((70, 80, 64), torch.float32, CPU)
    after = randn(80, dtype=torch.float32, device=CPU) if later else None
    found = kernel.launch(x, weight, bias, residual if added else None, *norm, after)
    if added:
        wanted = add_layer_norm.launch(F.linear(x, weight), residual, *norm, None, bias, after)
    else:
        total = F.linear(x, weight, bias)
        wanted = total if after is None else total + after, layer_norm.launch(total, *norm)
    assert same(found, wanted)
    args = [x, weight, bias, residual if added else None, *norm, after]
    for result, other in zip(found, kernel.reference(*widened(args)), strict=True):
        torch.testing.assert_close(result.double(), other, rtol=1e-4, atol=1e-5)


def test_the_reference_is_what_it_stands_for():
    x, weight, bias, residual, factor, offset, eps = operands((70, 80, 64), torch.float64, CPU)
    after = randn(80, dtype=torch.float64, device=CPU)
    summed = F.linear(x, weight, bias) + residual
    normed = F.layer_norm(summed, (80,), factor, offset, eps)
    for wanted, given in ((summed, None), (summed + after, after)):
        total, y = kernel.reference(x, weight, bias, residual, factor, offset, eps, given)
        torch.testing.assert_close(total, wanted)
        torch.testing.assert_close(y, normed)
    total, y = kernel.reference(x, weight, None, None, None, None, eps)
    torch.testing.assert_close(total, x @ weight.T)
    torch.testing.assert_close(y, F.layer_norm(total, (80,), eps=eps))


def test_the_reference_norms_the_sum_that_was_rounded():
    args = operands((70, 80, 64), torch.bfloat16, CPU)
    right(kernel.reference(*args), args)
    total, y = kernel.reference(*args)
    after = randn(80, dtype=torch.bfloat16, device=CPU)
    assert same(kernel.reference(*args, after), (total + after, y))
