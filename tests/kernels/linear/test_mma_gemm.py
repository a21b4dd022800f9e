"""Products by mma.sync: on the CPU, where csrc/mma_cpu.h stands for tensor cores, and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from pairs import covering
from torch.nn import functional as F

from kernels import cuda_on_cpu
from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import close_rows, expected, needs_nvrtc, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.linear import linear_geglu, mma_gemm, mma_tiles

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cpu":
        cuda_on_cpu.stand_in(monkeypatch, mma_gemm)
    # whichever the card is
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6))
    yield torch.device(request.param)


SUMS = [(torch.float16, False), (torch.float16, True), (torch.bfloat16, False)]
SHAPES = [(130, 168, 64), (64, 320, 224), (3, 8, 96), (1, 160, 32), (300, 160, 96)]
each_kind = pytest.mark.parametrize(("dtype", "half_sums"), SUMS, ids=["exact", "half sums", "bfloat16"])


A100, AMPERE, TURING = (8, 0), (8, 6), (7, 5)
WIDE = [(AMPERE, 0), (AMPERE, 1), (TURING, 0), (A100, 3), (AMPERE, 4)]
"""With an even number of tiles of columns for a warp, which values and gates need."""
NARROW = [(AMPERE, 2), (AMPERE, 3), (TURING, 4)]


def of_tiles(capability: tuple[int, int], number: int) -> str:
    tile = mma_tiles.shapes(capability, False)[number]
    return f"{tile}{', loads held in registers' * (capability == TURING)}"


def each_tile(tiles: list[tuple[tuple[int, int], int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tile", tiles, ids=[of_tiles(*each) for each in tiles], indirect=True)


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> mma_tiles.Tile:
    """A product has this one of a card's tiles. Turing has no cp.async: there registers hold what is loaded."""
    capability, number = request.param
    constants, held = mma_gemm.constants, {"TURING": 1} if capability == TURING else {}

    def only(rows, weight, epilogue=mma_gemm.NOTHING, half_sums=False):
        # in half precision A100 adds up no faster, and has no such tiles
        return [mma_tiles.shapes(capability, half_sums and capability != A100)[number]]

    monkeypatch.setattr(mma_gemm, "constants", lambda *given, **more: constants(*given, **more) | held)
    monkeypatch.setattr(mma_gemm, "tiles", only)
    return mma_tiles.shapes(capability, False)[number]


def scale(half_sums: bool) -> float:
    """Of the tolerance: exact sums are rounded once."""
    return 2 if half_sums else 1


@pytest.mark.thinned("tile", "dtype")
@each_tile(WIDE + NARROW)
@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(device, tile, shape, with_bias, dtype, half_sums):
    x, weight, bias = operands(shape, dtype, device, with_bias, tile)
    assert mma_gemm.accepts_linear(x, weight, bias) is None
    y = mma_gemm.linear(x, weight, bias, half_sums=half_sums)
    assert y.shape == (1, *shape[:2]) and y.is_contiguous()
    close_rows(y, F.linear(wide(x), wide(weight), wide(bias)), scale(half_sums))


def operands(shape, dtype, device, with_bias: bool, tile: mma_tiles.Tile):
    rows, columns, depth = shape[0], shape[1], shape[2] * tile.slices
    x = randn(1, rows, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, std=depth**-0.5)
    return x, weight, randn(columns, dtype=dtype, device=device) if with_bias else None


@pytest.mark.thinned("tile", "dtype", "shape", turn=1)
@each_tile(WIDE + NARROW)
@each_kind
@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_onto_a_residual(device, tile, shape, with_bias, dtype, half_sums):
    x, weight, bias = operands(shape, dtype, device, with_bias, tile)
    residual = randn(1, *shape[:2], dtype=dtype, device=device)
    target = F.linear(wide(x), wide(weight), wide(bias)) + wide(residual)
    assert mma_gemm.accepts_linear(x, weight, bias, residual) is None
    y = mma_gemm.linear(x, weight, bias, residual, half_sums=half_sums)
    assert y is residual
    close_rows(y, target, scale(half_sums))


