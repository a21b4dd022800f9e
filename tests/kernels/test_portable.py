"""Kernels in CUDA C++ for any card, on the CPU: against their references in float64, at odd sizes, in memory that is
poisoned."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sfast_ext import kernels
from sfast_ext.kernels.backend import cuda_tier, health, nvrtc, triton_runtime
from sfast_ext.kernels.conv import narrow_conv, upsample, upsample_conv2d
from sfast_ext.kernels.eight_bits import (
    add_group_norm8,
    cat_group_norm8,
    conv2d8,
    group_norm8,
    quantise_rows,
    quantise_weights,
)
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, group_norm, portable
from sfast_ext.kernels.pointwise import add_layer_norm, bias_add, geglu, layer_norm, timestep_embedding

from . import cuda_on_cpu, reference_cases
from .cuda_on_cpu import ONE
from .support import DTYPES, TOLERANCE, close, close_rows, expected, needs_products, randn

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that were launched, on the CPU."""
    found: list[str] = []

    def launch(source, grid, *args, **constants):
        found.append(source.name)
        cuda_on_cpu.launch(source, grid, *args, **constants)

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: source.name in PORTABLE)
    yield found


RECORDS = [kernel for kernel in kernels.registered().values() if kernel.portable]
PORTABLE = {source.name for kernel in RECORDS for source in kernel.cuda_sources if not source.hopper}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = [(63, 30), (3, 7, 320), (5, 1000), (2, 3, 1280), (77,)]


@pytest.mark.thinned("shape", "dtype")
@each_dtype
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_layer_norm(launched, dtype, shape):
    x = randn(*shape, dtype=dtype, device=CPU, mean=2.0)
    weight, bias = (randn(shape[-1], dtype=dtype, device=CPU) for _ in range(2))
    for vectors in ((weight, bias), (weight, None), (None, None)):
        y = layer_norm.launch(x, *vectors, 1e-5)
        assert y.dtype == dtype
        close(y, expected(layer_norm, x, *vectors, 1e-5))
    assert launched == ["layer_norm"] * 3


@pytest.mark.thinned("shape", "vectors", "dtype", turn=1, rounds=2)
@each_dtype
@pytest.mark.parametrize("shape", [(63, 30), (3, 7, 320), (2, 1280)], ids=str)
@pytest.mark.parametrize("vectors", [(), ("shift",), ("shift", "post_bias")], ids=str)
def test_add_layer_norm(launched, dtype, shape, vectors):
    x, residual = (randn(*shape, dtype=dtype, device=CPU) for _ in range(2))
    weight, bias = (randn(shape[-1], dtype=dtype, device=CPU) for _ in range(2))
    options = {name: randn(shape[-1], dtype=dtype, device=CPU) for name in vectors}
    total, y = add_layer_norm.launch(x, residual, weight, bias, 1e-5, **options)
    # of the sum as it is rounded: rounding it another way moves the norm
    reference = add_layer_norm.reference(x, residual, weight, bias, 1e-5, **options)
    close(total, reference[0].double())
    close(y, reference[1].double(), scale=2)
    assert launched == ["layer_norm"]


@pytest.mark.thinned
@each_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(63, 30), (3, 7, 640)], ids=str)
def test_geglu(launched, dtype, approximate, shape):
    x = randn(*shape, dtype=dtype, device=CPU, std=2.0)
    for gate_first in (False, True):
        y = geglu.launch(x, gate_first, approximate)
        close(y, expected(geglu, x, gate_first, approximate))
    assert launched == ["geglu"] * 2


@pytest.mark.thinned("shape", "dtype")
@each_dtype
@pytest.mark.parametrize("shape", [(2, 30, 5, 7), (1, 1, 1, 1), (2, 320, 3, 5), (3, 64, 9, 4)], ids=str)
def test_bias_add(launched, dtype, shape):
    x, residual = (image(shape, dtype) for _ in range(2))
    bias = randn(shape[1], dtype=dtype, device=CPU)
    for operands in ((bias, residual), (None, residual), (bias, None)):
        y = bias_add.launch(x, *operands, 0.7)
        close(y, expected(bias_add, x, *operands, 0.7))
        assert y.is_contiguous(memory_format=torch.channels_last)
    assert launched == ["bias_add"] * 3


