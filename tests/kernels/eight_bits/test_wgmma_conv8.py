"""Hopper's 3x3 convolutions of 8 bits: what they take, what is compiled, and on one the results against float64."""

from __future__ import annotations

import math
import re

import pytest
import torch

from kernels.backend.test_nvrtc import REGISTERS, SHARED, built, compiler  # noqa: F401
from kernels.eight_bits.test_conv2d8 import close, operands, poisoned, target_of
from kernels.support import half_dtype, randn
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.eight_bits import conv2d8, mma_conv8, quantise_weights, wgmma_conv8
from sfast_ext.kernels.eight_bits.wgmma_conv8 import TILES

GPU = torch.device("cuda", 0)
CUDA = torch.device("cuda")
NHWC = torch.channels_last
each_tile = pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile[:4])))


@pytest.mark.thinned("tile", "dtype")
@each_tile
@half_dtype
def test_it_compiles(tile, dtype):
    given = wgmma_conv8.constants(tile, dtype, 320 if dtype == torch.float16 else 640)
    # with the sums of two tiles, a few addresses are laid aside once a tile
    registers, fixed = built("wgmma_conv8", given, 64 if tile.pingpong else 0)
    assert wgmma_conv8.shared_bytes(given) + fixed <= SHARED and given["STAGES"] >= 4
    source = (nvrtc.SOURCES / "wgmma_conv8.cu").read_text()
    less, more = map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", source))
    assert less * 128 + more * 256 <= registers * 384 <= REGISTERS


@pytest.fixture
def h200(monkeypatch):
    for module in (wgmma_conv8, mma_conv8):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(wgmma_conv8, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))


def shapes(size=(2, 320, 64, 64), columns=320, dtype=torch.float16):
    """Operands without memory: x, x_scale, weight, weight_scale, bias, residual."""
    given = [(size, torch.int8), ((2, size[0]), torch.float32), ((columns, 9 * size[1]), torch.int8)]
    given += [((quantise_weights.SCALES, columns), torch.float32), ((columns,), dtype)]
    given += [((size[0], columns, *size[2:]), dtype)]
    return [torch.empty(shape, dtype=of, device="meta") for shape, of in given]


@pytest.mark.parametrize(
    ("size", "columns", "stride", "taken"),
    [
        ((2, 320, 64, 64), 320, 1, True), ((1, 64, 2, 2), 80, 1, True), ((3, 3648, 5, 7), 80, 1, True),
        ((2, 320, 64, 64), 320, 2, False), ((2, 64, 1, 300), 80, 1, False), ((2, 64, 300, 1), 80, 1, False),
        ((2, 64, 9, 9), 88, 1, False), ((2, 96, 9, 9), 80, 1, False), ((1, 3712, 5, 7), 80, 1, False),
    ],
)  # fmt: skip
def test_what_it_takes(h200, size, columns, stride, taken):
    given = shapes(size, columns)
    with triton_runtime.dry_run(GPU):
        dtype = torch.float16
        told = wgmma_conv8.accepts(*given[:5], None if stride == 2 else given[5], stride, dtype)
        assert (told is None) == taken
        assert wgmma_conv8.accepts(*given[:3], given[3][:2], None, None, 1, dtype)
        # others are for the kernel that runs on every card
        assert taken or columns == 88 or size[1] == 96 or mma_conv8.accepts(*given[:5], None, stride, dtype) is None


def test_memory_that_it_refuses(h200):
    """Whole vectors come to shared memory by 16 bytes."""
    x, x_scale, weight, weight_scale, bias, _ = (torch.zeros(t.shape, dtype=t.dtype) for t in shapes((1, 64, 3, 3), 80))
    x = x.contiguous(memory_format=NHWC)
    memory = torch.zeros(weight_scale.numel() + 4)
    with triton_runtime.dry_run(GPU):
        for apart, taken in ((0, True), (1, False), (2, False), (4, True)):
            moved = memory[apart : apart + weight_scale.numel()].view(weight_scale.shape)
            told = wgmma_conv8.accepts(x, x_scale, weight, moved, None, None, 1, torch.float16)
            assert (told is None) == taken == (moved.data_ptr() % 16 == 0)
            halves = torch.zeros(88, dtype=torch.float16)[2 * apart :][:80]
            told = wgmma_conv8.accepts(x, x_scale, weight, weight_scale, halves, None, 1, torch.float16)
            assert (told is None) == taken


def test_no_other_card_has_it(h200, monkeypatch):
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(triton_runtime, "capability", lambda device, capability=capability: capability)
        with triton_runtime.dry_run(GPU):
            assert wgmma_conv8.accepts(*shapes(), 1, torch.float16)


def test_tiles(h200):
    """Blocks that split K are all there at once, and the constants of all are those that are compiled ahead."""
    ahead = wgmma_conv8.variants(wgmma_conv8.constants(TILES[0], torch.bfloat16, 640))
    with triton_runtime.dry_run(GPU):
        for size, columns in (((2, 320, 128, 128), 320), ((2, 1280, 16, 16), 1280), ((1, 640, 24, 33), 640)):
            found = wgmma_conv8.tiles(torch.empty(size, device="meta"), columns)
            assert any(tile.split > 1 for tile in found) == (size[2] <= 32)
            assert all(wgmma_conv8.constants(tile, torch.bfloat16, size[1]) in ahead for tile in found)


