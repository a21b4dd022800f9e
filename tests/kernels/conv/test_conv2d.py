from __future__ import annotations

import functools
import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from kernels.support import half_dtype, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NHWC = torch.channels_last

# images, channels, height, width, channels of the result
ODD = [(1, 64, 5, 7, 80), (2, 64, 33, 57, 88), (3, 128, 9, 11, 168), (5, 64, 1, 3, 96), (16, 64, 8, 8, 80)]
ODD += [(7, 192, 13, 1, 328), (1, 64, 1, 1, 80), (1, 64, 300, 3, 232), (9, 128, 3, 130, 1288), (4, 64, 65, 40, 1280)]
ODD += [(2, 64, 128, 131, 160)]
UNETS = [(2, 320, 64, 64, 320), (2, 1280, 16, 16, 1280), (2, 640, 33, 57, 640), (2, 2560, 12, 12, 1280)]
each_tile = pytest.mark.parametrize("tile", conv2d.TILES, ids=lambda t: f"{t.width}, {t.pingpong}, {t.split}, {t.pair}")


def operands(shape, dtype, device):
    """Such that the results are of the size of one."""
    images, channels, height, width, columns = shape
    x = randn(images, channels, height, width, dtype=dtype, device=device)
    weight = randn(columns, channels, 3, 3, dtype=dtype, device=device, std=(9 * channels) ** -0.5)
    return x.to(memory_format=NHWC), weight.to(memory_format=NHWC)


def image(shape, dtype=torch.float16):
    """One without memory."""
    return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=NHWC)


def fits_one_round(x, columns, tile):
    return tile.split == 1 or not math.isinf(conv2d._microseconds(x, columns, tile))


def by(tile, x, weight):
    if not fits_one_round(x, weight.shape[0], tile):
        pytest.skip("blocks that share a sum all run at once, and these are too many")
    return conv2d._launch(x, weight, tile)


def right(y, target):
    """One rounding, and what sums of thousands of terms in float32 leave; as a whole little more than by rounding."""
    assert y.shape == target.shape and y.is_contiguous(memory_format=NHWC)
    rounding = torch.finfo(y.dtype).eps / 2
    torch.testing.assert_close(wide(y), target, rtol=1.05 * rounding, atol=1e-4)
    rounded = target.to(y.dtype).double()
    assert (wide(y) - target).norm() <= 1.1 * (rounded - target).norm()


@functools.lru_cache(maxsize=1)  # tiles follow each other
def declined(*args):
    raise AssertionError("it is left to the library")


def case(shape, dtype):
    x, weight = operands(shape, dtype, CUDA)
    return x, weight, F.conv2d(x.double(), weight.double(), padding=1).cpu()


@pytest.mark.gpu
@each_tile
@half_dtype
@pytest.mark.parametrize("shape", ODD + UNETS, ids=str)
def test_shapes(shape, dtype, tile):
    x, weight, target = case(shape, dtype)
    y = by(tile, x, weight)
    right(y, target)
    assert torch.equal(conv2d._launch(x, weight, tile), y)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(
    "shape",
    [(2, 320, 128, 128, 320), (2, 1280, 32, 32, 1280), (2, 640, 48, 48, 640), (2, 320, 65, 113, 320)]
    + [(8, 320, 64, 64, 320), (2, 1280, 24, 24, 1280), (2, 1280, 12, 12, 1280), (2, 960, 64, 64, 320)],
    ids=str,
)
def test_unet_shapes(dtype, shape, monkeypatch):
    x, weight, target = case(shape, dtype)
    assert conv2d.accepts(x, weight) is None
    monkeypatch.setattr(conv2d.launch, "fallback", declined)
    right(conv2d.launch(x, weight), target)