@pytest.mark.thinned("tile", "dtype", turn=2)
@each_tile(WIDE)
@each_kind
@pytest.mark.parametrize("shape", [(130, 272, 64), (64, 320, 224), (3, 16, 96), (1, 128, 32), (300, 160, 96)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_geglu(device, tile, shape, with_bias, gate_first, approximate, dtype, half_sums):
    x, weight, bias = operands(shape, dtype, device, with_bias, tile)
    assert mma_gemm.accepts_linear_geglu(x, weight, bias, approximate) is None
    y = mma_gemm.linear_geglu(x, weight, bias, gate_first, approximate, half_sums=half_sums)
    assert y.shape == (1, shape[0], shape[1] // 2)
    close_rows(y, expected(linear_geglu, x, weight, bias, gate_first, approximate), 2 * scale(half_sums))


SIZES = [
    (2, 32, 40, 5, 7, 1),
    (1, 64, 160, 9, 6, 1),
    (3, 32, 8, 1, 1, 1),
    (2, 32, 24, 7, 8, 2),
    (1, 32, 168, 12, 12, 1),
]


@pytest.mark.thinned("tile", "dtype", "sizes", turn=2)
@each_tile(WIDE + NARROW)
@each_kind
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_conv2d(device, tile, sizes, with_bias, dtype, half_sums):
    images, channels, columns, height, width, stride = sizes
    channels *= tile.slices
    x = randn(images, channels, height, width, dtype=dtype, device=device)
    weight = randn(columns, channels, 3, 3, dtype=dtype, device=device, std=(9 * channels) ** -0.5)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    bias = randn(columns, dtype=dtype, device=device) if with_bias else None
    assert mma_gemm.accepts_conv2d(x, weight, bias) is None
    y = mma_gemm.conv2d(x, weight, bias, stride, half_sums=half_sums)
    assert y.is_contiguous(memory_format=torch.channels_last)
    target = F.conv2d(wide(x), wide(weight), wide(bias), padding=1, stride=stride)
    close_rows(y.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1), scale(half_sums))


@pytest.mark.parametrize("half_sums", [False, True])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (12, 0)], ids=str)
def test_tiles_fit_a_multiprocessor(capability, half_sums):
    held = {(7, 5): 64, (8, 0): 163}.get(capability, 99) << 10
    shapes = mma_tiles.shapes(capability, half_sums)
    sliced = ["mma 128x160 in 2 slices"] * (capability == (8, 0) and not half_sums)
    sliced += ["mma 128x80 in 2 slices", "mma 64x80 in 2 slices"]
    assert [str(tile) for tile in shapes] == ["mma 128x160", "mma 128x80", "mma 64x80", *sliced]
    for tile in shapes:
        assert tile.stages >= 2 and mma_gemm.tile_of(mma_gemm.constants(tile, torch.float16)) == tile
        for pairs in (False, True):
            assert tile.resident * mma_tiles.shared_bytes(tile, pairs) <= held
            # the result takes the place of the stages
            columns = tile.width // (2 if pairs else 1)
            assert mma_tiles.shared_bytes(tile, pairs) >= 2 * tile.rows * (columns + 8 * tile.across)
    most, one_more = 2 if capability == (7, 5) else 6, [tile._replace(stages=tile.stages + 1) for tile in shapes]
    assert all(t.stages > most or t.resident * mma_tiles.shared_bytes(t, False) > held for t in one_more)


def test_the_sums_that_slices_give_each_other_take_the_place_of_the_stages():
    tile = mma_tiles.Tile(2, 2, 4, 160, 2, 1, slices=2)
    assert mma_tiles.shared_bytes(tile, pairs=True) == 4 * 128 * 160 > 2 * 2 * (128 + 160) * 64


@pytest.mark.parametrize(
    ("rows", "columns", "multiprocessors", "chosen"),
    [
        (8192, 320, 28, "128x160"),  # 5 blocks each where 28 share 128 of them
        (512, 1280, 28, "64x80"),  # 5 small blocks each, or 3 of twice their size
        (512, 1280, 34, "128x160"),  # 32 blocks, which run at once
        (512, 1280, 128, "64x80 in 2 slices"),  # a multiprocessor has one
        (2048, 640, 128, "128x80 in 2 slices"),
        (2048, 1280, 128, "128x160"),  # one, but no shared memory for slices
        (8192, 640, 128, "128x160"),  # two, the second of which computes while the first one begins or ends
        (1, 8, 128, "64x80 in 2 slices"),
    ],
)
def test_the_tile_with_the_least_work_for_a_multiprocessor_stands_first(
    monkeypatch, rows, columns, multiprocessors, chosen
):
    monkeypatch.setattr(mma_gemm, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6))
    found = mma_gemm.tiles(rows, torch.empty(columns, 320))
    assert str(found[0]) == f"mma {chosen}" and len(set(found)) == len(found) == mma_tiles.MAX_TILES
    # of 32 no two slices
    assert all(each.slices == 1 for each in mma_gemm.tiles(rows, torch.empty(columns, 32, 3, 3)))


def test_values_and_gates_need_an_even_number_of_tiles(monkeypatch):
    monkeypatch.setattr(mma_gemm, "multiprocessors", lambda device: 128)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6))
    found = mma_gemm.tiles(64, torch.empty(2560, 320), mma_gemm.Epilogue(mma_gemm.GEGLU))
    assert [str(tile) for tile in found] == ["mma 64x80 in 2 slices", "mma 128x80"]


