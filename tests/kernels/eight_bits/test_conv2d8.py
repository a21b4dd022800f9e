"""3x3 convolutions of 8-bit integers by mma.sync: on the CPU, where csrc/mma_cpu.h stands for tensor cores, and on a
GPU.

Sums are exact, so that results differ from float64 by their one rounding and by what float32 leaves of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import cuda_on_cpu
from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import needs_nvrtc, randn
from sfast_ext import kernels
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.eight_bits import conv2d8, mma8_tiles, mma_conv8, quantise_weights
from sfast_ext.kernels.linear.mma_tiles import Tile

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
A100, AMPERE, TURING = (8, 0), (8, 6), (7, 5)
TILES = [(AMPERE, 0), (AMPERE, 1), (AMPERE, 2), (AMPERE, 3), (TURING, 1), (TURING, 4), (A100, 3)]
WARP = Tile(1, 1, 1, 16, 2, 1)
"""A single one: as quick on a CPU as can be."""
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
each_dtype = pytest.mark.parametrize("dtype", list(ROUNDING), ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cpu":
        cuda_on_cpu.stand_in(monkeypatch, mma_conv8)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: AMPERE)  # whichever the card is
    yield torch.device(request.param)


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tile:
    """One of a card's. On a CPU, Turing's products are those of 8 rows and 16 of K, and registers hold what is loaded;
    a GPU has its own."""
    capability, number = request.param
    if capability == TURING and "cpu" in request.node.callspec.params.values():
        constants = mma_conv8.constants
        monkeypatch.setattr(mma_conv8, "constants", lambda *given: constants(*given) | {"TURING": 1})
    return mma8_tiles.shapes(capability)[number]


def each_tile(tiles: list[tuple[tuple[int, int], int]]) -> pytest.MarkDecorator:
    names = [f"{capability[0]}.{capability[1]}: {mma8_tiles.shapes(capability)[n]}" for capability, n in tiles]
    return pytest.mark.parametrize("tile", tiles, ids=names, indirect=True)


Given = tuple[Tensor, Tensor, Tensor, Tensor]


def operands(size: tuple[int, ...], columns: int, device: torch.device) -> Given:
    """Of all values from -127 to 127, with scales that differ by up to eight times."""
    channels = size[1]
    x = torch.randint(-127, 128, size, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    weight = torch.randint(-127, 128, (columns, 9 * channels), dtype=torch.int8)
    x_scale, weight_scale = (2 ** (3 * torch.rand(2, count) - 1.5) for count in (size[0], columns))
    x_scale[1] = torch.randint(-127, 1, size[:1])
    x_scale[1, 0] = -127
    weight_scale *= 1 / (73.6**2 * (9 * channels) ** 0.5)
    weight_scale = torch.cat([weight_scale[:1], quantise_weights.sums_of_codes(weight)])
    return x.to(device), x_scale.to(device), weight.to(device), weight_scale.to(device)


def target_of(given: Given, bias: Tensor | None, residual: Tensor | None, stride: int) -> Tensor:
    """In float64."""
    x, x_scale, weight, weight_scale = (t.cpu() for t in given)
    more = [None if t is None else t.cpu() for t in (bias, residual)]
    wide = x, x_scale.double(), weight, weight_scale.double()
    return conv2d8.reference(*wide, *more, stride, torch.float64)


def close(y: Tensor, target: Tensor, *terms: Tensor | None) -> None:
    """Rounded once; what is added up has been rounded in float32."""
    given = [term.cpu().double().abs() for term in terms if term is not None]
    size = sum(term[:, None, None] if term.dim() == 1 else term for term in given)
    bound = 1.001 * ROUNDING[y.dtype] * target.abs() + 2.0**-21 * size + 2.0**-25
    error = (y.cpu().double() - target).abs()
    assert y.shape == target.shape and bool((error <= bound).all()), f"{(error / bound).max()} times the bound"


def poisoned(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A channels-last tensor, and the memory around it with it, which holds nothing but NaN."""
    count = math.prod(size)
    around = torch.full((count + 128,), math.nan, dtype=dtype, device=device)
    images, channels, height, width = size
    return around[64:-64].view(images, height, width, channels).permute(0, 3, 1, 2), around


