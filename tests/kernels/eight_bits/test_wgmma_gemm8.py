"""Hopper's products of 8 bits: what they take and launch, for which no GPU is needed."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.backend.registry import Declined
from sfast_ext.kernels.eight_bits import wgmma_gemm8 as kernel
from sfast_ext.kernels.eight_bits.wgmma_gemm8 import GEGLU, KINDS, PLAIN, RESIDUAL, TILES

GPU = torch.device("cuda", 0)
EPILOGUES = (PLAIN, RESIDUAL, GEGLU)
FITTING = [(tile, epilogue) for tile, epilogue in product(TILES, EPILOGUES) if kernel.fits(tile, epilogue)]
each_fitting = pytest.mark.parametrize(("tile", "epilogue"), FITTING, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))


def operands(rows=(300,), columns=72, depth=48, kind=torch.int8, dtype=torch.float16, device="meta"):
    """x, x_scale, weight, weight_scale, bias, residual; without memory by default."""
    shapes = [((*rows, depth), kind), (rows, torch.float32), ((columns, depth), kind), ((columns,), torch.float32)]
    shapes += [((columns,), dtype), ((*rows, columns), dtype)]
    return [torch.zeros(shape, dtype=of, device=device) for shape, of in shapes]


def refused(*given, **more):
    with triton_runtime.dry_run(GPU):
        return kernel.accepts(*given, **more)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_it_takes(kind, dtype):
    for rows, columns, depth in (((1,), 8, 16), ((2, 77), 1288, 1296), ((2048,), 3840, 1280), ((), 16, 32)):
        *most, bias, residual = operands(rows, columns, depth, kind, dtype)
        assert refused(*most, bias, residual) is None and refused(*most, None, residual, dtype) is None
        assert refused(*most, None) is None and refused(*most, bias, None, dtype) is None
        if columns % 16 == 0:
            assert refused(*most, bias, None, dtype, geglu=True) is None


REFUSED = {
    "half precision": lambda x, xs, w, ws, b, r: (x.half(), xs, w.half(), ws, b, r),
    "a weight of half precision": lambda x, xs, w, ws, b, r: (x, xs, w.half(), ws, b, r),
    "bytes without a sign": lambda x, xs, w, ws, b, r: (x.to(torch.uint8), xs, w.to(torch.uint8), ws, b, r),
    "two kinds": lambda x, xs, w, ws, b, r: (x, xs, w.to(torch.uint8), ws, b, r),
    "scales in half precision": lambda x, xs, w, ws, b, r: (x, xs.half(), w, ws, b, r),
    "scales of the weight in float64": lambda x, xs, w, ws, b, r: (x, xs, w, ws.double(), b, r),
    "one scale for all rows": lambda x, xs, w, ws, b, r: (x, xs[:1], w, ws, b, r),
    "a scale that is no vector": lambda x, xs, w, ws, b, r: (x, xs[:, None], w, ws, b, r),
    "one scale for all columns": lambda x, xs, w, ws, b, r: (x, xs, w, ws[:1], b, r),
    "a bias in float32": lambda x, xs, w, ws, b, r: (x, xs, w, ws, b.float(), None),
    "a bias of another type": lambda x, xs, w, ws, b, r: (x, xs, w, ws, b.bfloat16(), r),
    "a residual in float32": lambda x, xs, w, ws, b, r: (x, xs, w, ws, None, r.float()),
    "a short bias": lambda x, xs, w, ws, b, r: (x, xs, w, ws, b[:-1], r),
    "a residual of one row": lambda x, xs, w, ws, b, r: (x, xs, w, ws, b, r[:1]),
    "a residual with more dimensions": lambda x, xs, w, ws, b, r: (x, xs, w, ws, b, r[None]),
    "another depth": lambda x, xs, w, ws, b, r: (x[:, :32], xs, w, ws, b, r),
    "a weight with more dimensions": lambda x, xs, w, ws, b, r: (x, xs, w[None], ws, b, r),
    "no rows": lambda x, xs, w, ws, b, r: (x[:0], xs[:0], w, ws, b, r[:0]),
    "no columns": lambda x, xs, w, ws, b, r: (x, xs, w[:0], ws[:0], b[:0], r[:, :0]),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=list(REFUSED))
def test_what_it_refuses(change):
    given = operands()
    assert refused(*given) is None
    assert refused(*change(*given))


@pytest.mark.parametrize(
    ("columns", "depth", "geglu"), [(72, 40, False), (72, 8, False), (71, 48, False), (4, 48, False), (24, 48, True)]
)
def test_sizes_that_it_refuses(columns, depth, geglu):
    *most, bias, residual = operands((300,), columns, depth)
    assert refused(*most, bias, geglu=geglu)
    assert refused(*operands((300,), 32, 48)[:5], geglu=geglu) is None


def test_what_else_it_refuses(monkeypatch):
    *most, bias, residual = operands((300,), 32)
    assert refused(*most, bias, residual[:, :16], geglu=True)
    assert refused(*most, bias, None, torch.bfloat16) and refused(*most, None, None, torch.float32)
    assert kernel.accepts(*most, bias)  # outside of a dry run they are on no GPU
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(triton_runtime, "capability", lambda device, capability=capability: capability)
        assert refused(*most, bias)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), None))
    assert refused(*most, bias)


def test_nothing_is_launched_that_it_refuses(launched):
    """Also by a caller that has not asked, or not for all of it."""
    *most, bias, residual = operands((300,), 24)
    refused_ = [
        lambda: kernel.linear(*most, bias, residual, torch.bfloat16),
        lambda: kernel.linear(*most, bias, None, torch.bfloat16),
        lambda: kernel.linear(*most, None, residual[:, :16]),
        lambda: kernel.linear(*most[:3], most[3][:8], bias),
        lambda: kernel.geglu(*most, bias),  # 12 columns
        lambda: kernel.geglu(*operands((300,), 32)[:5], dtype=torch.bfloat16),
        lambda: kernel.geglu(*operands((300,), 32)[:5], approximate="sigmoid"),
    ]
    with triton_runtime.dry_run(GPU):
        for call in refused_:
            with pytest.raises(Declined):
                call()
        assert not launched
        kernel.linear(*most, bias, residual)
        kernel.geglu(*operands((300,), 32)[:5])
    assert len(launched) == 2


def test_memory_that_it_refuses(monkeypatch):
    """Of tensors with memory, taken for a GPU's."""
    monkeypatch.setattr(kernel, "supported", lambda device: True)
    given = operands((64,), 32, 64, device="cpu")
    assert kernel.accepts(*given) is None
    x, x_scale, weight, weight_scale, bias, residual = given

    def off(t, by):
        """The same, so many elements later."""
        return torch.cat([t.flatten(), t.flatten()])[by : by + t.numel()].view(t.shape)

    def apart(t):
        return torch.stack([t, t], -1)[..., 0]

    for change in (lambda t: off(t, 1), apart):
        assert kernel.accepts(x, x_scale, change(weight), weight_scale, bias, residual)
        assert kernel.accepts(x, x_scale, weight, change(weight_scale), bias, residual)
        assert kernel.accepts(x, x_scale, weight, weight_scale, change(bias), residual)
        assert kernel.accepts(x, x_scale, weight, weight_scale, bias, change(residual))
    assert kernel.accepts(off(x, 1), *given[1:])
    # read by threads one by one, or copied
    assert kernel.accepts(x, off(x_scale, 1), *given[2:]) is None and kernel.accepts(apart(x), *given[1:]) is None
    assert kernel.accepts(x.to("meta"), *given[1:])