@pytest.mark.gpu
@each_tile
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_reach_the_neighbours_alone(tile, bad):
    x, weight = operands((3, 128, 9, 21, 168), torch.float16, CUDA)
    clean = by(tile, x, weight)
    for image, row, column in ((0, 0, 0), (1, 4, 8), (1, 8, 15), (2, 8, 20), (0, 5, 16)):
        spoilt = x.clone()
        spoilt[image, 77, row, column] = bad
        y = conv2d._launch(spoilt, weight, tile)
        seen = torch.zeros(3, 9, 21, dtype=torch.bool, device=CUDA)
        seen[image, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = True
        seen = seen[:, None].expand(y.shape)
        assert not y[seen].isfinite().any()
        assert torch.equal(y[~seen], clean[~seen])


@pytest.mark.gpu(gigabytes=24)
def test_a_result_of_more_than_31_bits():
    x, weight = operands((1, 64, 2600, 2600, 320), torch.float16, CUDA)
    for tile in conv2d.TILES:
        if fits_one_round(x, 320, tile):
            y = conv2d._launch(x, weight, tile)
            assert y.numel() > 2**31
            for rows in (slice(0, 9), slice(1300, 1309), slice(2591, 2600)):
                around = x[:, :, max(rows.start - 1, 0) : rows.stop + 1]
                target = F.conv2d(around.double(), weight.double(), padding=1).cpu()
                first = rows.start - max(rows.start - 1, 0)
                right(y[:, :, rows], target[:, :, first : first + 9])


@pytest.mark.gpu
def test_what_it_does_not_read():
    x, weight = operands((2, 64, 48, 48, 320), torch.float16, CUDA)
    assert conv2d.accepts(x, weight) is None and conv2d.profitable(x, weight)
    # of the weights only those at 16 bytes
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device=CUDA)[1:].view(2, 48, 48, 64).permute(0, 3, 1, 2).copy_(x)
    refused = {
        "channels": operands((2, 96, 48, 48, 320), torch.float16, CUDA),
        "columns by fours": (x, weight[:92]),
        "float32": (x.float(), weight.float()),
        "an image in NCHW": (x.contiguous(), weight),
        "a weight in NCHW": (x, weight.contiguous()),
        "every other row": (x[:, :, ::2], weight),
        "at 2 bytes": (odd, weight),
        "1x1": (x, weight[:, :, :1, :1].contiguous(memory_format=NHWC)),
        "5x5": (x, F.pad(weight, (1, 1, 1, 1)).contiguous(memory_format=NHWC)),
        "no image": (x[:0], weight),
    }
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for name, args in refused.items():
            assert conv2d.accepts(*args), name
            assert torch.equal(conv2d.launch(*args), conv2d.fallback(*args)), name
    assert conv2d.accepts(x, weight.bfloat16())
    assert conv2d.accepts(x, weight.cpu())
    assert conv2d.accepts(x[0], weight)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    x, weight = operands((2, 64, 24, 40, 168), torch.float16, CUDA)
    tiles = [tile for tile in conv2d.TILES if fits_one_round(x, 168, tile)]
    for tile in tiles:
        conv2d._launch(x, weight, tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [conv2d._launch(x, weight, tile) for tile in tiles]
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        for tile, out in zip(tiles, outs, strict=True):
            assert torch.equal(out, conv2d._launch(x, weight, tile))


def test_reference_rounds_once():
    x, weight = operands((2, 64, 5, 7, 16), torch.bfloat16, CPU)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    out = conv2d.reference(x, weight)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=2**-7, atol=1e-5)
    assert conv2d.reference(x.double(), weight.double()).dtype == torch.float64
    torch.testing.assert_close(conv2d.reference(x.double(), weight.double()), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_cpu_it_is_the_librarys(dtype):
    x, weight = operands((2, 64, 12, 12, 80), dtype, CPU)
    assert conv2d.accepts(x, weight)
    assert torch.equal(conv2d.launch(x, weight), F.conv2d(x, weight, padding=1))


def test_without_the_kernel_it_is_the_librarys(monkeypatch):
    def unavailable(*args):
        raise nvrtc.Unavailable("no compiler")

    x, weight = operands((2, 64, 12, 12, 80), torch.float32, CPU)
    monkeypatch.setattr(conv2d, "accepts", lambda *args: None)
    monkeypatch.setattr(conv2d, "profitable", lambda *args: True)
    monkeypatch.setattr(conv2d, "_launch", unavailable)
    assert torch.equal(conv2d.launch(x, weight), F.conv2d(x, weight, padding=1))


def test_so_many_pixels_are_left_to_others(monkeypatch):
    def takes(images, height, width):
        return conv2d.profitable(image((images, 64, height, width)), image((160, 64, 3, 3)))

    monkeypatch.setattr(conv2d, "_cudnn", lambda x, columns: math.inf)
    fewest, (last, first) = conv2d.MAX_PIXELS_AS_PRODUCT, conv2d._IN_PARTS
    edges = {fewest: False, fewest + 1: True, last: True, last + 1: False, first: False, first + 1: True}
    for pixels, wanted in edges.items():
        assert takes(1, 1, pixels) == takes(1, pixels, 1) == takes(pixels, 1, 1) == wanted, pixels
    assert takes(2, 64, 64) and not takes(2, 8, 8)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((2, 640, 48, 48, 640), True),
        ((2, 1280, 48, 48, 1280), True),
        ((1, 320, 64, 64, 320), True),
        ((2, 1280, 38, 26, 1280), False),  # cuDNN's tiles fill one round, ours begin another
        ((1, 512, 64, 64, 512), False),  # a VAE's
        ((1, 256, 256, 256, 256), False),
    ],
    ids=str,
)
def test_what_cudnn_has_sooner_is_left_to_it(monkeypatch, shape, wanted):
    monkeypatch.setattr(conv2d, "multiprocessors", lambda device: 132)
    assert conv2d.profitable(image(shape[:4]), image((shape[4], shape[1], 3, 3))) == wanted


