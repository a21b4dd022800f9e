"""Which tile a size gets and what it takes of the GPU, for which none is needed."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import fx

from kernels.support import half_dtype
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.linear import linear_layer_norm as kernel
from sfast_ext.kernels.pointwise import layer_norm

GPU = torch.device("cuda", 0)
COLUMNS = (80, 160, 320, 640, 1280)
FITTING = [(tile, columns) for tile in kernel.TILES for columns in COLUMNS if kernel._fits(tile, columns)]
each_fitting = pytest.mark.parametrize(("tile", "columns"), FITTING, ids=str)
needs_no_interpreter = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs TRITON_INTERPRET unset"
)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))


def operands(size, dtype=torch.float16):
    """Without memory, with all that may be there."""
    rows, columns, depth = size
    shapes = (rows, depth), (columns, depth), (columns,), (rows, columns), (columns,), (columns,)
    return [*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes), 1e-5]


PAYING = [(2048, 1280, 1280), (2048, 1280, 5120), (8192, 640, 640), (8192, 320, 320), (2048, 640, 640)]
PAYING += [(512, 1280, 1280), (1976, 1280, 1280), (4608, 1280, 1280), (4608, 1280, 5120), (18432, 640, 640)]
LEFT = [(3072, 1280, 1280), (512, 1280, 5120), (128, 1280, 1280), (2048, 640, 2560)]
UNFIT = [(2048, 1288, 1280), (2048, 100, 1280), (8192, 2640, 640), (8192, 0, 640)]  # no tiles, or too many


@pytest.mark.parametrize("size", PAYING, ids=str)
def test_what_is_quicker_than_two_kernels(monkeypatch, size):
    assert kernel.profitable(*size, GPU)
    with monkeypatch.context() as patch:
        patch.setattr(kernel._SOURCE, "supported", lambda device: False)
        assert not kernel.profitable(*size, GPU)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    assert not kernel.profitable(*size, GPU)


@pytest.mark.parametrize("size", LEFT + UNFIT, ids=str)
def test_what_is_left_to_two_kernels(size):
    assert not kernel.profitable(*size, GPU)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((2048, 1280, 1280), (128, 160, 2)),
        ((2048, 1280, 5120), (128, 160, 2)),
        ((8192, 640, 640), (128, 160, 2)),
        ((2048, 640, 640), (64, 160, 1)),
        ((512, 1280, 1280), (64, 80, 1)),
        ((4608, 1280, 1280), (192, 128, 2)),
        ((18432, 640, 640), (192, 128, 2)),
        ((12288, 640, 640), (128, 160, 2)),
        ((700, 80, 640), (64, 80, 1)),  # no wider one fits
    ],
    ids=str,
)
def test_the_tile_that_takes_least(size, wanted):
    tile = kernel.best(*size, GPU)
    assert (tile.rows, tile.width, tile.pair) == wanted


@each_fitting
def test_blocks_that_wait_for_each_other_all_begin(monkeypatch, launched, tile, columns):
    """Those of a row, in pairs of them: all or none, and no more at once than there is room for."""
    parts = columns // tile.width
    for count, rows in product((1, 7, 20, 78, 114, 132, 144), (1, 64, 65, 700, 5000, 40000)):
        monkeypatch.setattr(kernel, "multiprocessors", lambda device, count=count: count)
        kernel._launch(*operands((rows, columns, 64)), None, None, tile)
        ((grid, _, constants),) = launched
        launched.clear()
        (blocks,) = grid
        down = -(-rows // (tile.rows * tile.pair))
        assert blocks % (parts * tile.pair) == 0 and 0 < blocks <= down * parts * tile.pair
        assert blocks <= max(count * tile.per_multiprocessor, parts * tile.pair)
        assert constants == kernel.constants(tile, columns, torch.float16)


@each_fitting
def test_records_are_of_all_rows_of_all_tiles(launched, tile, columns):
    for rows in (1, 63, 64, 129, 1976, 5000):
        down = -(-rows // (tile.rows * tile.pair))
        of_a_part = down * tile.pair * tile.rows
        assert rows <= of_a_part < rows + tile.rows * tile.pair
        needed = 2 * (columns // tile.width) * of_a_part  # two numbers of 8 bytes for each
        assert kernel._records_of(rows, columns, tile) == needed
        args = operands((rows, columns, 64))
        kernel._launch(*args, None, None, tile)
        records = launched.pop()[1][-2]
        assert records.shape == (needed,) and records.dtype == torch.int64
        given = torch.empty(needed, dtype=torch.int64, device="meta")
        kernel._launch(*args, None, given, tile)
        assert launched.pop()[1][-2] is given
        with pytest.raises(AssertionError, match="records"):
            kernel._launch(*args, None, given[1:], tile)


@pytest.mark.parametrize("size", PAYING, ids=str)
def test_records_are_counted_for_the_tile_that_is_taken(size):
    assert kernel.record_count(*size, GPU) == kernel._records_of(*size[:2], kernel.best(*size, GPU))


@each_fitting
def test_slots_and_a_tile_of_the_result_fit_a_block(tile, columns):
    given = kernel.constants(tile, columns, torch.float16)
    barriers, vectors = 8 * (2 * given["STAGES"] + 1), 2 * kernel._VECTORS * tile.width
    asked = kernel.shared_bytes(given) + barriers + vectors
    assert (
        kernel.shared_bytes(given)
        == 1024 + given["STAGES"] * 128 * (tile.rows + tile.width) + 2 * tile.rows * tile.width
    )
    assert asked <= 227 << 10 and given["STAGES"] >= 3
    # the system takes 1 KB of each block's
    assert tile.rows > 64 or 2 * (1024 + asked) <= 228 << 10
    # slots and boxes begin where the swizzles of their rows do
    assert tile.width // tile.pair % 8 == 0 and given["STAGES"] * 128 * (tile.rows + tile.width) % 1024 == 0


@each_fitting
@pytest.mark.parametrize("added", [False, True])
def test_what_the_kernel_is_told(monkeypatch, launched, added, tile, columns):
    """Boxes that fill a tile, of rows as wide as their swizzle; and numbers of tiles and steps."""
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *args: args)
    x, weight, bias, residual, factor, offset, eps = operands((1000, columns, 200))
    total, out = kernel._launch(x, weight, bias, residual if added else None, factor, offset, eps, None, None, tile)
    _, operands_, constants = launched.pop()
    args, threads, shared = kernel._prepared(*operands_, **constants)
    maps, (has_residual, *vectors, records, small, steps, down) = args[:5], args[5:]
    assert [m[0] for m in maps[:4]] == [total, out, x, weight] and vectors == [bias, None, factor, offset]
    assert has_residual.value == added and (not added or maps[4][0] is residual)
    assert records is operands_[-2] and small.value == pytest.approx(eps)
    assert (steps.value, down.value) == (4, -(-1000 // (tile.rows * tile.pair)))
    assert threads == 2 * tile.rows + 128 and shared == kernel.shared_bytes(constants)
    for tensor, sizes, strides, _ in maps:
        assert sizes == [*reversed(tensor.shape)] and strides == [2 * tensor.shape[1]]
    chunk = 16 if tile.width == 80 else 32
    heights = [64, 64, tile.rows, tile.width // tile.pair, tile.rows]
    assert [m[3] for m in maps] == [
        [n, height] for n, height in zip((chunk, chunk, 64, 64, chunk), heights, strict=True)
    ]
    assert tile.width % chunk == 0


@half_dtype
@pytest.mark.parametrize("columns", [320, 640, 1280])
def test_siblings_are_what_further_sizes_ask_for(columns, dtype):
    asked = [
        kernel.constants(kernel.best(rows, columns, depth, GPU), columns, dtype)
        for rows, depth in product((*range(64, 4096, 64), 1976, 8192, 9216, 18432, 65536), (columns, 4 * columns))
        if kernel.profitable(rows, columns, depth, GPU)
    ]
    different = [given for i, given in enumerate(asked) if given not in asked[:i]]
    assert len(different) >= 2
    for given in different:
        siblings = kernel.variants(given)
        assert all(other in siblings for other in different)
        assert all(other["BF16"] == given["BF16"] for other in siblings)
        assert all(other["WIDTH"] * other["PARTS"] == columns for other in siblings)


@needs_no_interpreter
def test_what_it_takes_is_told_by_shapes_and_dtypes(monkeypatch):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    x, weight, bias, residual, factor, offset, _ = operands(PAYING[0])
    norm = factor, offset
    taken = [
        (x, weight, bias, residual, *norm, bias),
        (x, weight, None, None, None, None),
        (x.view(2, 1024, 1280), weight, bias, residual.view(2, 1024, 1280), *norm),
        operands(PAYING[0], torch.bfloat16)[:6],
    ]
    refused = [
        (x, weight.bfloat16(), bias, residual, *norm),
        (x, weight, bias.float(), residual, *norm),
        (x, weight, bias, residual.float(), *norm),
        (x, weight, bias, residual, factor.float(), offset),
        (x, weight, bias, residual, *norm, bias.float()),
        operands(PAYING[0], torch.float32)[:6],
        (x[:, :640], weight, bias, residual, *norm),
        (x, weight[:, :640], bias, residual, *norm),
        (x, weight, bias[:640], residual, *norm),
        (x, weight, bias[:1], residual, *norm),
        (x, weight, bias, residual[:1], *norm),
        (x, weight, bias, residual.view(2, 1024, 1280), *norm),
        (x, weight, bias, bias, *norm),
        (x, weight[None], bias, residual, *norm),
        (x[:0], weight, bias, residual[:0], *norm),
        operands((2048, 1280, 1284))[:6],
    ]
    with triton_runtime.dry_run(GPU):
        assert [kernel.accepts(*args) for args in taken] == [None] * len(taken)
        assert all(kernel.accepts(*args) for args in refused)
        assert kernel.accepts(*operands(LEFT[0])[:6]) is None  # it is not profitable
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 0))
    with triton_runtime.dry_run(GPU):
        assert all(kernel.accepts(*args) for args in taken)


def graph_of(size):
    """A node, whose metadata tell of its operands."""
    graph, nodes = fx.Graph(), []
    *tensors, eps = operands(size)
    for tensor in (*tensors, torch.empty(kernel.record_count(*size, GPU), dtype=torch.int64, device="meta")):
        nodes.append(graph.placeholder("x"))
        nodes[-1].meta["val"] = tensor
    *nodes, records = nodes
    graph.call_function(kernel.launch, (*nodes, eps), {"records": records})
    return graph


@needs_no_interpreter
def test_it_is_compiled_ahead_for_what_it_will_launch(monkeypatch):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    (launch,) = precompile.launches(graph_of(PAYING[0]), GPU).values()
    assert launch.kernel is kernel._SOURCE and len(launch.args) == len(kernel._SOURCE.arg_names)
    assert launch.constants == kernel.constants(kernel.best(*PAYING[0], GPU), 1280, torch.float16)
    (launch,) = precompile.launches(graph_of(LEFT[0]), GPU).values()
    assert launch.kernel is layer_norm.layer_norm_kernel and launch.constants["ADD"]


@needs_no_interpreter
def test_elsewhere_those_that_follow_each_other_are(monkeypatch):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    (launch,) = precompile.launches(graph_of(PAYING[0]), GPU).values()
    assert launch.kernel is layer_norm.layer_norm_kernel and launch.constants["ADD"]