@pytest.mark.thinned("shape", "dtype", turn=1)
@each_dtype
@pytest.mark.parametrize(
    ("shape", "size"), [((2, 30, 5, 7), (10, 14)), ((1, 8, 7, 4), (3, 9)), ((3, 320, 3, 2), (5, 3))], ids=str
)
def test_upsample(launched, dtype, shape, size):
    x, residual = (image(shape, dtype) for _ in range(2))
    steps = tuple(float(torch.tensor(a / b, dtype=torch.float32)) for a, b in zip(shape[2:], size))
    y = upsample.launch(x, size, steps)
    assert torch.equal(y, upsample.reference(x, size, steps)) and y.is_contiguous(memory_format=torch.channels_last)
    y = upsample.launch(x, size, steps, residual.contiguous())
    assert torch.equal(y, upsample.reference(x, size, steps, residual))
    assert launched == ["upsample"] * 2


def test_pixels_that_are_equally_near_are_chosen_as_torch_does(launched):
    for before, after in ((21, 41), (15, 29), (9, 100), (100, 9), (3, 3), (1, 600)):
        x = image((1, 4, before, 3), torch.float32)
        step = float(torch.tensor(before / after, dtype=torch.float32))
        wanted = torch.nn.functional.interpolate(x, size=(after, 3), mode="nearest")
        assert torch.equal(upsample.launch(x, (after, 3), (step, 1.0)), wanted)


CUTS = [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.thinned("sizes", "dtype")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(2, 128, 128, 5, 7), (1, 136, 130, 3, 9), (3, 128, 131, 1, 1)], ids=str)
def test_upsample_conv2d(launched, dtype, sizes, no_tf32):
    needs_products(dtype)
    images, channels, columns, height, width = sizes
    x, weight = image((images, channels, height, width), dtype), image((columns, channels, 3, 3), dtype)
    weight = weight * (9 * channels) ** -0.5
    for cut in CUTS:
        y = upsample_conv2d.launch(x, weight, cut)
        assert y.is_contiguous(memory_format=torch.channels_last)
        close_rows(y.flatten(1), expected(upsample_conv2d, x, weight, cut).flatten(1))
    assert launched == ["upsample_conv2d"] * 4


def test_each_tap_of_an_upsampled_image(launched):
    """What lies beside an image in memory is not beside it, and no tap is another's."""
    needs_products(torch.float16)
    x = image((3, 128, 3, 10), torch.float16)
    x[1] = torch.inf
    for tap in range(9):
        weight = torch.zeros(128, 128, 9, dtype=torch.float16)
        weight[:, :, tap] = torch.eye(128)
        weight = weight.view(128, 128, 3, 3).to(memory_format=torch.channels_last)
        padded = torch.nn.functional.pad(torch.nn.functional.interpolate(x, scale_factor=2), (1, 1, 1, 1))
        down, across = divmod(tap, 3)
        y = upsample_conv2d.launch(x, weight)
        for one in (0, 2):
            assert torch.equal(y[one], padded[one, :, down : down + 6, across : across + 20])
    assert launched == ["upsample_conv2d"] * 9


def test_an_upsampled_image_that_is_not_the_kernels_takes_two_operations(launched):
    x, weight = image((1, 128, 3, 4), torch.float32), image((128, 128, 3, 3), torch.float32)
    close(upsample_conv2d.launch(x, weight), expected(upsample_conv2d, x, weight), scale=100)
    assert launched == ["upsample"]