@each_fitting
@each_kind
def test_stages_and_buffers_fit_a_block(kind, tile, epilogue):
    given = kernel.constants(tile, kind, torch.float16, epilogue)
    out = tile.width // 2 if epilogue == GEGLU else tile.width
    buffers, vectors = 2 * 64 * out * 2, 2 * 6 * tile.width
    asked = kernel.shared_bytes(given)
    assert asked == 1024 + given["STAGES"] * 128 * (128 + tile.width) + buffers + vectors
    assert asked + 8 * (2 * given["STAGES"] + 4) <= 227 << 10 and 3 <= given["STAGES"] <= 8
    # swizzles begin at multiples of 1 KB, and bulk copies at multiples of 16 bytes
    assert tile.width // 2 * 128 % 1024 == 0 and 64 * 2 * out % 1024 == 0 and out % 16 == 0
    assert 6 * tile.width % 16 == 0 and 4 * out % 16 == 0 and tile.width % 16 == 0 and tile.width <= 256
    # sums of a thread
    assert tile.width // tile.team <= 192 and tile.team in (1, 2) and tile.pair in (1, 2)


@each_fitting
@pytest.mark.parametrize("columns", [8, 72, 640, 1280, 1288])
def test_what_the_kernel_is_told(monkeypatch, launched, columns, tile, epilogue):
    """Boxes that fill a tile, of rows as wide as their swizzle; as many blocks as there are tiles, or fit."""
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *args: args)
    geglu = epilogue == GEGLU
    of_weight, dtype = 2 * columns if geglu else columns, torch.bfloat16 if geglu else torch.float16
    x, x_scale, weight, weight_scale, bias, residual = operands((3, 700), of_weight, 208, dtype=dtype)
    with triton_runtime.dry_run(GPU):
        if geglu:
            result = kernel.geglu(x, x_scale, weight, weight_scale, bias, True, "tanh", dtype, tile=tile)
        else:
            added = residual if epilogue == RESIDUAL else None
            result = kernel.linear(x, x_scale, weight, weight_scale, bias, added, dtype, tile=tile)
            assert added is None or result is added
    (grid, given, constants) = launched.pop()
    assert result.shape == (3, 700, columns) and result.dtype == dtype
    assert constants == kernel.constants(tile, torch.int8, dtype, epilogue, geglu, "tanh" if geglu else "none")
    (of_out, of_x, of_weight, of_residual, *vectors, steps, rows, width, down, across), threads, shared = (
        kernel._prepared(*given, **constants)[i] for i in range(3)
    )
    assert vectors == [x_scale, weight_scale, bias] and threads == 384 and shared == kernel.shared_bytes(constants)
    out = tile.width // 2 if geglu else tile.width
    chunk = 32 if out % 32 == 0 else 16
    assert of_out == (result, [columns, 2100], [2 * columns], [chunk, 64]) and out % chunk == 0
    assert of_residual[0] is result and of_residual[1:] == of_out[1:]
    assert of_x[0] is x and of_x[1:] == ([208, 2100], [208], [128, 128])
    assert of_weight == (weight, [208, weight.shape[0]], [208], [128, tile.width // 2])
    assert (steps.value, rows.value, width.value) == (2, 2100, columns)
    assert (down.value, across.value) == (-(-17 // tile.pair), -(-columns // out))
    assert grid == (min(down.value * across.value, 132 // tile.pair) * tile.pair,)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@each_kind
def test_siblings_are_what_further_sizes_ask_for(kind, epilogue):
    more = (epilogue, epilogue == GEGLU, "tanh" if epilogue == GEGLU else "none")
    siblings = kernel.variants(kernel.constants(TILES[0], kind, torch.bfloat16, *more))
    for rows, columns, depth in product((1, 77, 512, 2048, 4096, 8192, 18432), (640, 1280, 3840, 10240), (640, 5120)):
        x, _, weight, *_ = operands((rows,), columns, depth, kind)
        tile = kernel.tiles(x, weight, residual=epilogue == RESIDUAL, geglu=epilogue == GEGLU)[0]
        assert kernel.constants(tile, kind, torch.bfloat16, *more) in siblings
    assert len(siblings) == len({str(given) for given in siblings}) == sum(kernel.fits(t, epilogue) for t in TILES)


def test_the_tile_that_takes_least():
    def best(rows, columns, depth, **more):
        x, _, weight, *_ = operands((rows,), columns, depth)
        found = kernel.tiles(x, weight, **more)
        assert set(found) == {t for t in TILES if kernel.fits(t, GEGLU if more.get("geglu") else PLAIN)}
        return found[0]

    # one wave: both warpgroups share a tile, so that the end of it takes half the time
    assert best(2048, 1280, 1280, residual=True).team == 2
    # many: an epilogue hides behind the other warpgroup's products
    assert best(8192, 1920, 640).team == best(2048, 10240, 1280, geglu=True).team == 1
    assert best(128, 1280, 1280).width == 80


def test_few_rows_are_left_to_others():
    assert kernel.profitable(operands((64,))[0]) and not kernel.profitable(operands((63,))[0])
    assert kernel.profitable(operands((2, 32))[0])


def test_nothing_is_read_before_the_wait():
    text = (nvrtc.SOURCES / "wgmma_gemm8.cu").read_text()
    assert text.count("pdl_wait();") == 2 and text.count("pdl_launch_dependents();") == 1
    assert "load" not in text.partition("pdl_wait();")[0].partition('extern "C"')[2]
    assert kernel._SOURCE.reads_before_wait == () and kernel._SOURCE.hopper
