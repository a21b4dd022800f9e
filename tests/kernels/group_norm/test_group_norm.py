from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, each_dtype, expected, few_parts, half_dtype, paths, randn
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.group_norm import group_norm, two_pass
from sfast_ext.kernels.group_norm import one_pass as tiles
from sfast_ext.kernels.group_norm.two_pass import Parts

SHAPES = [
    ((2, 320, 8, 8), 32),  # groups of 10, in blocks of 120 channels and a rest
    ((1, 640, 5, 7), 32),
    ((3, 960, 3, 5), 32),  # groups of 30
    ((2, 1280, 1, 1), 32),  # a single pixel
    ((1, 1920, 3, 3), 32),
    ((2, 2560, 2, 3), 32),  # one group a block
    ((1, 30, 9, 7), 3),
    ((2, 30, 1, 1), 30),  # a single value a group: the variance is 0
    ((1, 128, 4, 4), 128),  # groups of one channel
    ((1, 300, 3, 5), 1),  # a group wider than a block
    ((1, 4100, 3, 3), 2),  # and wider than a tile has elements
    ((2, 1000, 2, 2), 8),  # groups of 125: no 16 bytes of whole groups
    ((1, 8, 40, 25), 2),  # a thousand pixels, many splits
    ((2, 20, 63), 4),  # (N, C, L)
    ((5, 40), 8),
    ((2, 12, 2, 3, 5), 4),
    ((3, 160, 9, 11), 8),  # from here: sizes of tiles that hold a group, or a part
    ((2, 96, 23, 17), 4),
    ((2, 512, 16, 16), 4),  # nothing is masked
    ((1, 64, 50, 9), 8),
    ((1, 16, 71, 70), 2),
    ((1, 60, 129, 1), 6),  # a last part of one pixel
]

# of which patches are made
IMAGES = [((2, 320, 8, 8), 8), ((1, 640, 5, 7), 8), ((2, 64, 1, 9), 8), ((1, 96, 12, 1), 8), ((2, 40, 16, 16), 8)]


# if an image is of one part, many parts are the same once more
@pytest.fixture(params=["whole", "parts", "loop"])
def path(request, monkeypatch):
    """One path; what it does not take goes to the loop."""
    name = request.param.removeprefix("many ")
    monkeypatch.setattr(group_norm, "_PATHS", () if name == "loop" else (name,))
    if name != request.param:
        few_parts(monkeypatch)
    return name


each_path = pytest.mark.usefixtures("path")
every_path = pytest.mark.parametrize("path", ["whole", "parts", "many parts", "loop"], indirect=True)


