"""Products of 8-bit integers by mma.sync: on the CPU, where csrc/mma_cpu.h stands for tensor cores, and on a GPU.

Sums are exact, so that results differ from float64 by their one rounding and by what float32 leaves of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.cases import GATED_LINEARS, LINEARS
from kernels import cuda_on_cpu
from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import needs_nvrtc, randn
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.eight_bits import geglu8, linear8, mma8_tiles, mma_gemm8
from sfast_ext.kernels.linear import mma_gemm, mma_tiles
from sfast_ext.kernels.linear.mma_tiles import Tile
from sfast_ext.kernels.pointwise import geglu

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
A100, AMPERE, TURING = (8, 0), (8, 6), (7, 5)
TILES = [(AMPERE, 0), (AMPERE, 2), (AMPERE, 3), (TURING, 1), (TURING, 4), (A100, 3), (AMPERE, 4)]
PAIRS = [(AMPERE, 0), (AMPERE, 1), (A100, 3), (TURING, 4)]
"""With an even number of tiles of columns for a warp, which values and gates need."""
WARP = Tile(1, 1, 1, 16, 2, 1)
"""A single one: as quick on a CPU as can be."""
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
each_dtype = pytest.mark.parametrize("dtype", list(ROUNDING), ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cpu":
        cuda_on_cpu.stand_in(monkeypatch, mma_gemm8)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: AMPERE)  # whichever the card is
    yield torch.device(request.param)


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tile:
    """One of a card's. On a CPU, Turing's products are those of 8 rows and 16 of K, and registers hold what is loaded;
    a GPU has its own."""
    capability, number = request.param
    if capability == TURING and "cpu" in request.node.callspec.params.values():
        constants = mma_gemm8.constants
        monkeypatch.setattr(mma_gemm8, "constants", lambda *given: constants(*given) | {"TURING": 1})
    return mma8_tiles.shapes(capability)[number]


def each_tile(tiles: list[tuple[tuple[int, int], int]]) -> pytest.MarkDecorator:
    names = [f"{capability[0]}.{capability[1]}: {mma8_tiles.shapes(capability)[n]}" for capability, n in tiles]
    return pytest.mark.parametrize("tile", tiles, ids=names, indirect=True)


class Operands(NamedTuple):
    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor

    def wide(self) -> Operands:
        """With scales in float64, in which references compute then."""
        return self._replace(x_scale=self.x_scale.cpu().double(), weight_scale=self.weight_scale.cpu().double(),
                             x=self.x.cpu(), weight=self.weight.cpu())  # fmt: skip


def operands(rows: int, columns: int, depth: int, device: torch.device, of_product: float = 1.0) -> Operands:
    """Of all values from -127 to 127, with scales that differ by up to eight times; the product's standard deviation
    is about as given."""
    x, weight = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((rows, depth), (columns, depth)))
    x_scale, weight_scale = (2 ** (3 * torch.rand(size) - 1.5) for size in (rows, columns))
    weight_scale *= of_product / (73.6**2 * depth**0.5)
    return Operands(*(t.to(device) for t in (x, x_scale, weight, weight_scale)))


def close(y: Tensor, target: Tensor, *terms: Tensor | None, of_float32: float = 2.0**-21) -> None:
    """Rounded once; what is added up has been rounded in float32."""
    size = sum(term.cpu().double().abs() for term in terms if term is not None)
    bound = 1.001 * ROUNDING[y.dtype] * target.abs() + of_float32 * size + 2.0**-25
    error = (y.cpu().double() - target).abs()
    assert y.shape == target.shape and bool((error <= bound).all()), f"{(error / bound).max()} times the bound"


def product(given: Operands, bias: Tensor | None) -> Tensor:
    return linear8.scaled(*given.wide(), None if bias is None else bias.cpu())


SHAPES = [(130, 168, 1), (64, 320, 2), (3, 8, 1), (1, 160, 3), (300, 88, 2)]
"""Rows, columns, steps."""


@pytest.mark.thinned("tile", "dtype")
@each_tile(TILES)
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_linear(device, tile, dtype, shape, with_bias, with_residual):
    rows, columns, steps = shape
    given = operands(rows, columns, steps * mma8_tiles.DEPTH * tile.slices, device)
    bias = randn(columns, dtype=dtype, device=device) if with_bias else None
    # rows of a tensor that has more of them: nothing is written next to the result
    around = torch.full((rows + 16, columns), math.nan, dtype=dtype, device=device)
    residual = around[8:-8] if with_residual else None
    added = randn(rows, columns, dtype=dtype, device=device)
    target = product(given, bias) + (added.cpu().double() if with_residual else 0)
    if residual is not None:
        residual.copy_(added)
    assert mma_gemm8.accepts(*given, bias, residual, dtype) is None
    y = mma_gemm8.linear(*given, bias, dtype, residual, tile=tile)
    assert y.dtype == dtype and y.is_contiguous() and (residual is None or y is residual)
    close(y, target, product(given, None), bias, added)
    assert bool(around[:8].isnan().all() and around[-8:].isnan().all())


@pytest.mark.thinned("tile", "dtype", turn=1)
@each_tile(PAIRS)
@each_dtype
@pytest.mark.parametrize("shape", [(130, 272, 1), (64, 640, 1), (3, 16, 2), (1, 128, 2)], ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_geglu(device, tile, dtype, shape, gate_first, approximate, with_bias):
    rows, columns, steps = shape
    given = operands(rows, columns, steps * mma8_tiles.DEPTH * tile.slices, device)
    bias = randn(columns, dtype=dtype, device=device) if with_bias else None
    assert mma_gemm8.accepts_geglu(*given, bias, approximate, dtype) is None
    y = mma_gemm8.geglu(*given, bias, dtype, gate_first, approximate, tile=tile)
    assert y.dtype == dtype and y.is_contiguous()
    both = product(given, bias)
    value, gate = both.chunk(2, -1)
    # GELU is a polynomial, with a relative error of 1e-5
    close(y, geglu.reference(both, gate_first, approximate), value * gate, value, gate, of_float32=2e-5)


@each_dtype
def test_extreme_values_and_the_longest_sums(device, dtype):
    """127 · 127 · 133120 is 1 % below 2**31, and 127 · -127 as often is -1 times that."""
    depth = mma_gemm8.MAX_DEPTH // 64 * 64
    assert 127 * 127 * depth < 2**31 <= 127 * 127 * (mma_gemm8.MAX_DEPTH + 1)
    x = torch.full((16, depth), 127, dtype=torch.int8)
    x[1] = -127
    x[2, ::2] = -127  # these cancel
    x[3] = 0
    x[3, -1] = 1  # the last one counts
    weight = torch.full((16, depth), 127, dtype=torch.int8)
    weight[9:] = -127
    scale = torch.full((16,), 2.0**-8), torch.full((16,), 2.0**-10)
    given = Operands(*(t.to(device) for t in (x, scale[0], weight, scale[1])))
    y = mma_gemm8.linear(*given, None, dtype, tile=WARP)
    wanted = torch.tensor([127.0 * 127 * depth, -127.0 * 127 * depth, 0.0, 127.0], dtype=torch.float64) * 2.0**-18
    target = torch.cat([wanted[:, None].expand(4, 9), -wanted[:, None].expand(4, 7)], 1)
    close(y[:4], target)
    beyond = torch.empty(16, depth + 64, dtype=torch.int8, device=device)
    assert mma_gemm8.accepts(beyond, given.x_scale, beyond, given.weight_scale, None, None, dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("gated", [False, True])
def test_a_scale_that_is_not_finite_spoils_its_row_or_column_alone(device, value, gated):
    given = operands(20, 32, 64, device)
    given.x[3] = 0  # of such a row, as of others
    for number in (3, 17):
        given.x_scale[number] = value
    run = mma_gemm8.geglu if gated else mma_gemm8.linear
    y = run(*given, None, torch.float16, tile=WARP).float().cpu()
    spoilt = ~torch.isfinite(y).all(1)
    assert spoilt.nonzero().flatten().tolist() == [3, 17] and not torch.isfinite(y[3]).any()
    given = operands(20, 32, 64, device)
    given.weight_scale[5] = value
    y = run(*given, None, torch.float16, tile=WARP).float().cpu()
    assert (~torch.isfinite(y)).any(0).nonzero().flatten().tolist() == [5]


def test_rows_of_zeros_and_tiny_scales(device):
    """A product of two small scales is no float32, those of sums with one after the other are."""
    given = operands(20, 16, 64, device)
    given.x[0] = 0
    given.x_scale.fill_(1e-30)
    given.x_scale[0] = 1.0
    given.weight_scale.fill_(1e-15)
    bias = randn(16, dtype=torch.float16, device=device)
    y = mma_gemm8.linear(*given, bias, torch.float16, tile=WARP)
    assert torch.equal(y, bias.expand(20, 16))
    given.x_scale[1:] = 1e-25
    given.weight_scale.fill_(2.0**120)
    assert not bool(mma_gemm8.linear(*given, bias, torch.float16, tile=WARP).isnan().any())


@pytest.mark.parametrize(
    "capability", [TURING, A100, AMPERE, (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)], ids=str
)
def test_tiles_fit_every_card(capability):
    held = {TURING: 64, AMPERE: 99, (8, 9): 99, (12, 0): 99, (12, 1): 99}.get(capability, 163) << 10
    shapes = mma8_tiles.shapes(capability)
    assert len(shapes) >= 5
    for tile in shapes:
        assert mma_gemm.tile_of(mma_gemm8.constants(tile, torch.float16)) == tile
        assert all(tile.resident * mma8_tiles.shared_bytes(tile, pairs) <= held for pairs in (False, True))


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "multiprocessors", "chosen"),
    [
        (8192, 640, 640, 28, "128x160"),
        (512, 1280, 1280, 128, "64x80 in 2 slices"),  # a multiprocessor has one
        (512, 1280, 1344, 128, "64x80"),  # 64 times an odd number: no two slices
        (2048, 640, 640, 128, "128x80 in 2 slices"),
        (8192, 640, 640, 128, "128x160"),
        (1, 8, 64, 128, "64x80"),
    ],
)
def test_the_tile_with_the_least_work_for_a_multiprocessor_stands_first(
    monkeypatch, rows, columns, depth, multiprocessors, chosen
):
    monkeypatch.setattr(mma_gemm8, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    found = mma_gemm8.tiles(rows, torch.empty(columns, depth, dtype=torch.int8))
    assert str(found[0]) == f"mma {chosen}" and len(set(found)) == len(found) == mma_tiles.MAX_TILES
    assert all(depth % (mma8_tiles.DEPTH * each.slices) == 0 for each in found)
    pairs = mma_gemm8.tiles(rows, torch.empty(2 * columns, depth), mma_gemm.Epilogue(mma_gemm.GEGLU))
    assert all(each.width // each.across // 8 % 2 == 0 for each in pairs)


CARDS = [(7, 5), (8, 6), (9, 0), (12, 0)]
"""Registers on others are in docs/generated/cuda.md."""
KINDS = ["linear", "residual", "geglu"]


@pytest.mark.thinned("number", "kind", "dtype", turn=2)
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", CARDS, ids=str)
@each_dtype
def test_mma_gemm8_compiles(monkeypatch, tmp_path, capability, number, kind, dtype):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    tile = mma8_tiles.shapes(capability)[number]
    if kind == "geglu" and tile.width // tile.across // 8 % 2:
        pytest.skip("values and gates need an even number of tiles of columns")
    given = mma_gemm8.constants(tile, dtype, mma_gemm.Epilogue(KINDS.index(kind)))
    architecture = f"sm_{capability[0]}{capability[1]}{'a' * (capability >= (9, 0))}"
    # ten registers of the largest tile, before the products and after them
    spilled = 40 if capability == (12, 0) and number == 0 else 0
    registers, fixed = built("mma_gemm8", given, spilled, architecture)
    assert tile.resident * registers * tile.threads <= REGISTERS and fixed == 0


def test_what_it_does_not_take(device):
    x, x_scale, weight, weight_scale = given = operands(5, 16, 128, device)
    half = torch.float16
    bias, residual = randn(16, dtype=half, device=device), randn(5, 16, dtype=half, device=device)
    assert mma_gemm8.accepts(*given, bias, residual, half) is None
    assert mma_gemm8.accepts(x[:, None], x_scale[:, None], weight, weight_scale, bias, residual[:, None], half) is None

    def told(
        bias: Tensor | None = bias, residual: Tensor | None = residual, dtype: torch.dtype = half, **parts: Tensor
    ) -> bool:
        reason = mma_gemm8.accepts(*given._replace(**parts), bias, residual, dtype)
        return bool(reason)

    assert not told()
    assert told(x=x.to(torch.uint8)) and told(x=x.float()) and told(weight=weight.half())
    assert told(x_scale=x_scale.half()) and told(weight_scale=weight_scale.double())
    assert (
        told(dtype=torch.float32)
        and told(dtype=torch.bfloat16)
        and told(bias=bias.float())
        and told(residual=residual.bfloat16())
    )
    assert (
        told(x=x[:, :64])
        and told(weight=weight[:, :64])
        and told(weight=weight[None])
        and told(x=x[:0], x_scale=x_scale[:0])
    )
    assert told(weight=weight.t().contiguous().t()) and told(
        weight=weight[:12], weight_scale=weight_scale[:12], bias=None
    )
    assert told(x_scale=x_scale[:4]) and told(x_scale=x_scale[:, None]) and told(weight_scale=weight_scale[:8])
    assert told(x_scale=x_scale.repeat_interleave(2)[::2]) and told(weight_scale=weight_scale.repeat_interleave(2)[::2])
    assert told(bias=bias[:8]) and told(residual=residual[:4]) and told(residual=residual.t().contiguous().t())
    # vectors need not be aligned
    assert not told(bias=torch.cat([bias, bias])[1:17]) and not told(weight_scale=torch.cat([weight_scale] * 2)[1:17])
    for name in ("x", "weight"):
        own = getattr(given, name)
        moved = torch.cat([own.flatten(), own.flatten()])[8 : 8 + own.numel()].view(own.shape)
        assert moved.is_contiguous() and told(**{name: moved})
    assert told(residual=torch.cat([residual.flatten(), residual.flatten()])[4:84].view(5, 16))
    # 32 and 96 of K are no whole stage
    for depth in (32, 96):
        assert told(x=x[:, :depth].contiguous(), weight=weight[:, :depth].contiguous())
    assert mma_gemm8.accepts_geglu(*given, bias, "tanh", half) is None
    assert mma_gemm8.accepts_geglu(*given, bias, "sigmoid", half)
    few = given._replace(weight=weight[:8], weight_scale=weight_scale[:8])
    assert mma_gemm8.accepts(*few, None, None, half) is None and mma_gemm8.accepts_geglu(*few, None, "none", half)


def test_vectors_that_are_not_aligned(device):
    given = operands(20, 16, 64, device)
    moved = given._replace(
        x_scale=torch.cat([given.x_scale] * 2)[1:21], weight_scale=torch.cat([given.weight_scale] * 2)[1:17]
    )
    bias = randn(33, dtype=torch.float16, device=device)[1:17]
    y = mma_gemm8.linear(*moved, bias, torch.float16, tile=WARP)
    close(y, product(moved, bias), product(moved, None), bias)


def test_activations_that_are_not_contiguous(device):
    given = operands(6, 16, 64, device)
    twice = given.x.repeat_interleave(2, 0)[::2]
    assert not twice.is_contiguous()
    y = mma_gemm8.linear(twice, *given[1:], None, torch.float16, tile=WARP)
    close(y, product(given, None), product(given, None))


@pytest.mark.parametrize("capability", [(7, 0), (7, 2), *CARDS, (8, 0), (8, 7), (8, 9), (10, 0), (12, 1)], ids=str)
def test_cards_it_is_for(monkeypatch, capability):
    monkeypatch.setattr(nvrtc, "unsupported", lambda device: None)
    monkeypatch.setattr(nvrtc, "bindings", lambda: nvrtc.Bindings(object(), object()))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
    assert mma_gemm8.supported(torch.device("cuda", 0)) == (capability >= (7, 5))
    assert not mma_gemm8.supported(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [TURING, A100, AMPERE], ids=["7.5", "8.0", "8.6"])
@each_dtype
@pytest.mark.parametrize("shape", [*LINEARS, *((m, 2 * n, k) for m, n, k in GATED_LINEARS), (77, 640, 2048)], ids=str)
def test_sizes_of_models(monkeypatch, capability, dtype, shape):
    """With every tile of a card, whichever the GPU is."""
    device, (rows, columns, depth) = torch.device("cuda"), shape
    monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
    given = operands(*shape, device)
    bias, residual = (randn(*size, dtype=dtype, device=device) for size in ((columns,), (rows, columns)))
    wide = given._replace(x_scale=given.x_scale.double(), weight_scale=given.weight_scale.double())
    plain = linear8.scaled(*wide, bias)
    rounding = ROUNDING[dtype]
    for tile in mma8_tiles.shapes(capability):
        if depth % (tile.slices * mma8_tiles.DEPTH):
            continue
        pairs = tile.width // tile.across // 8 % 2 == 0
        results = [(mma_gemm8.linear(*given, bias, dtype, tile=tile), plain)]
        results += [(mma_gemm8.linear(*given, bias, dtype, residual.clone(), tile=tile), plain + residual.double())]
        results += [(mma_gemm8.geglu(*given, bias, dtype, tile=tile), geglu.reference(plain))] if pairs else []
        for y, target in results:
            error = (y.double() - target).abs()
            bound = 1.01 * rounding * target.abs() + 3e-4 * rounding * 2**11
            assert bool((error <= bound).all()), f"{tile}: {float((error / bound).max())}"


@pytest.mark.gpu
def test_in_a_cuda_graph():
    device = torch.device("cuda")
    given = operands(2048, 1280, 1280, device)
    bias, residual = (
        randn(1280, dtype=torch.float16, device=device),
        randn(2048, 1280, dtype=torch.float16, device=device),
    )
    wanted = linear8.launch(*given, bias, residual.clone()), geglu8.launch(*given, bias)
    into, graph = residual.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear8.launch(*given, bias, into)
        gated = geglu8.launch(*given, bias)
    into.copy_(residual)
    graph.replay()
    assert torch.equal(into, wanted[0]) and torch.equal(gated, wanted[1])
