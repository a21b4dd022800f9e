from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from kernels.support import TOLERANCE, half_dtype
from sfast_ext import kernels
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.attention import query_attention as kernel
from sfast_ext.kernels.backend import nvrtc, triton_runtime

CPU, CUDA, GPU = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0)
HALF = torch.float16
# images, rows, heads, terms of a sum, keys
UNETS = [(2, 1024, 20, 1280, 77), (2, 4096, 10, 640, 77), (2, 988, 20, 1280, 77), (2, 9216, 10, 640, 77)]
UNETS += [(8, 1024, 20, 1280, 77)]
LEFT = [(2, 2304, 20, 1280, 77), (2, 2304, 10, 640, 77), (2, 576, 20, 1280, 77), (2, 144, 20, 1280, 77)]
SMALL = [(2, 100, 5, 200, 77), (3, 70, 10, 264, 80), (1, 1, 20, 256, 5)]
needs_no_interpreter = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs Triton, and TRITON_INTERPRET unset"
)


def packed(images, heads, keys, size=64, dtype=HALF, device=CUDA, factor=1.0):
    """Keys and values as slices of one product; what lies around them is NaN, which would show."""
    columns = heads * size
    both = torch.full((images, keys + 3, 2 * columns + 8), math.nan, dtype=dtype, device=device)
    k, v = both[:, :keys, 8:].chunk(2, -1)
    k.copy_(factor * torch.randn(k.shape, device=device))
    v.copy_(torch.randn(v.shape, device=device))
    return [part.view(images, keys, heads, size).transpose(1, 2) for part in (k, v)]


def operands(size, dtype=HALF, device=CUDA, columns=64, factor=1.0):
    """x, weight, k and v. Float32 holds the sums as they are: queries, rounded once, are those of the target."""
    images, rows, heads, terms, keys = size
    x = torch.randint(-8, 9, (images, rows, terms), device=device).to(dtype) / 8
    weight = torch.randint(-8, 9, (heads * columns, terms), device=device).to(dtype)
    small = 0.5 ** round(math.log2(3 * math.sqrt(terms)))  # queries are of the size of one
    return [x, weight * small, *packed(images, heads, keys, columns, dtype, device, factor)]


def target(x, weight, k, v, scale=None):
    """In float64, where they are: a GPU is quicker at it."""
    q = F.linear(x.double(), weight.double()).to(x.dtype)
    q = q.unflatten(-1, (k.shape[1], k.shape[3])).transpose(1, 2)
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)


def right(y, args, scale=None):
    wanted = target(*args, scale)
    assert y.shape == wanted.shape and y.dtype == args[0].dtype
    error, size = (y.double() - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert (error <= TOLERANCE[y.dtype][0] * size).all(), f"{(error / size).max()} in a row"


def alike(y, args, scale=None):
    """As right as kernels are that round in other places."""
    wanted = target(*args, scale)
    assert y.shape == wanted.shape
    assert (y.double() - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.fixture
def fused(monkeypatch):
    """By the kernel, also if it would not pay; a failure if the attention runs that it stands for."""
    monkeypatch.setattr(kernel, "profitable", lambda images, rows, keys, depth, device: kernel._fits(keys, depth))
    monkeypatch.setattr(attention, "launch", None)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("terms", [200, 256, 264, 320, 640, 1280])
@pytest.mark.parametrize("keys", [1, 5, 77, 80])
def test_sizes(keys, terms, dtype):
    for images, rows, heads in product((1, 2, 3, 16), (1, 63, 64, 70, 100, 988, 1024), (5, 10, 20)):
        args = operands((images, rows, heads, terms, keys), dtype)
        y = kernel._launch(*args, None)  # into memory that holds NaN, as all that is new here
        right(y, args)
        assert y.transpose(1, 2).is_contiguous()  # heads side by side, for the product that follows
        assert torch.equal(y, kernel._launch(*args, None))
        right(kernel._launch(*args, 0.5), args, 0.5)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("size", UNETS, ids=str)
def test_unet_shapes(monkeypatch, size, dtype):
    args = operands(size, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "launch", None)
        y = kernel.launch(*args)
    right(y, args)
    for _ in range(10):
        assert torch.equal(kernel.launch(*args), y)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_large_scores(size, dtype):
    for factor in (30.0, -30.0, 300.0):
        args = operands(size, dtype, factor=factor)
        right(kernel._launch(*args, None), args)
    x, weight, k, v = operands(size, dtype)
    for factor in (3, -3):  # all far above zero, or below it
        args = [x.abs(), weight.abs(), factor * k.abs(), v]
        right(kernel._launch(*args, None), args)


@pytest.mark.gpu
@half_dtype
def test_sums_that_are_rounded_on_the_way(fused, dtype):
    for size in (UNETS[0], *SMALL):
        x, weight, *keys = operands(size, dtype)
        args = [torch.randn_like(x), torch.randn_like(weight) * size[3] ** -0.5, *keys]
        wanted = target(*args)
        assert (kernel.launch(*args).double() - wanted).norm() <= TOLERANCE[dtype][0] * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 63, 70, 128, 988])