@pytest.mark.thinned("sizes", "dtype")
@each_dtype
@pytest.mark.parametrize(
    "sizes",
    [(1, 4, 72, 5, 7), (2, 9, 130, 9, 4), (3, 16, 7, 1, 1), (2, 320, 4, 5, 3), (1, 37, 8, 9, 8), (3, 17, 4, 1, 2)],
    ids=str,
)
def test_narrow_conv(launched, dtype, sizes):
    images, channels, columns, height, width = sizes
    if channels > narrow_conv.MAX_IN:
        needs_products(dtype)
    x, weight = image((images, channels, height, width), dtype), image((columns, channels, 3, 3), dtype)
    weight, bias = weight * (9 * channels) ** -0.5, randn(columns, dtype=dtype, device=CPU)
    wide = torch.cat([x, x], 3)
    for some, add in ((x, bias), (x.contiguous(), None), (wide[..., ::2], bias), (x.transpose(2, 3), bias)):
        y = narrow_conv.launch(some, weight, add)
        assert y.is_contiguous(memory_format=torch.channels_last)
        close_rows(y.flatten(1), expected(narrow_conv, some, weight, add).flatten(1), scale=2)
    assert launched == ["narrow_conv_in" if channels <= narrow_conv.MAX_IN else "narrow_conv_out"] * 4


@pytest.mark.parametrize(("channels", "columns"), [(4, 72), (37, 8)])
def test_zeros_are_around_an_image_and_nothing_of_the_next(launched, channels, columns):
    if channels > narrow_conv.MAX_IN:
        needs_products(torch.float16)
    x = torch.zeros(3, channels, 5, 7, dtype=torch.float16).to(memory_format=torch.channels_last)
    x[1] = torch.inf
    weight, bias = image((columns, channels, 3, 3), torch.float16), randn(columns, dtype=torch.float16, device=CPU)
    y = narrow_conv.launch(x, weight, bias)
    for one in (0, 2):
        assert torch.equal(y[one], bias[:, None, None].expand(columns, 5, 7))
    assert not torch.isfinite(y[1]).any() and len(launched) == 1


def test_products_of_a_narrow_convolution_may_be_larger_than_any_sum(launched):
    needs_products(torch.float16)
    x = torch.full((1, 37, 4, 5), 25.0, dtype=torch.float16).to(memory_format=torch.channels_last)
    weight = torch.zeros(4, 37, 3, 3, dtype=torch.float16)
    weight[:, :, 1, 0], weight[:, :, 1, 1], weight[:, :, 1, 2] = 90, 1, -90  # 83250, which is infinite in float16
    y = narrow_conv.launch(x, weight.to(memory_format=torch.channels_last))
    assert bool((y[..., 1:-1] == 925).all()) and launched == ["narrow_conv_out"]


@each_dtype
@pytest.mark.parametrize("half", [160, 3])
def test_timestep_embedding(launched, dtype, half):
    frequency = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    times = torch.tensor([0, 999, 500, 1, 1024, 981])
    for kind in timestep_embedding.TIMES if dtype == torch.float32 else (torch.int64,):
        t = times.to(kind)[:, None]
        for given, some in ((t, frequency), (t[1:2].expand(4, 1), frequency[None]), (t[::2], frequency)):
            # the angle is rounded to float32 by everybody; from there on in float64
            angle = (given.float() * some.reshape(1, -1)).double()
            for first in (True, False):
                y = timestep_embedding.launch(given, some, first, dtype)
                wanted = torch.cat([angle.sin(), angle.cos()] if first else [angle.cos(), angle.sin()], -1)
                assert y.dtype == dtype
                # of angles that are nearly a multiple of pi/2 as well
                torch.testing.assert_close(y, wanted.to(dtype), rtol=TOLERANCE[dtype][0], atol=2e-7)
    assert set(launched) == {"timestep_embedding"}