SIZES = [1, 2, 3, 5, 8, 9, 17, 130]


def test_boxes_cover_each_pixel_once_and_are_the_fewest():
    pixels, powers = 128, [1 << bit for bit in range(8)]
    for images, height, width in product((1, 2, 3, 16), SIZES, SIZES):
        (across, down), (wide_, high, deep) = conv2d._boxes(image((images, 64, height, width)))
        columns, rows = 1 << across, 1 << down
        assert pixels % (columns * rows) == 0
        some = pixels // (columns * rows)
        covered = torch.zeros(images, height, width, dtype=torch.int)
        for box in range(wide_ * high * deep):  # as csrc/conv2d.cu finds its place
            x, y, first = box % wide_ * columns, box // wide_ % high * rows, box // (wide_ * high) * some
            assert x < width and y < height and first < images
            covered[first : first + some, y : y + rows, x : x + columns] += 1
        assert covered.eq(1).all(), (images, height, width)
        fewest = min(
            -(-width // i) * -(-height // j) * -(-images // (pixels // (i * j)))
            for i, j in product(powers, powers)
            if i * j <= pixels
        )
        assert wide_ * high * deep == fewest, (images, height, width)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(conv2d, "multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("shape", "width", "shared"),
    [
        ((2, 320, 128, 128, 320), 160, False),
        ((2, 640, 64, 64, 640), 160, False),
        ((2, 320, 64, 64, 320), 160, False),
        ((2, 1280, 32, 32, 1280), 160, False),
        ((2, 1280, 24, 24, 1280), 128, False),
        ((2, 640, 32, 32, 640), 160, True),
        ((2, 1280, 12, 12, 1280), 80, True),
    ],
    ids=str,
)
def test_the_tile_that_takes_least(shape, width, shared, h200):
    tile = conv2d.best(image(shape[:4]), shape[4])
    assert (tile.width, tile.split > 1) == (width, shared)


def test_blocks_that_share_a_sum_all_run_at_once(h200):
    """Else those that wait for others would keep them from beginning."""
    split, sides = 0, (5, 8, 12, 16, 24, 33, 64)
    for images, side, channels, columns in product((1, 2, 3, 8), sides, (64, 1280), (80, 320, 1280)):
        x = image((images, channels, side, side + 1))
        tile = conv2d.best(x, columns)
        if tile.split > 1:
            blocks = math.prod(conv2d._boxes(x)[1]) * -(-columns // tile.width) * tile.split
            assert blocks <= 132, (images, side, channels, columns)
            split += 1
    assert split > 10


def test_pairs_share_a_large_weight_and_compute_no_tile_for_nothing(h200):
    assert conv2d.best(image((2, 1280, 32, 32)), 1280).pair == 2
    assert conv2d.best(image((2, 640, 64, 64)), 640).pair == 1
    assert conv2d.best(image((2, 1280, 33, 57)), 1280).pair == 1  # 33 tiles of pixels


needs_no_interpreter = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs TRITON_INTERPRET unset"
)


def asked_by(shape, dtype, groups):
    """The constants of a launch, with statistics if there are groups; None if the kernel is not launched."""
    x, weight = image(shape[:4], dtype), image((shape[4], shape[1], 3, 3), dtype)
    with triton_runtime.dry_run(torch.device("cuda", 0)) as collected:
        if not groups:
            conv2d.launch(x, weight)
        elif conv2d.accepts_statistics(x, weight, groups) is None:
            conv2d.with_statistics(x, weight, groups, None, None)
    return tuple(collected[0][2].items()) if collected else None


@needs_no_interpreter
@half_dtype
def test_siblings_are_what_further_sizes_ask_for(h200, monkeypatch, dtype):
    """Of all that a UNet asks for: whatever the first is, with the statistics of its groups or without."""
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))
    sides = (8, 16, 24, 32, 33, 40, 48, 64, 96, 128)
    asked = {0: set(), 10: set(), 20: set(), 40: set()}  # by channels of a group
    for columns, groups in product((320, 640, 1280), (0, 32)):
        for images, (height, width) in product((1, 2, 3, 8), product(sides, sides)):
            constants = asked_by((images, columns, height, width, columns), dtype, groups)
            if constants is not None:
                asked[columns // groups if groups else 0].add(constants)
    everything = set().union(*asked.values())
    for own in asked.values():
        assert own
        for first in own:
            siblings = [tuple(given.items()) for given in conv2d.variants(dict(first))]
            assert set(siblings) == everything and len(siblings) == len(everything)
            assert set(siblings[: len(own)]) == own  # the likeliest


@half_dtype
def test_siblings_of_a_group_that_no_unet_has(dtype):
    usual = conv2d.variants(conv2d.constants(conv2d.TILES[0], dtype))
    siblings = conv2d.variants(conv2d.constants(conv2d.TILES[0], dtype, 80))
    own = siblings[: len(siblings) - len(usual)]
    assert own and all(given["GROUP"] == 80 for given in own) and siblings[len(own) :] == usual


@each_tile
def test_slots_fit_a_block(tile):
    given = conv2d.constants(tile, torch.float16)
    assert conv2d.shared_bytes(given) + 256 <= 232448
    assert given["STAGES"] >= 3
    assert given["PAIR"] * given["SPLIT"] in (1, 2, 4) and 1 in (given["PAIR"], given["SPLIT"])
    # copies begin at multiples of eight rows, products are of eight columns
    assert tile.width // given["PAIR"] % 8 == 0 and tile.width <= 256
    # sums that are put together lie where the slots were
    if tile.split > 1:
        assert not tile.pingpong
        assert 4 * 128 * (tile.width + 8) <= conv2d.shared_bytes(given) - 1024


@needs_no_interpreter
@pytest.mark.parametrize("layout", [NHWC, torch.contiguous_format], ids=str)  # the graph tells that of the original
def test_it_is_compiled_ahead_for_what_it_will_launch(h200, monkeypatch, layout):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))
    x, weight = (image(shape).contiguous(memory_format=layout) for shape in ((2, 1280, 32, 32), (1280, 1280, 3, 3)))
    with triton_runtime.dry_run(torch.device("cuda", 0)) as collected:
        out = conv2d.launch(x, weight)
    assert out.shape == x.shape and out.is_contiguous(memory_format=NHWC)
    ((kernel, args, constants, owner),) = collected
    assert kernel is conv2d._SOURCE and args[3:] == (None,) * 3 and owner == "conv2d"
    assert [tuple(a.shape) for a in args[:3]] == [x.shape, x.shape, weight.shape]
    assert constants == conv2d.constants(conv2d.best(x, 1280), torch.float16)