@pytest.mark.parametrize("images", [1, 2])
def test_nothing_is_written_beyond_the_last_row(monkeypatch, images, rows):
    def roomy(shape, **options):
        count = math.prod(shape)
        memory = torch.full((count + 256 * 640,), math.nan, **options)
        beyond.append(memory[count:])
        return memory[:count].view(shape)

    args, beyond = operands((images, rows, 10, 264, 77)), []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", roomy)
        y = kernel._launch(*args, None)
    right(y, args)
    assert len(beyond) == 1 and beyond[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("few", [1, 2, 7, 40])
def test_blocks_that_take_several_tiles(monkeypatch, few):
    for size in ((3, 988, 20, 640, 77), (2, 500, 5, 264, 80), (1, 1000, 10, 200, 5)):
        args = operands(size)
        wanted = kernel._launch(*args, None)
        right(wanted, args)
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "multiprocessors", lambda device: few)
            for _ in range(3):
                assert torch.equal(kernel._launch(*args, None), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_nan_stays_where_it_belongs(size):
    x, weight, k, v = operands(size)
    first = kernel._launch(x, weight, k, v, None)
    spoilt = x.clone()
    spoilt[-1, -1, 7] = math.nan
    y = kernel._launch(spoilt, weight, k, v, None)
    assert y[-1, :, -1].isnan().all()
    y[-1, :, -1] = first[-1, :, -1]
    assert torch.equal(y, first)
    for operand in (k, v):
        kept = operand[0, 3, -1, 9].clone()
        operand[0, 3, -1, 9] = math.nan
        y = kernel._launch(x, weight, k, v, None)
        operand[0, 3, -1, 9] = kept
        assert y[0, 3, :, 9].isnan().all()
        y[0, 3] = first[0, 3]
        assert torch.equal(y, first)


@pytest.mark.gpu
def test_rows_and_keys_that_are_strided(fused):
    _, weight, *keys = operands((3, 8, 20, 1280, 77))
    wide = torch.randint(-8, 9, (4, 600, 1300), device=CUDA).half() / 8
    for x in (wide[1:, :, :1280], wide[:3, ::2, 20:], wide[:, :3, 8:1288].transpose(0, 1), wide[1:, 3:, 1:1281]):
        right(kernel.launch(x, weight, *keys), [x, weight, *keys])
    x = wide[1:, :, :1280]
    every_other = [t[:, :, 1::2] for t in packed(3, 20, 154)]
    for some in ([t.contiguous() for t in keys], keys[::-1], [keys[0]] * 2, every_other):
        right(kernel.launch(x, weight, *some), [x, weight, *some])


def others():
    """What has the sizes that pay, and cannot be read."""
    size = images, rows, heads, terms, keys = UNETS[0]
    x, weight, k, v = operands(size)
    yield "all in float32", operands(size, torch.float32)
    yield "81 keys", operands((*size[:4], 81))
    yield "heads of 40", operands((images, rows, 30, terms, keys), columns=40)
    yield "heads of 80", operands((images, rows, 10, terms, keys), columns=80)
    yield "18 heads", operands((images, rows, 18, terms, keys))
    yield "192 terms", operands((images, rows, heads, 192, keys))
    yield "1284 terms", operands((images, rows, heads, 1284, keys))
    odd = torch.empty(1 + x.numel(), dtype=HALF, device=CUDA)[1:].view(x.shape).copy_(x)
    yield "x at 2 bytes", [odd, weight, k, v]
    odd = torch.empty(1 + weight.numel(), dtype=HALF, device=CUDA)[1:].view(weight.shape).copy_(weight)
    yield "weight at 2 bytes", [x, odd, k, v]
    yield "weight by rows of more", [x, torch.cat([weight, weight], 1)[:, :terms], k, v]
    yield "weight by columns", [x, weight.T.contiguous().T, k, v]
    flat = torch.randn(images, keys, heads * 64 + 12, device=CUDA).half()
    for offset, width in ((4, 64), (1, 64)):
        some = flat[..., offset : offset + heads * width].unflatten(-1, (heads, width)).transpose(1, 2)
        yield f"rows of keys by 4 more, from {offset}", [x, weight, some, v]
        yield f"rows of values by 4 more, from {offset}", [x, weight, k, some]
    flat = torch.randn(images, keys, heads * 64 + 8, device=CUDA).half()
    some = flat[..., 4 : 4 + heads * 64].unflatten(-1, (heads, 64)).transpose(1, 2)
    yield "keys at 8 bytes", [x, weight, some, v]
    yield "values at 8 bytes", [x, weight, k, some]
    yield "keys by columns", [x, weight, k.transpose(2, 3).contiguous().transpose(2, 3), v]
    yield "keys for all images", [x, weight, *(t[:1].expand(images, -1, -1, -1) for t in (k, v))]
    yield "no rows", [x[:, :0], weight, k, v]


@pytest.mark.gpu
def test_what_the_kernel_does_not_take():
    args = x, weight, k, v = operands(UNETS[0])
    assert kernel.accepts(*args) is None is kernel.accepts(*args, 0.3)
    for name, some in others():
        if name != "keys for all images":  # which the map may refuse
            assert kernel.accepts(*some), name
        alike(kernel.launch(*some), some)
    assert kernel.accepts(*args, 0.0) and kernel.accepts(*args, -1.0)
    assert kernel.accepts(*(t.cpu() for t in args))
    for which in ((0,), (1,), (2,), (3,), (0, 1), (2, 3)):
        assert kernel.accepts(*(t.bfloat16() if i in which else t for i, t in enumerate(args)))
    assert kernel.accepts(x[:1], weight, k, v) and kernel.accepts(x[..., :640], weight, k, v)
    assert kernel.accepts(x[0], weight, k, v) and kernel.accepts(x, weight, k, v[:, :, :76])


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.3])
def test_without_the_kernel(monkeypatch, scale):
    def unavailable(*args):
        raise nvrtc.Unavailable("no")

    args = operands(UNETS[0])
    monkeypatch.setattr(kernel, "_launch", unavailable)
    assert kernel.accepts(*args, scale) is None
    alike(kernel.launch(*args, scale), args, scale)


