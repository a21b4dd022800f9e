"""What pays, what the kernel is told and what it takes of the GPU, for which none is needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from kernels.support import half_dtype
from sfast_ext.kernels.attention import query_attention as kernel
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings

from .test_query_attention import GPU, HALF, LEFT, UNETS, needs_no_interpreter, operands


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))


def without_memory(size, dtype=HALF, columns=64):
    return operands(size, dtype, torch.device("meta"), columns)


def pays(size, columns=64):
    images, rows, heads, terms, keys = size
    return kernel.profitable(images, rows, (heads, keys, columns), terms, GPU)


@pytest.mark.parametrize("size", UNETS, ids=str)
def test_what_is_quicker_than_two_kernels(monkeypatch, size):
    assert pays(size)
    with monkeypatch.context() as patch:
        patch.setattr(kernel._SOURCE, "supported", lambda device: False)
        assert not pays(size)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    assert not pays(size)


@pytest.mark.parametrize("size", LEFT, ids=str)
def test_what_is_left_to_two_kernels(size):
    assert not pays(size)


def test_what_does_not_fit():
    images, rows, heads, terms, keys = UNETS[0]
    assert pays((images, rows, heads, terms, 80)) and pays((images, rows, heads, terms, 1))
    assert not pays((images, rows, heads, terms, 81)) and not pays((images, rows, heads, terms, 0))
    assert not any(pays((images, rows, count, terms, keys)) for count in (0, 1, 18, 19, 21))
    assert not pays((images, rows, heads, 1284, keys))
    assert not pays(UNETS[0], columns=40) and not pays(UNETS[0], columns=128)
    # a ring's slots are all filled by the terms of a sum
    assert [terms for terms in range(400) if kernel._fits((5, 77, 64), terms)] == [*range(200, 400, 8)]


def test_slots_fit_a_block_and_begin_where_swizzles_do():
    given = kernel.constants(HALF)
    assert given == {"WIDTH": 160, "STAGES": 4, "BF16": 0}
    assert kernel.constants(torch.bfloat16) == {**given, "BF16": 1}
    slot = 128 * (64 + 2 * given["WIDTH"])
    assert kernel.shared_bytes() == 1024 + given["STAGES"] * slot <= 227 << 10 and slot % 1024 == 0


@half_dtype
@pytest.mark.parametrize("scale", [None, 0.3])
def test_what_the_kernel_is_told(monkeypatch, launched, scale, dtype):
    """Boxes that fill a tile, of rows as wide as their swizzle; and numbers of keys, steps and tiles."""
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *args: args)
    x, weight, k, v = without_memory((2, 988, 20, 200, 77), dtype)
    y = kernel._launch(x, weight, k, v, scale)
    ((grid, operands_, constants),) = launched
    assert grid == (2 * 16 * 4,) and constants == kernel.constants(dtype)
    assert len(operands_) == len(kernel._SOURCE.arg_names)
    args, threads, shared = kernel._prepared(*operands_, **constants)
    out, *maps, factor = args[:6]
    assert threads == 384 and shared == kernel.shared_bytes()
    assert factor.value == pytest.approx((scale or 0.125) * math.log2(math.e))
    assert [number.value for number in args[6:]] == [77, 4, 16, 4, 128]
    assert y.shape == (2, 20, 988, 64) and out[0].shape == (2, 988, 1280) and y.transpose(1, 2).is_contiguous()
    assert out[1:] == ([1280, 988, 2], [2560, 988 * 2560], [64, 64, 1])
    assert maps[0][0] is x and maps[0][1:] == ([200, 988, 2], [400, 988 * 400], [64, 64, 1])
    assert maps[1][0] is weight and maps[1][1:] == ([200, 1280], [400], [64, 160])
    row = 2 * (2 * 1280 + 8)  # bytes of keys and values beside each other, and of more
    for found, given in zip(maps[2:], (k, v), strict=True):
        assert found[0] is given and found[1:] == ([64, 20, 77, 2], [128, row, 80 * row], [64, 1, 80, 1])


@pytest.mark.parametrize("count", [1, 7, 78, 132, 144])
def test_no_more_blocks_than_multiprocessors_or_tiles(monkeypatch, launched, count):
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: count)
    for images, rows, heads, tiles in ((1, 1, 5, 1), (2, 64, 10, 4), (3, 65, 20, 24), (2, 1024, 20, 128)):
        kernel._launch(*without_memory((images, rows, heads, 256, 77)), None)
        assert launched.pop()[0] == (min(tiles, count),)


def test_rows_that_lie_apart_are_put_together(launched):
    x, weight, k, v = without_memory((2, 1024, 20, 1280, 77))
    kernel._launch(x.expand(2, -1, -1).transpose(0, 1).contiguous().transpose(0, 1), weight, k, v, None)
    assert launched.pop()[1][1].is_contiguous()
    kernel._launch(x, weight, k, v, None)
    assert launched.pop()[1][1] is x


@needs_no_interpreter
def test_what_it_takes_is_told_by_shapes_and_dtypes(monkeypatch):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    size = images, rows, heads, terms, keys = UNETS[0]
    x, weight, k, v = without_memory(size)
    taken = [
        (x, weight, k, v, 0.3),
        (x, weight, k.contiguous(), v),
        (x.transpose(0, 1).contiguous().transpose(0, 1), weight, k, v),
        without_memory(size, torch.bfloat16),
        without_memory((*size[:4], 80)),
    ]
    refused = [
        without_memory(size, torch.float32),
        *([t.bfloat16() if i == j else t for j, t in enumerate((x, weight, k, v))] for i in range(4)),
        (x.bfloat16(), weight.bfloat16(), k, v),
        without_memory((*size[:4], 81)),
        without_memory((images, rows, 30, terms, keys), columns=40),
        without_memory((images, rows, 18, terms, keys)),
        without_memory((images, rows, heads, 192, keys)),
        without_memory((images, rows, heads, 1284, keys)),
        (x[:, :0], weight, k, v),
        (x[:1], weight, k, v),
        (x[0], weight, k, v),
        (x[..., :640], weight, k, v),
        (x, weight[:640], k, v),
        (x, weight[None], k, v),
        (x, weight, k[0], v[0]),
        (x, weight, k, v[:, :, :76]),
        (x, weight, k[:, :, :0], v[:, :, :0]),
        (x, weight, k.transpose(2, 3).contiguous().transpose(2, 3), v),
        (x, weight, torch.empty(images, keys, heads, 68, dtype=HALF, device="meta")[..., :64].transpose(1, 2), v),
        (x, weight, k, v, 0.0),
        (x, weight, k, v, -1.0),
    ]
    with triton_runtime.dry_run(GPU):
        assert [kernel.accepts(*args) for args in taken] == [None] * len(taken)
        assert all(kernel.accepts(*args) for args in refused)
        assert kernel.accepts(*without_memory(LEFT[0])) is None  # it is not profitable
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 0))
    with triton_runtime.dry_run(GPU):
        assert all(kernel.accepts(*args) for args in taken)


def graph_of(size):
    """A node, whose metadata tell of its operands."""
    graph, nodes = fx.Graph(), []
    for tensor in without_memory(size):
        nodes.append(graph.placeholder("x"))
        nodes[-1].meta["val"] = tensor
    graph.call_function(kernel.launch, tuple(nodes), {"scale": None})
    return graph


@needs_no_interpreter
def test_it_is_compiled_ahead_where_it_will_be_launched(monkeypatch):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    (launch,) = precompile.launches(graph_of(UNETS[0]), GPU).values()
    assert launch.kernel is kernel._SOURCE and len(launch.args) == len(kernel._SOURCE.arg_names)
    assert launch.constants == kernel.constants(HALF)
    assert all(found.kernel is not kernel._SOURCE for found in precompile.launches(graph_of(LEFT[0]), GPU).values())
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    assert not precompile.launches(graph_of(UNETS[0]), GPU)
