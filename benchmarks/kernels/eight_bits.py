"""The kernels for 8-bit integers, with the PyTorch operations of the same result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import Case, Operands, case
from sfast_ext.kernels.eight_bits import quantise_weights

Shape = tuple[int, int, int]


def linears(shapes: Iterable[Shape], o: Operands) -> Iterator[Case]:
    """Linear layers onto a residual, of rows, columns and inner dimension."""
    for rows, columns, inner in shapes:
        tensors = [*quantised(rows, columns, inner, o.device), o.randn(columns), o.randn(rows, columns)]
        yield case("linear8", f"{rows}x{columns}x{inner}", _torch_linear8, tensors, {"dtype": o.dtype})


def gated_linears(shapes: Iterable[Shape], o: Operands) -> Iterator[Case]:
    """Linear layers with GEGLU, of rows, columns of the result and inner dimension."""
    for rows, columns, inner in shapes:
        tensors = [*quantised(rows, 2 * columns, inner, o.device), o.randn(2 * columns)]
        yield case("geglu8", f"{rows}x{columns}x{inner}", _torch_geglu8, tensors, {"dtype": o.dtype})


def convolutions(shapes: Iterable[tuple[int, int, int]], o: Operands) -> Iterator[Case]:
    """3x3 convolutions onto a residual, of channels, height and width, and channels of the result."""
    for channels, size, columns in shapes:
        _, x_scale, weight, weight_scale = quantised(2, columns, 9 * channels, o.device)
        x = torch.randint(-127, 128, (2, channels, size, size), dtype=torch.int8, device=o.device)
        x = x.contiguous(memory_format=torch.channels_last)
        x_scale = torch.stack([x_scale, torch.tensor([-127.0, 3.0], device=o.device)])
        weight_scale = torch.stack([weight_scale, *quantise_weights.sums_of_codes(weight)])
        tensors = [x, x_scale, weight, weight_scale, o.randn(columns), o.image(columns, size)]
        options = {"dtype": o.dtype}
        yield case("conv2d8", f"2x{channels}x{size}x{size}x{columns}", _torch_conv2d8, tensors, options)


def quantised(rows: int, columns: int, inner: int, device: str) -> list[Tensor]:
    """Activations and a weight, each followed by its scales; the product is about as large as a normal distribution."""
    sizes = (rows, inner), (columns, inner)
    x, weight = (torch.randint(-127, 128, size, dtype=torch.int8, device=device) for size in sizes)
    x_scale, weight_scale = (torch.rand(size, device=device) + 0.5 for size in (rows, columns))
    # 5400: the mean square of such integers
    return [x, x_scale, weight, weight_scale / (5400 * inner**0.5)]


def _torch_linear8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor, dtype: torch.dtype
) -> Tensor:
    return (_scaled(x, x_scale, weight, weight_scale) + bias + residual).to(dtype)


def _torch_geglu8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, dtype: torch.dtype
) -> Tensor:
    value, gate = (_scaled(x, x_scale, weight, weight_scale) + bias).chunk(2, -1)
    return (value * F.gelu(gate)).to(dtype)


def _torch_conv2d8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor, dtype: torch.dtype
) -> Tensor:
    """PyTorch convolves no integers on a GPU: by the values that they stand for."""
    scale, zero = x_scale[:, :, None, None, None]
    image = ((x - zero) * scale).to(dtype)
    taps = (weight * weight_scale[0, :, None]).to(dtype).view(len(weight), 3, 3, -1).permute(0, 3, 1, 2)
    return F.conv2d(image, taps, bias, padding=1) + residual


def _scaled(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return torch._int_mm(x, weight.t()) * x_scale[:, None] * weight_scale