@pytest.mark.gpu(gigabytes=24)
def test_beyond_31_bits():
    rows = (1 << 31) // 1280 + 1000
    _, weight, k, v = operands((1, 1, 20, 200, 77))
    x = torch.randint(-8, 9, (1, rows, 200), dtype=torch.int8, device=CUDA).half() / 8
    y = kernel._launch(x, weight, k, v, None)
    assert y.numel() > 2**31
    for some in (slice(0, 300), slice(rows // 2, rows // 2 + 300), slice(rows - 300, rows)):
        right(y[:, :, some], [x[:, some], weight, k, v])


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("columns", [64, 40])
def test_the_reference_is_what_it_stands_for(columns, scale):
    x, weight, k, v = operands((2, 70, 3, 72, 77), torch.float64, CPU, columns)
    y = kernel.reference(x, weight, k, v, scale)
    q = F.linear(x, weight).view(2, 70, 3, columns).transpose(1, 2)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, scale=scale))
    assert y.shape == (2, 3, 70, columns) and y.transpose(1, 2).is_contiguous()


@half_dtype
def test_the_reference_rounds_queries_and_the_result(dtype):
    args = x, weight, k, v = operands((2, 70, 3, 72, 77), dtype, CPU)
    y = kernel.reference(*args)
    right(y, args)
    q = F.linear(x.float(), weight.float()).to(dtype).view(2, 70, 3, 64).transpose(1, 2)
    assert torch.equal(y, F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(dtype))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_on_a_cpu_the_kernels_follow_each_other(scale):
    args = operands((2, 70, 3, 72, 77), torch.float32, CPU)
    assert kernel.accepts(*args, scale)
    torch.testing.assert_close(kernel.launch(*args, scale), kernel.reference(*args, scale))