def taken(cases):
    """Shapes and groups, each with the paths that do something of their own there."""
    return [
        (path, shape, groups)
        for shape, groups in cases
        for path in paths("loop", math.prod(shape[2:]), groups, shape[1] // groups)
    ]


@pytest.mark.parametrize(("path", "shape", "groups"), taken(SHAPES), indirect=["path"], ids=str)
def test_shapes(device, path, shape, groups):
    x = randn(*shape, dtype=torch.float32, device=device)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = (randn(shape[1], dtype=torch.float32, device=device) for _ in range(2))
    y = group_norm.launch(x, groups, weight, bias, 1e-5)
    close(y, expected(group_norm, x, groups, weight, bias, 1e-5))
    assert y.shape == x.shape
    assert len(shape) != 4 or y.is_contiguous(memory_format=torch.channels_last)


# an odd number of pixels, many tiles of them; groups that begin inside of a tile; a rest of channels
OVER = [((2, 96, 23, 17), 4), ((1, 16, 71, 70), 2), ((2, 320, 9, 8), 32), ((1, 60, 129, 1), 6)]


@pytest.mark.thinned("shape", "dtype", turn=1)
@every_path
@half_dtype
@pytest.mark.parametrize(("shape", "groups"), OVER, ids=str)
def test_over_its_operand(device, path, shape, groups, dtype):
    x = randn(*shape, dtype=dtype, device=device, mean=2.0).to(memory_format=torch.channels_last)
    weight, bias = (randn(shape[1], dtype=dtype, device=device) for _ in range(2))
    args = (groups, weight, bias, 1e-5, randn(*shape[:2], dtype=dtype, device=device), True)
    before, apart = x.clone(memory_format=torch.preserve_format), group_norm.launch(x, *args)
    over = group_norm.launch(x, *args, out=x)
    # the same bits, whose memory ever; one launch has its own
    taken = group_norm.fitting(shape[2] * shape[3], groups, shape[1] // groups)[0] != "whole"
    assert torch.equal(over, apart) and over.is_contiguous(memory_format=torch.channels_last)
    assert (over.data_ptr() == x.data_ptr()) == taken == group_norm.accepts_out(x, groups)
    assert torch.equal(x, over if taken else before)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("shape", [(1, 256, 1024, 1024), (1, 128, 1024, 1024), (2, 512, 256, 192), (1, 128, 333, 127)])
def test_the_sizes_of_a_vae_over_their_operand(shape, triton, dtype):
    device = torch.device("cuda")
    x = torch.randn(shape, device=device).to(dtype).to(memory_format=torch.channels_last)
    weight, bias = (randn(shape[1], dtype=dtype, device=device) for _ in range(2))
    with contextlib.nullcontext() if triton else triton_runtime.without_triton():
        apart = group_norm.launch(x, 32, weight, bias, 1e-6, silu=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        over = group_norm.launch(x, 32, weight, bias, 1e-6, silu=True, out=x)
        # before the comparison, which takes more
        taken = torch.cuda.max_memory_allocated() - before
    assert torch.equal(over, apart) and over.data_ptr() == x.data_ptr()
    assert taken < 4 << 20


@pytest.mark.thinned
@each_path
@pytest.mark.parametrize("path", ["whole", "parts", "loop"], indirect=True)
@each_dtype
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_shift_and_silu(device, dtype, shifted, silu):
    x = randn(2, 48, 7, 9, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    weight, bias = (randn(48, dtype=dtype, device=device) for _ in range(2))
    # rows of a wider tensor at an odd offset, as slices of a packed time projection are
    shift = randn(2, 99, dtype=dtype, device=device)[:, 7:55] if shifted else None
    y = group_norm.launch(x, 4, weight, bias, 1e-5, shift=shift, silu=silu)
    assert y.dtype == dtype
    close(y, expected(group_norm, x, 4, weight, bias, 1e-5, shift=shift, silu=silu))


@each_path
@half_dtype
def test_mixed_dtypes(device, dtype):
    x = randn(1, 64, 5, 5, dtype=dtype, device=device)
    weight = randn(64, dtype=torch.float32, device=device)
    bias = randn(64, dtype=torch.float16, device=device)
    shift = randn(1, 64, dtype=torch.float32, device=device)
    for out_dtype in (torch.float32, dtype):
        y = group_norm.launch(x, 8, weight, bias, 1e-6, shift=shift, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        close(y, expected(group_norm, x, 8, weight, bias, 1e-6, shift=shift))


@each_path
@pytest.mark.parametrize("has_weight", [False, True])
def test_without_weight_or_bias(device, has_weight):
    x = randn(2, 48, 3, 3, dtype=torch.float32, device=device)
    vector = randn(48, dtype=torch.float32, device=device)
    weight, bias = (vector, None) if has_weight else (None, vector)
    close(group_norm.launch(x, 4, weight, bias, 1e-5), expected(group_norm, x, 4, weight, bias, 1e-5))


def _layouts(x):
    last = x.to(memory_format=torch.channels_last)
    yield "contiguous", x.contiguous()
    yield "offset", last[1:]  # dense, but not at the start of its memory
    yield "rows", last[:, :, 1:]
    yield "columns", last[..., ::2]
    yield "channels", last[:, 8:40]
    yield "transposed", last.transpose(2, 3)


@each_path
def test_strided_inputs(device):
    for name, x in _layouts(randn(2, 48, 5, 6, dtype=torch.float16, device=device)):
        y = group_norm.launch(x, 4, None, None, 1e-5)
        assert y.is_contiguous(memory_format=torch.channels_last), name
        close(y, expected(group_norm, x, 4, None, None, 1e-5))


@each_path
def test_large_mean(device):
    """E[x^2] - E[x]^2 would be off by more than the variance here."""
    x = randn(2, 48, 9, 9, dtype=torch.float32, device=device, mean=3000.0, std=0.3)
    # the mean itself is only known to 2**-24 * 3000, which is 6e-4 of a standard deviation
    close(group_norm.launch(x, 4, None, None, 1e-5), expected(group_norm, x, 4, None, None, 1e-5), scale=200)


@each_path
def test_large_mean_only_in_some_channels(device):
    """Means that differ inside a group are variance, not offset."""
    x = randn(1, 48, 8, 8, dtype=torch.float32, device=device)
    x[:, ::3] += 500.0
    close(group_norm.launch(x, 4, None, None, 1e-5), expected(group_norm, x, 4, None, None, 1e-5), scale=10)


@each_path
def test_outlier_at_the_first_pixel(device):
    """The first pixel is what the deviations are taken from."""
    x = randn(1, 48, 8, 8, dtype=torch.float32, device=device)
    x[:, :, 0, 0] = 1e4
    close(group_norm.launch(x, 4, None, None, 1e-5), expected(group_norm, x, 4, None, None, 1e-5), scale=10)


@each_path
def test_silu_far_out(device):
    """Where exp(-y) overflows, and where it is 0."""
    x = randn(1, 32, 5, 5, dtype=torch.float32, device=device)
    weight = torch.logspace(0, 6, 32).to(device)
    close(
        group_norm.launch(x, 4, weight, None, 1e-5, silu=True),
        expected(group_norm, x, 4, weight, None, 1e-5, silu=True),
    )


@each_path
def test_shift_that_cancels_a_mean(device):
    x = randn(2, 48, 9, 9, dtype=torch.float32, device=device, mean=100.0)
    shift = randn(2, 48, dtype=torch.float32, device=device, mean=-100.0)
    y = group_norm.launch(x, 4, None, None, 1e-5, shift=shift)
    close(y, expected(group_norm, x, 4, None, None, 1e-5, shift=shift), scale=10)


@each_path
def test_nan_stays_in_its_group(device):
    x = randn(2, 48, 6, 6, dtype=torch.float16, device=device)
    clean = group_norm.launch(x, 4, None, None, 1e-5)
    x[0, 12, 3, 3] = float("nan")
    x[1, 5, 0, 0] = float("inf")
    y = group_norm.launch(x, 4, None, None, 1e-5)
    bad = torch.zeros(2, 4, dtype=torch.bool, device=device)
    bad[0, 1] = bad[1, 0] = True
    per_group = y.reshape(2, 4, -1)
    assert per_group[bad].isnan().all()
    assert torch.equal(per_group[~bad], clean.reshape(2, 4, -1)[~bad])


@every_path
def test_results_repeat(device, path):
    x = randn(2, 320, 12, 12, dtype=torch.float16, device=device)
    assert torch.equal(*(group_norm.launch(x, 8, None, None, 1e-5, silu=True) for _ in range(2)))


@pytest.mark.parametrize(
    ("path", "shape", "groups", "silu"),
    [(*case, bool(i % 2)) for i, case in enumerate(taken(IMAGES))],
    indirect=["path"],
    ids=str,
)
def test_patches(device, path, shape, groups, silu):
    x = randn(*shape, dtype=torch.float32, device=device).to(memory_format=torch.channels_last)
    weight, bias, shift = (randn(*n, dtype=torch.float32, device=device) for n in (shape[1:2], shape[1:2], shape[:2]))
    args = (x, groups, weight, bias, 1e-5, shift, silu, None)
    close(group_norm.launch(*args, True), expected(group_norm, *args, True))


def test_a_product_with_patches_is_the_convolution():
    x, weight = torch.randn(2, 5, 4, 3, dtype=torch.float64), torch.randn(7, 5, 3, 3, dtype=torch.float64)
    y = F.linear(group_norm.patches_of(x), weight.permute(0, 2, 3, 1).reshape(7, 45)).permute(0, 3, 1, 2)
    torch.testing.assert_close(y, F.conv2d(x, weight, padding=1))


def test_empty_batch_and_float64(device):
    assert group_norm.launch(randn(0, 8, 3, 3, dtype=torch.float16, device=device), 2, None, None, 1e-5).shape[0] == 0
    x = torch.randn(1, 8, 3, 3, dtype=torch.float64, device=device)
    torch.testing.assert_close(group_norm.launch(x, 2, None, None, 1e-5), F.group_norm(x, 2))


def test_channel_blocks_hold_all_groups():
    for groups in (1, 2, 3, 8, 30, 32, 64, 1000):
        for width in (1, 2, 3, 8, 10, 20, 30, 40, 60, 80, 125, 128, 200):
            blocks, each = group_norm._channel_blocks(groups, width)
            assert blocks * each >= groups > (blocks - 1) * each
            assert each * width <= max(128, width)


def test_a_tile_of_channels_has_room_for_all_its_groups():
    for width in range(1, 200):
        firsts = range(0, width * two_pass._BLOCK, two_pass._BLOCK)
        most = max((first + two_pass._BLOCK - 1) // width - first // width + 1 for first in firsts)
        assert two_pass._room_for_groups(width) >= most


def test_more_channels_than_offsets_reach_go_to_torch(device, monkeypatch):
    monkeypatch.setattr(group_norm, "_MAX_CHANNELS", 40)
    monkeypatch.setattr(group_norm, "launch_kernel", None)
    x = randn(1, 48, 5, 6, dtype=torch.float32, device=device)
    torch.testing.assert_close(group_norm.launch(x, 4, None, None, 1e-5), F.group_norm(x, 4))


@pytest.mark.parametrize(
    ("path", "channels", "height", "width"),
    [
        ("whole", 1280, 8, 8),
        ("whole", 2560, 8, 8),
        ("whole", 640, 16, 16),
        ("whole", 1920, 12, 16),
        ("parts", 2560, 16, 16),
        ("parts", 640, 32, 32),
        ("parts", 320, 32, 32),  # groups of 10 begin anywhere in 8 bytes
        ("parts", 1280, 32, 32),
        ("parts", 2560, 32, 32),
        ("parts", 320, 64, 64),
        ("parts", 960, 96, 64),
        ("parts", 320, 128, 128),
        ("parts", 320, 192, 192),
        ("parts", 960, 512, 511),
        ("loop", 32 * 200, 64, 64),
        ("loop", 32 << 16, 4, 4),
    ],
)
def test_which_path(path, channels, height, width):
    assert group_norm.fitting(height * width, 32, channels // 32)[0] == path


def test_paths_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(group_norm, "_PATHS", ("parts",))
    assert group_norm.fitting(64, 32, 40)[0] == "parts"
    monkeypatch.setattr(group_norm, "_PATHS", ())
    assert group_norm.fitting(64, 32, 40)[0] == "loop"


def test_tiles_hold_what_they_should():
    for pixels in (1, 63, 64, 65, 256, 1000, 1024, 1025, 4096, 16384):
        for groups in (1, 3, 8, 30, 32, 100):
            for width in (1, 3, 8, 10, 12, 20, 30, 40, 60, 80, 125, 128, 200):
                held = tiles.whole(pixels, groups, width)
                if held is not None:
                    assert held.constants["PIXELS"] >= pixels and held.constants["BLOCK"] >= width
                    assert held.constants["PIXELS"] * held.constants["BLOCK"] <= tiles._SLAB
                    assert width % held.constants["UNIT"] == 0
                held = tiles.parts(pixels, groups, width)
                if held is not None:
                    assert held.blocks * held.groups >= groups > (held.blocks - 1) * held.groups
                    assert held.constants["BLOCK"] >= held.groups * width
                    assert held.constants["GROUPS"] >= held.groups
                    assert held.parts * held.constants["PIXELS"] >= pixels > (held.parts - 1) * held.constants["PIXELS"]
                    assert held.parts == Parts.of_rows(pixels, held.constants["PIXELS"]).boxes
                    assert held.groups * width % held.constants["UNIT"] == 0


def test_few_compilations_serve_a_unet():
    """SD 1.5 at 512 x 512: they are what its first call waits for."""
    sizes = [(64, 320), (64, 640), (64, 960), (32, 320), (32, 640), (32, 960), (32, 1280), (32, 1920)]
    sizes += [(16, 640), (16, 1280), (16, 1920), (16, 2560), (8, 1280), (8, 2560)]
    kernels = set()
    for side, channels in sizes:
        path, tile = group_norm.fitting(side * side, 32, channels // 32)
        kernels.add((path, *tile.constants.values(), tile.parts > 32))
    assert sum(2 if path == "parts" else 1 for path, *_ in kernels) <= 7


def test_reference_is_torch_group_norm():
    x, weight, bias, shift = torch.randn(2, 24, 5, 5), torch.randn(24), torch.randn(24), torch.randn(2, 24)
    target = F.silu(F.group_norm(x + shift[:, :, None, None], 6, weight, bias, 1e-5))
    torch.testing.assert_close(group_norm.reference(x, 6, weight, bias, 1e-5, shift=shift, silu=True), target)


UNET = [
    (320, 64),
    (960, 64),
    (640, 32),
    (1920, 32),
    (2560, 32),
    (1280, 16),
    (2560, 16),
    (1280, 8),
    (2560, 8),
    (320, 128),
    (320, 192),
    (960, 160),
]


@every_path
@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("channels", "size"), UNET)
def test_unet_shapes(dtype, path, channels, size):
    device = torch.device("cuda")
    x = randn(2, channels, size, size, dtype=dtype, device=device, mean=0.5)
    x = x.to(memory_format=torch.channels_last)
    weight, bias = (randn(channels, dtype=dtype, device=device) for _ in range(2))
    shift = randn(2, 2 * channels, dtype=dtype, device=device)[:, channels:]
    y = group_norm.launch(x, 32, weight, bias, 1e-5, shift=shift, silu=True)
    close(y, expected(group_norm, x, 32, weight, bias, 1e-5, shift=shift, silu=True))


@pytest.mark.gpu(gigabytes=24)
@pytest.mark.parametrize(
    ("path", "batch", "channels", "size"),
    [("whole", 14400, 640, 16), ("parts", 800, 320, 96), ("parts", 72, 320, 320), ("loop", 18, 5120, 160)],
)
def test_beyond_32_bits(path, batch, channels, size):
    assert group_norm.fitting(size * size, 32, channels // 32)[0] == path
    x = torch.randn(batch, channels, size, size, dtype=torch.float16, device="cuda")  # 2.4e9 elements
    x = x.to(memory_format=torch.channels_last)
    y = group_norm.launch(x, 32, None, None, 1e-5)
    for image in (0, batch * 9 // 10, batch - 1):
        close(y[image : image + 1], expected(group_norm, x[image : image + 1], 32, None, None, 1e-5))
