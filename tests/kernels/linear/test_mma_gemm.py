"""Products by mma.sync: on the CPU, where csrc/mma_cpu.h stands for tensor cores, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from kernels import cuda_on_cpu
from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import close_rows, expected, needs_nvrtc, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.linear import linear_geglu, mma_gemm

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
SHAPES = [(130, 168, 64), (64, 320, 320), (3, 8, 96), (1, 160, 32), (300, 160, 128)]
each_kind = pytest.mark.parametrize(("dtype", "half_sums"), SUMS, ids=["exact", "half sums", "bfloat16"])


@pytest.fixture(params=[0, 1], ids=["large tiles", "small tiles"])
def each_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = mma_gemm.tiles
    monkeypatch.setattr(mma_gemm, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(mma_gemm, "tiles", lambda *given: tiles(*given)[request.param :])


def scale(half_sums: bool) -> float:
    """Of the tolerance: exact sums are rounded once."""
    return 2 if half_sums else 1


@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(device, each_tile, shape, with_bias, dtype, half_sums):
    x, weight, bias = operands(shape, dtype, device, with_bias)
    assert mma_gemm.linear_readable(x, weight, bias)
    y = mma_gemm.linear(x, weight, bias, half_sums=half_sums)
    assert y.shape == (1, *shape[:2]) and y.is_contiguous()
    close_rows(y, F.linear(wide(x), wide(weight), wide(bias)), scale(half_sums))


def operands(shape, dtype, device, with_bias: bool):
    rows, columns, depth = shape
    x = randn(1, rows, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, std=depth**-0.5)
    return x, weight, randn(columns, dtype=dtype, device=device) if with_bias else None


@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_onto_a_residual(device, each_tile, shape, with_bias, dtype, half_sums):
    x, weight, bias = operands(shape, dtype, device, with_bias)
    residual = randn(1, *shape[:2], dtype=dtype, device=device)
    target = F.linear(wide(x), wide(weight), wide(bias)) + wide(residual)
    assert mma_gemm.linear_readable(x, weight, bias, residual)
    y = mma_gemm.linear(x, weight, bias, residual, half_sums=half_sums)
    assert y is residual
    close_rows(y, target, scale(half_sums))


@each_kind
@pytest.mark.parametrize("shape", [(130, 272, 64), (64, 640, 320), (3, 16, 96), (1, 128, 32), (300, 160, 128)], ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_geglu(device, each_tile, shape, gate_first, approximate, dtype, half_sums):
    for with_bias in (False, True):
        x, weight, bias = operands(shape, dtype, device, with_bias)
        assert mma_gemm.linear_geglu_readable(x, weight, bias, approximate)
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


@each_kind
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_conv2d(device, each_tile, sizes, dtype, half_sums):
    images, channels, columns, height, width, stride = sizes
    x = randn(images, channels, height, width, dtype=dtype, device=device)
    weight = randn(columns, channels, 3, 3, dtype=dtype, device=device, std=(9 * channels) ** -0.5)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    bias = randn(columns, dtype=dtype, device=device)
    for added in (None, bias):
        assert mma_gemm.conv2d_readable(x, weight, added)
        y = mma_gemm.conv2d(x, weight, added, stride, half_sums=half_sums)
        assert y.is_contiguous(memory_format=torch.channels_last)
        target = F.conv2d(wide(x), wide(weight), wide(added), padding=1, stride=stride)
        close_rows(y.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1), scale(half_sums))


def test_tiles_follow_rows_columns_and_card(monkeypatch):
    monkeypatch.setattr(mma_gemm, "multiprocessors", lambda device: 28)
    device, geglu = torch.device("cuda", 0), mma_gemm.Epilogue(mma_gemm.GEGLU)
    for capability, stages in (((7, 5), 2), ((8, 6), 4)):
        monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)  # noqa: B023
        assert mma_gemm.tiles(8192, 320, device) == [(4, 160, stages), (2, 160, 2)]
        assert mma_gemm.tiles(8192, 2560, device, geglu) == [(4, 160, stages), (2, 128, 2)]
        assert mma_gemm.tiles(128, 1280, device) == [(2, 160, 2)]
        assert mma_gemm.tiles(64, 2560, device, geglu) == [(2, 128, 2)]
    assert [str(tile) for tile in mma_gemm.tiles(8192, 2560, device, geglu)] == ["mma 128x160", "mma 64x128"]


@pytest.mark.parametrize(
    ("capability", "dtype", "half_sums"), [(75, *SUMS[0]), (75, *SUMS[1]), *((86, *each) for each in SUMS)], ids=str
)
@pytest.mark.parametrize("tile", [0, 1], ids=["large", "small"])
@pytest.mark.parametrize("what", ["linear", "convolution", "residual", "geglu"])
def test_mma_gemm_compiles(monkeypatch, tmp_path, capability, tile, what, dtype, half_sums):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    kind = mma_gemm.Epilogue(["linear", "residual", "geglu"].index(what.replace("convolution", "linear")))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: divmod(capability, 10))
    monkeypatch.setattr(mma_gemm, "multiprocessors", lambda device: 28)
    chosen = mma_gemm.tiles(8192, 640, torch.device("cuda", 0), kind)[tile]
    given = mma_gemm.constants(chosen, dtype, what == "convolution", half_sums, kind)
    registers, _ = built("mma_gemm", given, architecture=f"sm_{capability}")
    blocks = 2 if tile and capability > 75 else 1  # of a multiprocessor
    assert blocks * registers * 256 <= REGISTERS
    assert blocks * mma_gemm.shared_bytes(given) <= (64 if capability == 75 else 99) << 10


def test_what_it_does_not_take(device, monkeypatch):
    x = randn(5, 64, dtype=torch.float16, device=device)
    weight = randn(16, 64, dtype=torch.float16, device=device)
    assert mma_gemm.linear_readable(x, weight, None)
    for other in (x.float(), x.bfloat16(), x[:, :32], x[:0]):
        assert not mma_gemm.linear_readable(other, weight, None)
    for other in (weight[:12], weight.t(), weight.repeat(1, 2)[:, ::2], weight[None], weight.bfloat16()):
        assert not mma_gemm.linear_readable(x, other, None)
    assert not mma_gemm.linear_readable(x, weight, x[0, :15]) and not mma_gemm.linear_readable(
        x, weight, x[0, :16].float()
    )
    assert mma_gemm.linear_readable(x.bfloat16(), weight.bfloat16(), None)
    sums = randn(5, 32, dtype=torch.float16, device=device)[:, :16], x[:4, :16].contiguous(), x[:, :16].float()
    assert not any(mma_gemm.linear_readable(x, weight, None, each) for each in sums)
    assert mma_gemm.linear_geglu_readable(x, weight, None, "tanh")
    assert not mma_gemm.linear_geglu_readable(x, weight, None, "sigmoid")
    assert not mma_gemm.linear_geglu_readable(x, weight[:8], None, "none")
    image = randn(1, 64, 4, 4, dtype=torch.float16, device=device)
    filters = randn(8, 64, 3, 3, dtype=torch.float16, device=device).contiguous(memory_format=torch.channels_last)
    assert not mma_gemm.conv2d_readable(image, filters, None)
    image = image.contiguous(memory_format=torch.channels_last)
    assert mma_gemm.conv2d_readable(image, filters, None)
    assert not mma_gemm.conv2d_readable(image, filters.contiguous(), None)
    assert not mma_gemm.conv2d_readable(image, filters[:, :, :1, :1], None)


@pytest.mark.parametrize(("capability", "faster"), [((7, 0), False), ((7, 5), True), ((8, 0), False), ((8, 6), True)])
def test_cards_that_add_up_faster_in_half_precision(monkeypatch, capability, faster):
    monkeypatch.setattr(nvrtc.Source, "available", lambda source, device: True)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert mma_gemm.available(device) == mma_gemm.serves_dtype(torch.float16, device) == faster
    assert mma_gemm.serves_dtype(torch.bfloat16, device) == (faster and capability > (7, 5))
    assert not mma_gemm.serves_dtype(torch.float32, device)


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