@pytest.mark.parametrize("refused", [None, "another stride"])
def test_hoppers_kernel_goes_first_if_it_takes_them(monkeypatch, refused):
    def made(by):
        return lambda *given, **more: calls.append((by, given[4:6], more)) or given[0]

    calls = []
    monkeypatch.setattr(wgmma_conv8, "accepts", lambda *given: refused)
    monkeypatch.setattr(mma_conv8, "accepts", lambda *given: None)
    monkeypatch.setattr(wgmma_conv8, "conv2d", made("hopper"))
    monkeypatch.setattr(mma_conv8, "conv2d", made("any"))
    given = operands((1, 64, 5, 4), 16, torch.device("cpu"))
    bias, residual = torch.randn(16).half(), torch.randn(1, 16, 5, 4).half().contiguous(memory_format=NHWC)
    with triton_runtime.dry_run(torch.device("cpu")):
        conv2d8.launch.function(*given, bias, residual)
    assert {by for by, _, _ in calls} == {"any" if refused else "hopper"}
    assert all(more[0] is bias and more[1] is residual for _, more, _ in calls)


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


ODD = [(1, 64, 5, 7, 80), (2, 128, 33, 57, 160), (5, 192, 2, 3, 240), (16, 64, 8, 8, 80), (7, 192, 13, 2, 320)]
ODD += [(1, 320, 300, 3, 240), (9, 128, 3, 130, 80), (4, 64, 65, 40, 640), (1, 1984, 9, 11, 160)]
UNETS = [(2, 320, 64, 64, 320), (2, 1280, 16, 16, 1280), (2, 640, 33, 57, 640), (3, 2560, 12, 12, 1280)]
UNETS += [(2, 960, 128, 128, 320)]


@pytest.mark.gpu
@each_tile
@half_dtype
@pytest.mark.parametrize("shape", ODD + UNETS, ids=str)
def test_shapes(hopper, monkeypatch, shape, dtype, tile):
    """Borders are taken off by their own sums of codes, images have their own zeros, and nothing is written next to the
    result."""
    *size, columns = shape
    torch.manual_seed(sum(shape))
    given = operands(tuple(size), columns, CUDA)
    if not wgmma_conv8.fits(given[0], columns, tile):
        pytest.skip("blocks that share a sum all run at once, and these are too many")
    result = (size[0], columns, *size[2:])
    bias = randn(columns, dtype=dtype, device=CUDA)
    residual = randn(*result, dtype=dtype, device=CUDA).contiguous(memory_format=NHWC)
    x, x_scale, weight, weight_scale = given
    wide = x.double(), x_scale.double(), weight, weight_scale.double()
    products = conv2d8.reference(*wide, None, None, 1, torch.float64).cpu()
    for of_bias, of_residual in ((bias, residual), (None, None), (bias, None), (None, residual)):
        target = products if of_bias is None else products + of_bias.cpu().double()[:, None, None]
        target = target if of_residual is None else target + of_residual.cpu().double()
        out, around = poisoned(result, dtype, CUDA)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *args, out=out, **kwargs: out)
            y = wgmma_conv8.conv2d(*given, of_bias, of_residual, dtype, tile=tile)
        close(y, target, products, of_bias, of_residual)
        assert bool(around[:64].isnan().all() and around[-64:].isnan().all())


@pytest.mark.gpu
@each_tile
def test_extreme_values_of_the_deepest_image(hopper, tile):
    channels = wgmma_conv8.MAX_DEPTH // 9 // 64 * 64
    x = torch.full((1, channels, 5, 6), 127, dtype=torch.int8, device=CUDA).contiguous(memory_format=NHWC)
    weight = torch.full((80, 9 * channels), 127, dtype=torch.int8, device=CUDA)
    weight[40:] = -127
    scales = torch.tensor([[2.0**-8], [-127.0]], device=CUDA), torch.full((10, 80), 2.0**-11, device=CUDA)
    scales[1][1:] = quantise_weights.sums_of_codes(weight)
    given = x, scales[0], weight, scales[1]
    if wgmma_conv8.fits(x, 80, tile):
        y = wgmma_conv8.conv2d(*given, None, None, torch.float16, tile=tile)
        close(y, target_of(given, None, None, 1))


@pytest.mark.gpu
@each_tile
def test_an_image_has_its_own_scale_alone(hopper, tile):
    given = operands((4, 64, 7, 5), 80, CUDA)
    for value in (math.nan, math.inf):
        given[1][0, 2] = value
        y = wgmma_conv8.conv2d(*given, None, None, torch.float16, tile=tile)
        finite = y.float().cpu().isfinite().flatten(1)
        assert finite.all(1).tolist() == [True, True, False, True] and not bool(y[2].isfinite().any())


@pytest.mark.gpu
def test_it_is_what_is_launched(hopper, monkeypatch):
    monkeypatch.setattr(mma_conv8, "conv2d", None)
    x, *scales = operands((2, 320, 33, 32), 320, CUDA)
    residual = randn(2, 320, 33, 32, dtype=torch.float16, device=CUDA)
    kept = residual.clone()
    y = conv2d8.launch(x.contiguous(), *scales, None, residual)
    given = (x, *scales)
    close(y, target_of(given, None, residual, 1), target_of(given, None, None, 1), residual)
    assert torch.equal(residual, kept)
