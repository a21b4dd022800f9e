from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from kernels.support import DTYPES, close, close_rows, expected, randn
from sfast_ext.kernels.conv import upsample_conv2d
from sfast_ext.tools.lib.exact import tf32

HALF = torch.float16
# images, channels, columns, height, width
SIZES = [(2, 128, 128, 5, 7), (1, 136, 130, 3, 9), (3, 128, 200, 4, 4), (1, 192, 128, 1, 1), (1, 128, 136, 6, 9)]
CUTS = [(0, 0), (1, 0), (0, 1), (1, 1)]
# all cuts of a size whose last tiles are masked and of a single pixel, one of each other size
CASES = [(sizes, HALF, cut) for sizes in (SIZES[1], SIZES[3]) for cut in CUTS] + [(SIZES[1], torch.bfloat16, (0, 0))]
CASES += [(SIZES[0], HALF, (0, 0)), (SIZES[2], HALF, (1, 1)), (SIZES[4], HALF, (0, 1))]
CASES += [(SIZES[1], torch.float32, (0, 0)), (SIZES[4], torch.float32, (1, 0))]


def operands(sizes, dtype, device):
    n, channels, columns, height, width = sizes
    x = randn(n, channels, height, width, dtype=dtype, device=device)
    weight = randn(columns, channels, 3, 3, dtype=dtype, device=device, std=(9 * channels) ** -0.5)
    return x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)


def right(x, weight, cut=(0, 0)):
    assert upsample_conv2d.accepts(x, weight, cut) is None
    y = upsample_conv2d.launch(x, weight, cut)
    assert y.is_contiguous(memory_format=torch.channels_last)
    close_rows(y.flatten(1), expected(upsample_conv2d, x, weight, cut).flatten(1))
    return y


@pytest.mark.parametrize(("sizes", "dtype", "cut"), CASES, ids=str)
def test_sizes(device, sizes, dtype, cut, no_tf32):
    right(*operands(sizes, dtype, device), cut)


def test_what_it_holds_beside_its_result():
    x, weight = operands((5, 128, 136, 3, 4), torch.float32, torch.device("cpu"))
    assert upsample_conv2d.workspace(x, weight, (1, 0)) == upsample_conv2d.tap_gemms(x, weight).nbytes


def test_strided_images(device):
    x, weight = operands((2, 128, 128, 3, 4), HALF, device)
    wide = torch.cat([x, x], 3)
    for image in (x.contiguous(), wide[..., ::2], wide[..., 3:6], x.transpose(2, 3), x[1:], x.flip(0)[:, :, 1:]):
        right(image, weight)


def test_zeros_around_and_nothing_of_the_next_image(device):
    """What lies beside an image in memory is not beside it."""
    _, weight = operands((1, 128, 128, 3, 4), HALF, device)
    for cut in ((0, 0), (1, 1)):
        x = torch.zeros(3, 128, 3, 4, dtype=HALF, device=device).to(memory_format=torch.channels_last)
        x[1] = torch.inf
        y = upsample_conv2d.launch(x, weight, cut)
        assert not y[0].any() and not y[2].any() and bool(torch.isnan(y[1]).any() | torch.isinf(y[1]).any())


def test_products_may_be_larger_than_any_sum(device):
    x = torch.full((1, 128, 4, 3), 25.0, dtype=HALF, device=device).to(memory_format=torch.channels_last)
    weight = torch.zeros(128, 128, 3, 3, dtype=HALF, device=device)
    weight[:, :, 1, 0], weight[:, :, 1, 1], weight[:, :, 1, 2] = 30, 0.25, -30  # 96000, which is infinite in float16
    y = upsample_conv2d.launch(x, weight.to(memory_format=torch.channels_last))
    assert bool((y[..., 1:-1] == 800).all())


def test_a_pixel_reaches_its_neighbours_alone(device):
    """Each of the taps, by itself, as convolving the enlarged image has it."""
    x, _ = operands((1, 128, 128, 3, 4), HALF, device)
    for tap in range(9):
        weight = torch.zeros(128, 128, 9, dtype=HALF, device=device)
        weight[:, :, tap] = torch.eye(128)
        weight = weight.view(128, 128, 3, 3).to(memory_format=torch.channels_last)
        padded = F.pad(F.interpolate(x, scale_factor=2), (1, 1, 1, 1))
        down, across = divmod(tap, 3)
        assert torch.equal(upsample_conv2d.launch(x, weight), padded[:, :, down : down + 6, across : across + 8])


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda x, w: (x, w.float(), (0, 0)),
        lambda x, w: (x[:0], w, (0, 0)),
        lambda x, w: (x, w[:, :3], (0, 0)),
        lambda x, w: (x, w[..., :1], (0, 0)),
        lambda x, w: (x, w, (2, 0)),
        lambda x, w: (x, w.contiguous(), (0, 0)),
        lambda x, w: (x, w[:100], (0, 0)),  # few channels
    ],
)
def test_what_is_done_in_two_operations(device, spoilt):
    assert upsample_conv2d.accepts(*spoilt(*operands((1, 128, 136, 5, 4), HALF, device)))


def test_in_float32_where_products_are_rounded_as_convolutions_are(device):
    given = [x.float() for x in operands((1, 128, 136, 5, 4), HALF, device)]
    for products, convolutions in itertools.product((False, True), repeat=2):
        with tf32(products, convolutions):
            assert (upsample_conv2d.accepts(*given, (0, 0)) is None) == (products == convolutions)


def test_without_the_kernel_it_is_two_operations():
    for sizes in SIZES:
        x, weight = operands(sizes, torch.float32, torch.device("cpu"))
        for cut in CUTS:
            large = F.interpolate(x, scale_factor=2)[:, :, : 2 * x.shape[2] - cut[0], : 2 * x.shape[3] - cut[1]]
            wanted = F.conv2d(large.double(), weight.double(), padding=1)
            close(upsample_conv2d.launch(x, weight, cut), wanted)
            torch.testing.assert_close(expected(upsample_conv2d, x, weight, cut), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 1280, 1280, 8, 8),
        (2, 1280, 1280, 16, 16),
        (2, 640, 640, 32, 32),
        (8, 640, 640, 64, 64),
        (16, 1280, 1280, 32, 32),
        (2, 1280, 1280, 15, 9),
        (2, 640, 640, 96, 96),
    ],
    ids=str,
)
def test_unet_shapes(dtype, sizes, no_tf32):
    x, weight = operands(sizes, dtype, torch.device("cuda"))
    for cut in CUTS[:: 3 if x.shape[0] < 8 else 4]:
        y = upsample_conv2d.launch(x, weight, cut)
        wanted = upsample_conv2d.reference(x.float(), weight.float(), cut)
        close_rows(y.flatten(1), wanted.flatten(1).double().cpu())
