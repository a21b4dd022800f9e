"""Products with sums in half precision: on the CPU, where csrc/mma_cpu.h stands for tensor cores, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from kernels import cuda_on_cpu
from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import close_rows, needs_nvrtc, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.linear import mma_gemm

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


@pytest.mark.parametrize("shape", [(130, 168, 64), (64, 320, 320), (3, 8, 96), (1, 160, 32), (300, 160, 128)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(device, shape, with_bias):
    rows, columns, depth = shape
    x = randn(1, rows, depth, dtype=torch.float16, device=device)
    weight = randn(columns, depth, dtype=torch.float16, device=device, std=depth**-0.5)
    bias = randn(columns, dtype=torch.float16, device=device) if with_bias else None
    assert mma_gemm.linear_readable(x, weight, bias)
    y = mma_gemm.linear(x, weight, bias)
    assert y.shape == (1, rows, columns) and y.is_contiguous()
    close_rows(y, F.linear(wide(x), wide(weight), wide(bias)), scale=2)


SIZES = [
    (2, 32, 40, 5, 7, 1),
    (1, 64, 160, 9, 6, 1),
    (3, 32, 8, 1, 1, 1),
    (2, 32, 24, 7, 8, 2),
    (1, 32, 168, 12, 12, 1),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_conv2d(device, sizes):
    images, channels, columns, height, width, stride = sizes
    x = randn(images, channels, height, width, dtype=torch.float16, device=device)
    weight = randn(columns, channels, 3, 3, dtype=torch.float16, device=device, std=(9 * channels) ** -0.5)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    bias = randn(columns, dtype=torch.float16, device=device)
    for added in (None, bias):
        assert mma_gemm.conv2d_readable(x, weight, added)
        y = mma_gemm.conv2d(x, weight, added, stride)
        assert y.is_contiguous(memory_format=torch.channels_last)
        target = F.conv2d(wide(x), wide(weight), wide(added), padding=1, stride=stride)
        close_rows(y.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1), scale=2)


@pytest.mark.parametrize("capability", [75, 86])
@pytest.mark.parametrize("down", [2, 4])
@pytest.mark.parametrize("convolution", [False, True])
def test_mma_gemm_compiles(monkeypatch, tmp_path, capability, down, convolution):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    given = mma_gemm.constants(mma_gemm.Tile(down, 2 if capability == 75 else 4), convolution)
    registers, _ = built("mma_gemm", given, architecture=f"sm_{capability}")
    assert registers * 256 <= REGISTERS
    assert mma_gemm.shared_bytes(given) <= (64 if capability == 75 else 99) << 10


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
    assert mma_gemm.available(torch.device("cuda", 0)) == faster


def test_large_activations_do_not_overflow(device):
    """As large as UNets have them. Sums of 32 products may be 16 times what float16 holds, if later ones are the other
    way."""
    x = torch.full((64, 640), 30000.0, dtype=torch.float16, device=device)
    weight = randn(160, 640, dtype=torch.float16, device=device, std=0.01)
    weight[:, :32] += 0.5
    weight[:, 32:64] -= 0.5
    y = mma_gemm.linear(x, weight, None)
    target = F.linear(wide(x), wide(weight))
    assert bool(torch.isfinite(y).all()) and float((y.cpu().double() - target).abs().max()) < 2000