SIZES = [((2, 64, 5, 7), 40), ((1, 128, 9, 8), 168), ((3, 64, 1, 1), 8), ((1, 64, 1, 17), 88), ((2, 128, 13, 3), 320)]
"""Of an image, and output channels."""


@pytest.mark.thinned("tile", "dtype")
@each_tile(TILES)
@each_dtype
@pytest.mark.parametrize(("size", "columns"), SIZES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_conv2d(monkeypatch, device, tile, dtype, size, columns, stride, with_bias, with_residual):
    size = (size[0], size[1] * tile.slices, *size[2:])
    given = operands(size, columns, device)
    shape = mma_conv8.size_of(given[0], columns, stride)
    bias = randn(columns, dtype=dtype, device=device) if with_bias else None
    residual = randn(*shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    residual = residual if with_residual else None
    target = target_of(given, bias, residual, stride)
    assert mma_conv8.accepts(*given, bias, residual, stride, dtype) is None
    # nothing is written next to the result
    out, around = poisoned(shape, dtype, device)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: out)
        y = mma_conv8.conv2d(*given, bias, residual, stride, dtype, tile=tile)
    assert y is out and y.is_contiguous(memory_format=torch.channels_last)
    close(y, target, target_of(given, None, None, stride), bias, residual)
    assert bool(around[:64].isnan().all() and around[-64:].isnan().all())


def test_an_image_has_its_own_scale_alone(device):
    given = operands((4, 64, 3, 5), 16, device)
    for value in (math.nan, math.inf):
        given[1][0, 2] = value
        y = mma_conv8.conv2d(*given, None, None, 1, torch.float16, tile=WARP)
        finite = y.float().cpu().isfinite().flatten(1)
        assert finite.all(1).tolist() == [True, True, False, True] and not bool(y[2].isfinite().any())


def test_extreme_values_of_the_deepest_image(device):
    """Nine taps of 127 · 127 for 2,560 channels and more fit int32; corners have four taps."""
    channels = mma_conv8.MAX_DEPTH // 9 // 64 * 64
    assert 127 * 255 * 9 * channels < 2**31 <= 127 * 255 * (mma_conv8.MAX_DEPTH + 1)  # of zeros down to -128
    x = torch.full((1, channels, 3, 3), 127, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    weight = torch.full((8, 9 * channels), 127, dtype=torch.int8)
    weight[4:] = -127
    scales = torch.full((2, 1), 2.0**-8, device=device), torch.full((10, 8), 2.0**-10, device=device)
    scales[0][1] = -127
    scales[1][1:] = quantise_weights.sums_of_codes(weight)
    given = x.to(device), scales[0], weight.to(device), scales[1]
    y = mma_conv8.conv2d(*given, None, None, 1, torch.float16, tile=WARP)
    taps = torch.tensor([[4, 6, 4], [6, 9, 6], [4, 6, 4]], dtype=torch.float64)
    target = taps * 127 * 254 * channels * 2.0**-18
    close(y, torch.stack([target] * 4 + [-target] * 4)[None])
    layout = torch.channels_last
    beyond = torch.empty(1, channels + 64, 3, 3, dtype=torch.int8, device=device).contiguous(memory_format=layout)
    wide = torch.empty(8, 9 * (channels + 64), dtype=torch.int8, device=device)
    assert mma_conv8.accepts(beyond, given[1], wide, given[3], None, None, 1, torch.float16)


@pytest.mark.parametrize(
    "change",
    [
        {"x": lambda x: x[:, :32]},
        {"x": lambda x: x.contiguous()},
        {"x": lambda x: x.float()},
        {"weight": lambda w: w[:, :-1]},
        {"weight": lambda w: w[:-1]},
        {"weight": lambda w: w.half()},
        {"x_scale": lambda s: s[:1]},
        {"x_scale": lambda s: s[0]},
        {"x_scale": lambda s: s.t().contiguous().t()},
        {"weight_scale": lambda s: s[0]},
        {"weight_scale": lambda s: s[:2]},
        {"x_scale": lambda s: s.double()},
        {"weight_scale": lambda s: s[:, 1:]},
        {"bias": lambda b: b[1:]},
        {"bias": lambda b: b.float()},
        {"residual": lambda r: r[:, :, 1:]},
        {"residual": lambda r: r.contiguous()},
        {"stride": lambda s: 3},
        {"dtype": lambda d: torch.float32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_operands_are_declined(device, change):
    x, x_scale, weight, weight_scale = operands((2, 64, 5, 4), 16, device)
    residual = randn(2, 16, 5, 4, device=device, dtype=torch.float16)
    given = {
        "x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale,
        "bias": randn(16, device=device, dtype=torch.float16),
        "residual": residual.contiguous(memory_format=torch.channels_last),
        "stride": 1, "dtype": torch.float16,
    }  # fmt: skip
    assert mma_conv8.accepts(**given) is None
    ((name, function),) = change.items()
    assert mma_conv8.accepts(**{**given, name: function(given[name])}) is not None


def test_other_sizes_are_declined(device):
    for size, columns, stride, taken in (
        ((2, 64, 5, 4), 16, 1, True),
        ((2, 64, 5, 4), 16, 3, False),
        ((2, 64, 5, 4), 16, 0, False),
        ((2, 96, 5, 4), 16, 1, False),
        ((2, 32, 5, 4), 16, 1, False),
        ((2, 64, 5, 4), 12, 1, False),
        ((0, 64, 5, 4), 16, 1, False),
    ):
        images = torch.zeros(size, dtype=torch.int8, device=device).contiguous(memory_format=torch.channels_last)
        weight = torch.zeros(columns, 9 * size[1], dtype=torch.int8, device=device)
        scales = [torch.ones(*count, device=device) for count in ((2, size[0]), (quantise_weights.SCALES, columns))]
        told = mma_conv8.accepts(images, scales[0], weight, scales[1], None, None, stride, torch.float16)
        assert (told is None) == taken, (size, columns, stride, told)


@pytest.mark.parametrize("stride", [1, 2])
def test_launch_takes_other_layouts_and_leaves_the_residual(device, stride):
    x, *scales = operands((2, 64, 6, 5), 24, device)
    residual = randn(*mma_conv8.size_of(x, 24, stride), dtype=torch.float16, device=device)
    kept, bias = residual.clone(), randn(24, dtype=torch.float16, device=device)
    y = conv2d8.launch(x.contiguous(), *scales, bias, residual, stride)
    given = (x, *scales)
    close(y, target_of(given, bias, residual, stride), target_of(given, None, None, stride), bias, residual)
    assert torch.equal(residual, kept)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "columns"),
    [((2, 320, 64, 64), 320), ((2, 960, 32, 32), 640), ((1, 1920, 32, 24), 640), ((3, 2560, 16, 16), 1280)],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_sizes_of_models_by_every_tile(size, columns, stride):
    device = torch.device("cuda")
    given = operands(size, columns, device)
    bias = randn(columns, dtype=torch.float16, device=device)
    target = target_of(given, bias, None, stride)
    for capability in (A100, AMPERE):
        for tile in mma8_tiles.shapes(capability):
            if size[1] % (64 * tile.slices) == 0:
                y = mma_conv8.conv2d(*given, bias, None, stride, torch.float16, tile=tile)
                close(y, target, target, bias, torch.ones(1))


@pytest.mark.thinned("number", "capability", "dtype")
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("capability", [TURING, AMPERE, (12, 0)], ids=str)
@each_dtype
def test_mma_conv8_compiles(monkeypatch, tmp_path, capability, number, residual, dtype):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    tile = mma8_tiles.shapes(capability)[number]
    architecture = f"sm_{capability[0]}{capability[1]}{'a' * (capability >= (9, 0))}"
    # a few registers of the largest tile, before the products and after them
    spilled = 40 if tile.area == 128 * 160 else 0
    registers, fixed = built("mma_conv8", mma_conv8.constants(tile, dtype, residual), spilled, architecture)
    assert tile.resident * registers * tile.threads <= REGISTERS and fixed == 0
