from __future__ import annotations

import pytest
import torch

from kernels.support import close, close_rows, expected, half_dtype, randn
from sfast_ext.kernels.conv import narrow_conv

HALF = torch.float16
# images, channels, columns, height, width
SIZES = [
    (1, 4, 320, 5, 7),
    (2, 9, 72, 16, 9),
    (3, 16, 7, 1, 1),
    (2, 1, 65, 3, 30),
    (1, 320, 4, 9, 5),
    (2, 72, 8, 3, 33),
    (3, 17, 4, 1, 2),
    (1, 640, 4, 20, 13),
]


def operands(sizes, dtype, device, bias=True):
    n, channels, columns, height, width = sizes
    x = randn(n, channels, height, width, dtype=dtype, device=device)
    weight = randn(columns, channels, 3, 3, dtype=dtype, device=device, std=(9 * channels) ** -0.5)
    weight = weight.to(memory_format=torch.channels_last)
    return x, weight, randn(columns, dtype=dtype, device=device) if bias else None


def right(x, weight, bias):
    assert narrow_conv.accepts(x, weight, bias) is None
    y = narrow_conv.launch(x, weight, bias)
    assert y.is_contiguous(memory_format=torch.channels_last)
    close_rows(y.flatten(1), expected(narrow_conv, x, weight, bias).flatten(1))
    return y


@pytest.fixture(params=[HALF, torch.bfloat16], ids=str)
def dtype(request, device):
    if device.type == "cpu" and request.param != HALF:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(device, dtype, sizes, bias):
    x, weight, bias = operands(sizes, dtype, device, bias)
    wanted = right(x, weight, bias)
    for layout in (torch.channels_last, torch.contiguous_format):
        assert torch.equal(right(x.to(memory_format=layout), weight, bias), wanted)


@pytest.mark.parametrize("sizes", [(2, 4, 32, 6, 10), (2, 40, 4, 6, 10)], ids=str)
def test_strided_images(device, sizes):
    x, weight, bias = operands(sizes, HALF, device)
    wide = torch.cat([x, x], 3)
    for image in (wide[..., ::2], wide[..., 3:11], x.transpose(2, 3), x[1:], x.flip(0)[:, :, 1:]):
        right(image, weight, bias)


def test_zeros_around_and_nothing_of_the_next_image(device):
    """What lies beside an image in memory is not beside it."""
    for channels, columns in ((4, 32), (32, 4)):
        x = torch.zeros(3, channels, 5, 4, dtype=HALF, device=device)
        x[1] = torch.inf
        _, weight, bias = operands((1, channels, columns, 5, 4), HALF, device)
        y = narrow_conv.launch(x, weight, bias)
        assert torch.equal(y[0], y[2]) and bool(torch.isfinite(y[0]).all())
        assert torch.equal(y[0, :, 2, 2], bias)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda x, w, b: (x.float(), w.float(), b.float()),
        lambda x, w, b: (x, w.float(), b),
        lambda x, w, b: (x, w.contiguous(), b),
        lambda x, w, b: (x[:0], w, b),
        lambda x, w, b: (x, w[:, :3], b),
        lambda x, w, b: (x, w[..., :1], b),
        lambda x, w, b: (x, w, b[:3]),
        lambda x, w, b: (x.repeat(1, 8, 1, 1), w.repeat(1, 8, 1, 1), b),  # wide at both ends
        lambda x, w, b: (x.repeat(1, 8, 1, 1), w[:3].repeat(1, 8, 1, 1), b[:3]),
    ],
)
def test_what_is_the_librarys(device, spoilt):
    assert narrow_conv.accepts(*spoilt(*operands((1, 4, 32, 5, 4), HALF, device)))


def test_without_the_kernel_it_is_the_librarys():
    for sizes in SIZES:
        x, weight, bias = operands(sizes, torch.float32, torch.device("cpu"))
        assert torch.equal(narrow_conv.launch(x, weight, bias), narrow_conv.fallback(x, weight, bias))
        close(narrow_conv.reference(x, weight, bias), expected(narrow_conv, x, weight, bias))


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("channels", [4, 8, 9])
@pytest.mark.parametrize(
    ("images", "height", "width"), [(2, 64, 64), (2, 113, 65), (16, 64, 64), (2, 128, 128), (2, 192, 192)]
)
def test_unet_shapes(dtype, channels, images, height, width):
    right(*operands((images, channels, 320, height, width), dtype, torch.device("cuda")))
    right(*operands((images, 320, 4, height, width), dtype, torch.device("cuda")))