KINDS = [(75, *SUMS[0]), (75, *SUMS[1]), *((86, *each) for each in SUMS)]
WHATS = ("linear", "convolution", "residual", "geglu")


def compiled_on(kind: tuple[int, torch.dtype, bool], what: str, tile: int) -> bool:
    """Whether a case is among those of which each product by each tile is for one card and type."""
    # a warp of the others has five tiles of columns, no even number, which values and gates need
    if what == "geglu" and tile not in (0, 1, 4):
        return False
    return bool(os.environ.get("SFAST_ALL_CASES")) or (tile + WHATS.index(what) + KINDS.index(kind)) % len(KINDS) == 0


@pytest.mark.parametrize(("kind", "what", "tile"), covering(KINDS, WHATS, range(5), when=compiled_on), ids=str)
def test_mma_gemm_compiles(monkeypatch, tmp_path, kind, what, tile):
    capability, dtype, half_sums = kind
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    epilogue = mma_gemm.Epilogue(["linear", "residual", "geglu"].index(what.replace("convolution", "linear")))
    chosen = mma_tiles.shapes(divmod(capability, 10), half_sums)[tile]
    given = mma_gemm.constants(chosen, dtype, what == "convolution", half_sums, epilogue)
    registers, _ = built("mma_gemm", given, architecture=f"sm_{capability}")
    assert chosen.resident * registers * chosen.threads <= REGISTERS


def test_what_it_does_not_take(device, monkeypatch):
    x = randn(5, 64, dtype=torch.float16, device=device)
    weight = randn(16, 64, dtype=torch.float16, device=device)
    assert mma_gemm.accepts_linear(x, weight, None) is None
    for other in (x.float(), x.bfloat16(), x[:, :32], x[:0]):
        assert mma_gemm.accepts_linear(other, weight, None)
    for other in (weight[:12], weight.t(), weight.repeat(1, 2)[:, ::2], weight[None], weight.bfloat16()):
        assert mma_gemm.accepts_linear(x, other, None)
    assert mma_gemm.accepts_linear(x, weight, x[0, :15]) and mma_gemm.accepts_linear(
        x, weight, x[0, :16].float()
    )
    assert mma_gemm.accepts_linear(x.bfloat16(), weight.bfloat16(), None) is None
    sums = randn(5, 32, dtype=torch.float16, device=device)[:, :16], x[:4, :16].contiguous(), x[:, :16].float()
    assert all(mma_gemm.accepts_linear(x, weight, None, each) for each in sums)
    assert mma_gemm.accepts_linear_geglu(x, weight, None, "tanh") is None
    assert mma_gemm.accepts_linear_geglu(x, weight, None, "sigmoid")
    assert mma_gemm.accepts_linear_geglu(x, weight[:8], None, "none")
    image = randn(1, 64, 4, 4, dtype=torch.float16, device=device)
    filters = randn(8, 64, 3, 3, dtype=torch.float16, device=device).contiguous(memory_format=torch.channels_last)
    assert mma_gemm.accepts_conv2d(image, filters, None)
    image = image.contiguous(memory_format=torch.channels_last)
    assert mma_gemm.accepts_conv2d(image, filters, None) is None
    assert mma_gemm.accepts_conv2d(image, filters.contiguous(), None)
    assert mma_gemm.accepts_conv2d(image, filters[:, :, :1, :1], None)


@pytest.mark.parametrize(
    ("capability", "there", "faster"),
    [((7, 0), False, False), ((7, 5), True, True), ((8, 0), True, False), ((8, 6), True, True), ((9, 0), False, False)],
)
def test_cards_it_is_for_and_those_that_add_up_faster_in_half_precision(monkeypatch, capability, there, faster):
    monkeypatch.setattr(nvrtc, "unsupported", lambda device: None)
    monkeypatch.setattr(nvrtc, "bindings", lambda: nvrtc.Bindings(object(), object()))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert mma_gemm._SOURCE.supported(device) == mma_gemm.supported(device, torch.float16) == there
    assert mma_gemm.supported(device, torch.bfloat16) == (there and capability > (7, 5))
    assert not mma_gemm.supported(device, torch.float32) and mma_gemm.half_sums_profitable(device) == faster


def test_large_activations_do_not_overflow(device):
    """As large as UNets have them. Sums of 32 products may be 16 times what float16 holds, if later ones are the other
    way."""
    x = torch.full((64, 640), 30000.0, dtype=torch.float16, device=device)
    weight = randn(160, 640, dtype=torch.float16, device=device, std=0.01)
    weight[:, :32] += 0.5
    weight[:, 32:64] -= 0.5
    y = mma_gemm.linear(x, weight, None, half_sums=True)
    target = F.linear(wide(x), wide(weight))
    assert bool(torch.isfinite(y).all()) and float((y.cpu().double() - target).abs().max()) < 2000
