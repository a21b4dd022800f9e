"""The kernels at the shapes of SD 1.5 and SDXL, each with the PyTorch operations that it replaces: `CASES`, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels import compositions, eight_bits, quantisers, transformers
from benchmarks.kernels.case import Case, Operands
from benchmarks.kernels.case import case as _case
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.conv import conv2d, narrow_conv
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.kernels.linear import linear_accumulate, linear_layer_norm

NORM_ROWS = [(8192, 320), (2048, 640), (512, 1280), (2048, 1280), (8192, 640)]
# (channels, height): batch 2; the last three are SDXL's
IMAGES = [
    (320, 64),
    (640, 64),
    (960, 64),
    (640, 32),
    (1920, 32),
    (1280, 16),
    (2560, 16),
    (1280, 8),
    (2560, 8),
]
IMAGES += [(320, 128), (960, 128), (1280, 32)]
GATED = [(8192, 2560), (2048, 5120), (512, 10240), (2048, 10240), (8192, 5120)]
# rows, columns of the result, inner dimension: the last two are SDXL's
GATED_LINEARS = [(8192, 1280, 320), (2048, 2560, 640), (512, 5120, 1280), (2048, 5120, 1280), (8192, 2560, 640)]
# heads, queries, keys, head dimension: batch 2
HEADS = [(8, 4096, 4096, 40), (8, 1024, 1024, 80), (8, 256, 256, 160), (8, 4096, 77, 40), (8, 1024, 77, 80)]
HEADS += [(8, 256, 77, 160), (8, 64, 64, 160), (10, 4096, 4096, 64), (20, 1024, 1024, 64), (20, 988, 988, 64)]
HEADS += [(10, 4096, 77, 64), (20, 1024, 77, 64), (8, 4096, 4096, 80), (5, 9216, 9216, 64), (8, 6144, 6144, 40)]
# images, rows, heads, columns of a head, keys: of SDXL, to the prompt
PROMPTED = [(2, 1024, 20, 64, 77), (2, 4096, 10, 64, 77)]
# rows, columns, inner dimension: the projections out of attention and feed-forward; the last four are SDXL's
LINEARS = [
    (8192, 320, 320),
    (8192, 320, 1280),
    (2048, 640, 640),
    (2048, 640, 2560),
    (512, 1280, 1280),
    (512, 1280, 5120),
]
LINEARS += [(2048, 1280, 1280), (2048, 1280, 5120), (8192, 640, 640), (8192, 640, 2560)]
# as above; the last eight are SDXL's
NORMED_LINEARS = [(8192, 320, 320), (2048, 640, 640), (512, 1280, 1280), (2048, 1280, 1280), (2048, 1280, 5120)]
NORMED_LINEARS += [(8192, 640, 640), (8192, 640, 2560), (1976, 1280, 1280), (18432, 640, 640)]
NORMED_LINEARS += [(4608, 1280, 1280), (4608, 1280, 5120)]
# channels from below, channels of the skip connection, height; the last five are SDXL's
JOINED = [(1280, 1280, 8), (1280, 1280, 16), (1280, 640, 16), (1280, 640, 32), (640, 640, 32), (640, 320, 32)]
JOINED += [(640, 320, 64), (320, 320, 64)]
JOINED += [(1280, 1280, 32), (1280, 640, 64), (640, 640, 64), (640, 320, 128), (320, 320, 128)]
# channels, height before it is twice that; the last two are SDXL's
SMALL = [(1280, 8), (1280, 16), (640, 32), (1280, 32), (640, 64)]
# images, channels, height, width, channels of the result
CONVOLUTIONS = [(2, 320, 128, 128, 320), (2, 640, 64, 64, 640), (2, 1280, 32, 32, 1280), (2, 2560, 32, 32, 1280)]
CONVOLUTIONS += [(2, 640, 128, 128, 320), (2, 320, 64, 64, 320), (2, 640, 32, 32, 640), (2, 320, 96, 96, 320)]
CONVOLUTIONS += [(2, 640, 48, 48, 640), (2, 1280, 24, 24, 1280), (2, 1280, 12, 12, 1280), (2, 320, 65, 113, 320)]
NORMED_CONVOLUTIONS = [(2, 320, 64, 64, 320), (2, 320, 128, 128, 320), (2, 640, 64, 64, 640), (2, 1280, 32, 32, 1280)]
NORMED_CONVOLUTIONS += [(2, 640, 128, 128, 320), (2, 320, 96, 96, 320)]
# channels, height and width, channels of the result, of SDXL's residual blocks
RESIDUAL_CONVOLUTIONS = [(320, 128, 320), (640, 64, 640), (1280, 32, 1280), (2560, 32, 1280)]
NARROW_CONVOLUTIONS = [(2, c, size, size, k) for size in (64, 128) for c, k in ((4, 320), (320, 4))]


def _by_path(case: Case, path: str) -> Case:
    """A group norm by the path of that name alone."""

    def ours() -> Any:
        before = group_norm._PATHS
        try:
            group_norm._PATHS = () if path == "loop" else (path,)
            return case.ours()
        finally:
            group_norm._PATHS = before

    return replace(case, kernel=f"group_norm.{path}", ours=ours, composition=None)


def _accumulate(shape: str, x: Tensor, weight: Tensor, start: Tensor) -> Case:
    """A product onto a sum, which each way is given anew first: ours writes over it."""
    total = start.clone()
    return Case(
        "linear_accumulate",
        shape,
        lambda: linear_accumulate.launch(x, weight, total.copy_(start)),
        lambda: compositions.linear_accumulate(x, weight, total, start),
        lambda: linear_accumulate.reference(x.double(), weight.double(), start.double()),
        sum(t.numel() * t.element_size() for t in (x, weight, start)) + 3 * start.numel() * start.element_size(),
        (compositions.linear_accumulate, [x, weight, total, start], {}),
    )


def _with_records(shape: str, operands: list[Any], depth: int) -> Case:
    """Of a linear layer and the norm after it: where blocks leave something for each other is there, as in a graph."""
    rows, columns = operands[3].shape
    count = linear_layer_norm.record_count(rows, columns, depth, operands[3].device)
    given = [*operands, None, torch.zeros(count, dtype=torch.int64, device=operands[3].device)]
    case = _case("linear_layer_norm", shape, compositions.linear_add_norm, operands, {})
    return replace(case, ours=lambda: linear_layer_norm.launch(*given))


Cases = Callable[[Operands], Iterator[Case]]
CASES: dict[str, Cases] = {}
"""By kernel: a function that yields its cases."""


def _of(kernel: str) -> Callable[[Cases], Cases]:
    def register(function: Cases) -> Cases:
        CASES[kernel] = function
        return function

    return register


def cases(dtype: torch.dtype, only: set[str], device: str = "cuda") -> Iterator[Case]:
    """Each kernel of `only` at each of its shapes, on random operands."""
    operands = Operands(dtype, device)
    for kernel, function in CASES.items():
        if kernel in only:
            yield from function(operands)


for _name, _function in (quantisers.CASES | transformers.CASES).items():
    _of(_name)(functools.partial(_function, case=_case))


@_of("layer_norm")
def _layer_norm(o: Operands) -> Iterator[Case]:
    for rows, columns in NORM_ROWS:
        operands = [o.randn(rows, columns), o.randn(columns), o.randn(columns), 1e-5]
        yield _case("layer_norm", f"{rows}x{columns}", compositions.layer_norm, operands, {})


@_of("add_layer_norm")
def _add_layer_norm(o: Operands) -> Iterator[Case]:
    for rows, columns in NORM_ROWS:
        operands = [o.randn(rows, columns), o.randn(rows, columns), o.randn(columns), o.randn(columns), 1e-5]
        yield _case("add_layer_norm", f"{rows}x{columns}", compositions.add_layer_norm, operands, {})


@_of("group_norm")
def _group_norm(o: Operands) -> Iterator[Case]:
    for channels, size in IMAGES:
        operands = [o.image(channels, size), 32, o.randn(channels), o.randn(channels), 1e-5]
        options = {"shift": o.randn(2, channels), "silu": True}
        case = _case("group_norm", f"2x{channels}x{size}x{size}", compositions.group_norm, operands, options)
        yield case
        fitting = [path for path, fits in group_norm._FITS.items() if fits(size * size, 32, channels // 32)]
        yield from (_by_path(case, path) for path in [*fitting, "loop"])


@_of("bias_add")
def _bias_add(o: Operands) -> Iterator[Case]:
    for channels, size in IMAGES:
        operands = [o.image(channels, size), o.randn(channels), o.image(channels, size)]
        yield _case("bias_add", f"2x{channels}x{size}x{size}", compositions.bias_add, operands, {})


@_of("add_group_norm")
def _add_group_norm(o: Operands) -> Iterator[Case]:
    for channels, size in IMAGES:
        operands = [o.image(channels, size), o.randn(channels), o.image(channels, size), 1.0, 32]
        operands += [o.randn(channels), o.randn(channels), 1e-5]
        shape = f"2x{channels}x{size}x{size}"
        yield _case("add_group_norm", shape, compositions.add_group_norm, operands, {"silu": True})


@_of("cat_group_norm")
def _cat_group_norm(o: Operands) -> Iterator[Case]:
    for below, skip, size in JOINED:
        operands = [o.image(below, size), o.randn(below), o.image(below, size), o.image(skip, size), 32]
        operands += [o.randn(below + skip), o.randn(below + skip), 1e-5]
        shape = f"2x{below}+{skip}x{size}x{size}"
        yield _case("cat_group_norm", shape, compositions.cat_group_norm, operands, {"silu": True})


@_of("upsample")
def _upsample(o: Operands) -> Iterator[Case]:
    for channels, size in SMALL:
        operands = [o.image(channels, size), (2 * size, 2 * size), (0.5, 0.5)]
        yield _case("upsample", f"2x{channels}x{size}x{size}", compositions.upsample, operands, {})


@_of("upsample_conv2d")
def _upsample_conv2d(o: Operands) -> Iterator[Case]:
    for channels, size in SMALL:
        operands = [o.image(channels, size), o.filters(channels, channels)]
        yield _case("upsample_conv2d", f"2x{channels}x{size}x{size}", compositions.upsample_conv2d, operands, {})


@_of("geglu")
def _geglu(o: Operands) -> Iterator[Case]:
    for rows, columns in GATED:
        yield _case("geglu", f"{rows}x{columns}", compositions.geglu, [o.randn(rows, columns)], {})


@_of("linear_geglu")
def _linear_geglu(o: Operands) -> Iterator[Case]:
    for rows, columns, inner in GATED_LINEARS:
        tensors = [o.randn(rows, inner), o.randn(2 * columns, inner) * inner**-0.5, o.randn(2 * columns)]
        yield _case("linear_geglu", f"{rows}x{columns}x{inner}", compositions.linear_geglu, tensors, {})


@_of("mma_linear")
def _mma_linear(o: Operands) -> Iterator[Case]:
    for rows, columns, inner in LINEARS:
        tensors = [o.randn(rows, inner), o.randn(columns, inner) * inner**-0.5, o.randn(columns)]
        yield _case("mma_linear", f"{rows}x{columns}x{inner}", F.linear, tensors, {})


@_of("linear_layer_norm")
def _linear_layer_norm(o: Operands) -> Iterator[Case]:
    for rows, columns, inner in NORMED_LINEARS:
        tensors = [
            o.randn(rows, inner),
            o.randn(columns, inner) * inner**-0.5,
            o.randn(columns),
            o.randn(rows, columns),
        ]
        operands = [*tensors, o.randn(columns), o.randn(columns), 1e-5]
        yield _with_records(f"{rows}x{columns}x{inner}", operands, inner)


@_of("linear_accumulate")
def _linear_accumulate(o: Operands) -> Iterator[Case]:
    for rows, columns, inner in LINEARS:
        tensors = [o.randn(rows, inner), o.randn(columns, inner) * inner**-0.5, o.randn(rows, columns)]
        yield _accumulate(f"{rows}x{columns}x{inner}", *tensors)


@_of("timestep_embedding")
def _timestep_embedding(o: Operands) -> Iterator[Case]:
    for rows, columns in ((2, 320), (12, 256)):
        t = torch.linspace(1, 999, rows, device=o.device).long()[:, None]
        frequency = torch.exp(-9.21 * torch.arange(columns // 2, device=o.device) / (columns // 2))[None]
        options = {"sine_first": False, "out_dtype": o.dtype}
        yield _case("timestep_embedding", f"{rows}x{columns}", compositions.timestep_embedding, [t, frequency], options)


def _convolutions(o: Operands, kernel: str) -> Iterator[Case]:
    for images, channels, height, width, columns in CONVOLUTIONS:
        x = o.randn(images, channels, height, width).to(memory_format=torch.channels_last)
        operands = [x, o.filters(columns, channels)]
        yield _case(kernel, f"{images}x{channels}x{height}x{width}x{columns}", conv2d.fallback, operands, {})


@_of("conv2d")
def _conv2d(o: Operands) -> Iterator[Case]:
    return _convolutions(o, "conv2d")


@_of("mma_conv2d")
def _mma_conv2d(o: Operands) -> Iterator[Case]:
    return _convolutions(o, "mma_conv2d")


@_of("narrow_conv")
def _narrow_conv(o: Operands) -> Iterator[Case]:
    for images, channels, height, width, columns in NARROW_CONVOLUTIONS:
        x = o.randn(images, channels, height, width).to(memory_format=torch.channels_last)
        operands = [x, o.filters(columns, channels), o.randn(columns)]
        yield _case(
            "narrow_conv", f"{images}x{channels}x{height}x{width}x{columns}", narrow_conv.fallback, operands, {}
        )


@_of("conv_group_norm")
def _conv_group_norm(o: Operands) -> Iterator[Case]:
    for images, channels, height, width, columns in NORMED_CONVOLUTIONS:
        x, residual = (
            o.randn(images, depth, height, width).to(memory_format=torch.channels_last) for depth in (channels, columns)
        )
        operands = [x, o.filters(columns, channels), o.randn(columns), residual]
        operands += [32, o.randn(columns), o.randn(columns), 1e-5]
        shape = f"{images}x{channels}x{height}x{width}x{columns}"
        yield _case("conv_group_norm", shape, compositions.conv_group_norm, operands, {"silu": True})


@_of("attention")
def _attention(o: Operands) -> Iterator[Case]:
    for heads, queries, keys, size in HEADS:
        q, k, v = (
            o.randn(2, length, heads * size).unflatten(-1, (heads, size)).transpose(1, 2)
            for length in (queries, keys, keys)
        )
        yield _case("attention", f"2x{heads}x{queries}x{keys}x{size}", attention.reference, [q, k, v], {})


@_of("query_attention")
def _query_attention(o: Operands) -> Iterator[Case]:
    for images, rows, heads, size, keys in PROMPTED:
        columns = heads * size
        x, weight = o.randn(images, rows, columns), o.randn(columns, columns) * columns**-0.5
        k, v = o.randn(images, keys, 2 * columns).unflatten(-1, (2, heads, size)).transpose(1, 3).unbind(2)
        shape = f"{images}x{rows}x{columns}x{keys}"
        yield _case("query_attention", shape, compositions.query_attention, [x, weight, k, v], {})


@_of("linear8")
def _linear8(o: Operands) -> Iterator[Case]:
    return eight_bits.linears(LINEARS, o)


@_of("conv2d8")
def _conv2d8(o: Operands) -> Iterator[Case]:
    return eight_bits.convolutions(RESIDUAL_CONVOLUTIONS, o)


@_of("geglu8")
def _geglu8(o: Operands) -> Iterator[Case]:
    return eight_bits.gated_linears(GATED_LINEARS, o)