def image(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return randn(*shape, dtype=dtype, device=CPU, mean=mean).to(memory_format=torch.channels_last)


IMAGES = [((2, 320, 8, 8), 32), ((1, 640, 5, 7), 32), ((2, 1280, 1, 1), 32), ((1, 30, 9, 7), 3), ((2, 30, 1, 1), 30)]
IMAGES += [((1, 300, 3, 5), 1), ((1, 8, 40, 25), 2), ((1, 2560, 2, 3), 32)]


WAYS = [1, 2]
each_way = pytest.mark.parametrize("launches", WAYS, ids=["one launch", "two launches"], indirect=True)


@pytest.fixture(params=WAYS, ids=["one launch", "two launches"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """See `cuda_on_cpu.group_norms_in`."""
    return cuda_on_cpu.group_norms_in(request.param, monkeypatch)


@pytest.mark.thinned("shape", "dtype")
@each_way
@pytest.mark.parametrize(("dtype", "silu"), [(torch.float32, False), *((each, True) for each in DTYPES)], ids=str)
@pytest.mark.parametrize(("shape", "groups"), IMAGES, ids=str)
def test_group_norm(launched, launches, dtype, silu, shape, groups):
    x, shift = image(shape, dtype, mean=3.0), randn(*shape[:2], dtype=dtype, device=CPU)
    weight, bias = (randn(shape[1], dtype=dtype, device=CPU) for _ in range(2))
    with triton_runtime.without_triton():
        y = group_norm.launch(x, groups, weight, bias, 1e-5, shift, silu)
    assert y.is_contiguous(memory_format=torch.channels_last)
    # a group of one value is 0 times 316, by which what float32 leaves of the sum with the shift is multiplied
    single = groups == shape[1] and shape[2:] == (1, 1)
    close(y, expected(group_norm, x, groups, weight, bias, 1e-5, shift, silu), scale=300 if single else 2)
    assert launched == launches


def test_group_norm_of_a_large_mean(launched, launches):
    x = image((1, 64, 20, 20), torch.float32, mean=1e4)
    with triton_runtime.without_triton():
        y = group_norm.launch(x, 4, None, None, 1e-5)
    close(y, expected(group_norm, x, 4, None, None, 1e-5), scale=200)
    assert launched == launches


@each_dtype
def test_group_norm_writes_patches_as_well(launched, launches, dtype):
    for shape in ((2, 64, 4, 5), (1, 40, 1, 3), (1, 40, 3, 1)):
        x = image(shape, dtype)
        with triton_runtime.without_triton():
            y = group_norm.launch(x, 4, None, None, 1e-5, silu=True, patches=True)
        close(y, expected(group_norm, x, 4, None, None, 1e-5, silu=True, patches=True))
    assert launched == 3 * launches


def test_more_parts_than_a_normalising_block_reads(launched, launches, monkeypatch):
    """Parts of several tiles, the last of them with a rest, and blocks that loop."""
    monkeypatch.setattr(portable, "MAX_PARTS", 3)
    monkeypatch.setattr(portable, "_RESIDENT", 1)
    for shape, groups in (((1, 30, 37, 31), 3), ((2, 24, 50, 13), 6)):
        x = image(shape, torch.float16, mean=3.0)
        with triton_runtime.without_triton():
            y = group_norm.launch(x, groups, None, None, 1e-5)
        close(y, expected(group_norm, x, groups, None, None, 1e-5), scale=2)
    assert launched == 2 * launches


@pytest.mark.thinned("operands", "dtype")
@each_way
@each_dtype
@pytest.mark.parametrize("operands", ["", "bias", "residual", "bias residual"])
@pytest.mark.parametrize("shape", [(2, 320, 4, 6), (1, 30, 9, 7)], ids=str)
def test_add_group_norm(launched, launches, dtype, operands, shape):
    x, residual = image(shape, dtype, mean=3.0), image(shape, dtype) if "residual" in operands else None
    conv_bias, weight, bias = (randn(shape[1], dtype=dtype, device=CPU) for _ in range(3))
    args = (x, conv_bias if "bias" in operands else None, residual, 0.7, 10, weight, bias, 1e-5, True)
    with triton_runtime.without_triton():
        total, y = add_group_norm.launch(*args)
    # of the sum as it is rounded: rounding it another way moves the norm
    reference = add_group_norm.reference(*args)
    close(total, reference[0].double())
    close(y, reference[1].double(), scale=2)
    assert launched == launches


@pytest.mark.thinned("first", "dtype")
@each_way
@each_dtype
@pytest.mark.parametrize("operands", ["", "bias residual"])
@pytest.mark.parametrize(("first", "second", "groups"), [(320, 640, 32), (40, 24, 8), (21, 9, 3)])
def test_cat_group_norm(launched, launches, dtype, operands, first, second, groups):
    a, b = image((2, first, 4, 6), dtype, mean=3.0), image((2, second, 4, 6), dtype)
    conv_bias, residual = randn(first, dtype=dtype, device=CPU), image(a.shape, dtype)
    weight, bias = (randn(first + second, dtype=dtype, device=CPU) for _ in range(2))
    args = (*((conv_bias, residual) if operands else (None, None)), b, groups, weight, bias, 1e-5, True)
    with triton_runtime.without_triton():
        joined, y = cat_group_norm.launch(a, *args)
    reference = cat_group_norm.reference(a, *args)
    close(joined, reference[0].double())
    close(y, reference[1].double(), scale=2)
    assert launched == launches


def test_fused_inputs_with_patches(launched, launches):
    x, b = image((2, 64, 4, 5), torch.float16), image((2, 32, 4, 5), torch.float16)
    with triton_runtime.without_triton():
        _, added = add_group_norm.launch(x, None, x, 1.0, 4, None, None, 1e-5, patches=True)
        _, joined = cat_group_norm.launch(x, None, None, b, 4, None, None, 1e-5, patches=True)
    close(added, add_group_norm.reference(x, None, x, 1.0, 4, None, None, 1e-5, patches=True)[1].double(), scale=2)
    close(joined, cat_group_norm.reference(x, None, None, b, 4, None, None, 1e-5, patches=True)[1].double(), scale=2)
    if launches == ONE:
        assert launched == 2 * ONE


def test_results_repeat(launched, launches):
    x = image((2, 64, 30, 30), torch.float16)
    with triton_runtime.without_triton():
        first, again = (group_norm.launch(x, 4, None, None, 1e-5) for _ in range(2))
    assert torch.equal(first, again)


def test_other_strides_and_places(launched, launches):
    whole = randn(3, 7, 83, dtype=torch.float16, device=CPU)
    for x in (whole[..., 3:], whole.transpose(0, 1), whole[:, ::2], whole[1:, :, 1:81]):
        close(layer_norm.launch(x, None, None, 1e-5), expected(layer_norm, x, None, None, 1e-5))
        if x.shape[-1] % 2 == 0:
            close(geglu.launch(x), expected(geglu, x))
    dense = randn(2, 40, 5, 6, dtype=torch.float16, device=CPU)
    for x in (dense, dense[:, 3:35], dense.to(memory_format=torch.channels_last)[:, 1:33]):
        close(bias_add.launch(x, None, x), expected(bias_add, x, None, x))
        assert torch.equal(upsample.launch(x, (9, 7), (0.5, 0.9)), upsample.reference(x, (9, 7), (0.5, 0.9)))
        with triton_runtime.without_triton():
            close(group_norm.launch(x, 2, None, None, 1e-5), expected(group_norm, x, 2, None, None, 1e-5), scale=2)


AT_ONE_SIZE = {"layer_norm8", "add_layer_norm8", "modulated_norm", "gated_residual", "gated_norm", "norm_rotary"}
# compared in tests/kernels/eight_bits and tests/kernels/pointwise, on a CPU as well
AT_ONE_SIZE |= {"swiglu", "swiglu8", "gelu8", "modulated_norm8", "gated_norm8"}


def at_one_size(kernel):
    return kernel(*reference_cases.CASES[kernel.name](CPU))


def test_one_that_does_not_compile_is_named(launched, launches, monkeypatch):
    def launch(source, grid, *args, **constants):
        raise nvrtc.Unavailable("no such instruction")

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    x = torch.ones(2, 8, 2, 2)
    calls = {
        "layer_norm": lambda: layer_norm.launch(x, None, None, 1e-5),
        "add_layer_norm": lambda: add_layer_norm.launch(x, x, None, None, 1e-5),
        "geglu": lambda: geglu.launch(x),
        "quantise_rows": lambda: quantise_rows.launch(x.half()),
        "quantise_weights": lambda: quantise_weights.launch(
            [torch.ones(2, 8).half()], [torch.ones(2, 8).to(torch.int8)], [torch.ones(2)], [torch.ones(2).long()], [0]
        ),
        **{kernel.name: functools.partial(at_one_size, kernel) for kernel in RECORDS if kernel.name in AT_ONE_SIZE},
        "group_norm8": lambda: group_norm8.launch(x.half(), 2, None, None, 1e-5),
        "add_group_norm8": lambda: add_group_norm8.launch(x.half(), None, None, 1.0, 2, None, None, 1e-5),
        "cat_group_norm8": lambda: cat_group_norm8.launch(x.half(), None, None, x.half(), 2, None, None, 1e-5),
        "conv2d8": lambda: conv2d8.launch(
            image((1, 64, 2, 2), torch.float16).to(torch.int8), torch.ones(2, 1), torch.ones(8, 576).to(torch.int8),
            torch.ones(10, 8),
        ),
        "bias_add": lambda: bias_add.launch(x, None, x),
        "upsample": lambda: upsample.launch(x, (4, 4), (0.5, 0.5)),
        "upsample_conv2d": lambda: upsample_conv2d.launch(
            image((1, 128, 2, 2), torch.bfloat16), image((128, 128, 3, 3), torch.bfloat16)
        ),
        "narrow_conv": lambda: narrow_conv.launch(torch.ones(2, 4, 2, 2), image((8, 4, 3, 3), torch.float32)),
        "timestep_embedding": lambda: timestep_embedding.launch(torch.ones(2, 1), torch.ones(4), True),
        "group_norm": lambda: group_norm.launch(x, 2, None, None, 1e-5),
        "add_group_norm": lambda: add_group_norm.launch(x, None, x, 1.0, 2, None, None, 1e-5),
        "cat_group_norm": lambda: cat_group_norm.launch(x, None, None, x, 2, None, None, 1e-5),
    }
    assert set(calls) == {kernel.name for kernel in RECORDS}, "compare each portable kernel here, and add it to calls"
    for name, call in calls.items():
        with triton_runtime.without_triton(), pytest.raises(nvrtc.Unavailable) as raised:
            call()
        assert set(health.culprits(raised.value)) == {name}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_what_they_do_not_take(launched, dtype):
    x = torch.ones(2, 8, dtype=dtype)
    assert cuda_tier.accepts(layer_norm.SOURCE, x)
    assert cuda_tier.accepts(layer_norm.SOURCE, torch.ones(2), x)
    assert cuda_tier.accepts(layer_norm.SOURCE, torch.ones(2), torch.ones(2, dtype=torch.float16))
    assert launched == []


def test_an_empty_tensor(launched):
    x = torch.ones(0, 64)
    assert layer_norm.launch(x, None, None, 1e-5).shape == (0, 64) and geglu.launch(x).shape == (0, 32)
    assert bias_add.launch(torch.ones(0, 8, 2, 2), None, None).shape == (0, 8, 2, 2) and launched == []
    assert upsample.launch(torch.ones(0, 8, 2, 2), (4, 4), (0.5, 0.5)).shape == (0, 8, 4, 4) and launched == []
    assert timestep_embedding.launch(torch.ones(0, 1), torch.ones(4), True).shape == (0, 8) and launched == []


def test_conversions_of_bfloat16_and_float16():
    """Ties to even, infinities, NaN, subnormal numbers and what overflows: as torch rounds. A product of two numbers of
    at most 12 bits is exact in float32, so there is one right result."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256, 1, 1)
        for scale in (1.0, 1.00390625, 1.5, 3.0, 0.5**9, 2.0**12):
            y, wanted = bias_add.launch(values, None, None, scale), (values.float() * scale).to(dtype)
            assert torch.equal(torch.isnan(y), torch.isnan(wanted))
            assert torch.equal(y.nan_to_num(7.0), wanted.nan_to_num(7.0)), (dtype, scale)
