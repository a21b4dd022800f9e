"""Operands of each registered kernel, at one small size: what its launch is compared with its reference at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.eight_bits import quantise_weights

from .support import heads, randn

HALF = torch.float16
Operands = Callable[[torch.device], tuple[Any, ...]]
CASES: dict[str, Operands] = {}
"""By kernel: its arguments on a device."""


def _of(kernel: str) -> Callable[[Operands], Operands]:
    def register(function: Operands) -> Operands:
        CASES[kernel] = function
        return function

    return register


def _image(device: torch.device, *shape: int) -> Tensor:
    return randn(*shape, dtype=HALF, device=device).to(memory_format=torch.channels_last)


def _vectors(device: torch.device, count: int, size: int) -> list[Tensor]:
    return [randn(size, dtype=HALF, device=device) for _ in range(count)]


def _matrix(device: torch.device, rows: int, columns: int) -> Tensor:
    return randn(rows, columns, dtype=HALF, device=device, std=columns**-0.5)


def _filters(device: torch.device, columns: int, channels: int) -> Tensor:
    weight = randn(columns, channels, 3, 3, dtype=HALF, device=device, std=(9 * channels) ** -0.5)
    return weight.to(memory_format=torch.channels_last)


@_of("layer_norm")
def _layer_norm(device: torch.device) -> tuple[Any, ...]:
    return (randn(9, 64, dtype=HALF, device=device), *_vectors(device, 2, 64), 1e-5)


@_of("add_layer_norm")
def _add_layer_norm(device: torch.device) -> tuple[Any, ...]:
    x, residual = (randn(9, 64, dtype=HALF, device=device) for _ in range(2))
    return (x, residual, *_vectors(device, 2, 64), 1e-5)


@_of("quantise_rows")
def _quantise_rows(device: torch.device) -> tuple[Any, ...]:
    return randn(9, 128, dtype=HALF, device=device), 64


@_of("quantise_weights")
def _quantise_weights(device: torch.device) -> tuple[Any, ...]:
    weights = [_matrix(device, *shape) for shape in ((32, 128), (7, 72), (3, 30))]
    rows = [torch.full(weight.shape, 99, dtype=torch.int8, device=device) for weight in weights]
    scales = [torch.full((len(weight),), float("nan"), device=device) for weight in weights]
    digests = [torch.zeros(len(weight), dtype=torch.int64, device=device) for weight in weights]
    return weights, rows, scales, digests, [64, 0, 0]


@_of("layer_norm8")
def _layer_norm8(device: torch.device) -> tuple[Any, ...]:
    return (randn(9, 64, dtype=HALF, device=device), *_vectors(device, 2, 64), 1e-5)


@_of("add_layer_norm8")
def _add_layer_norm8(device: torch.device) -> tuple[Any, ...]:
    x, residual = (randn(9, 64, dtype=HALF, device=device) for _ in range(2))
    return (x, residual, *_vectors(device, 2, 64), 1e-5)


@_of("group_norm8")
def _group_norm8(device: torch.device) -> tuple[Any, ...]:
    return (_image(device, 2, 64, 5, 4), 4, *_vectors(device, 2, 64), 1e-5)


@_of("add_group_norm8")
def _add_group_norm8(device: torch.device) -> tuple[Any, ...]:
    x, residual = (_image(device, 2, 64, 5, 4) for _ in range(2))
    conv_bias, weight, bias = _vectors(device, 3, 64)
    return x, conv_bias, residual, 1.0, 4, weight, bias, 1e-5


@_of("cat_group_norm8")
def _cat_group_norm8(device: torch.device) -> tuple[Any, ...]:
    a, residual, b = (_image(device, 2, channels, 5, 4) for channels in (64, 64, 32))
    return (a, *_vectors(device, 1, 64), residual, b, 4, *_vectors(device, 2, 96), 1e-5)


@_of("conv2d8")
def _conv2d8(device: torch.device) -> tuple[Any, ...]:
    x = torch.randint(-127, 128, (2, 64, 5, 4), dtype=torch.int8, device=device)
    weight = torch.randint(-127, 128, (40, 9 * 64), dtype=torch.int8, device=device)
    x_scale, weight_scale = (torch.rand(2, count, device=device) * 1e-3 + 1e-4 for count in (2, 40))
    x_scale[1] = torch.tensor([-127.0, -5.0])
    weight_scale = torch.cat([weight_scale[:1], quantise_weights.sums_of_codes(weight)])
    x = x.contiguous(memory_format=torch.channels_last)
    return x, x_scale, weight, weight_scale, *_vectors(device, 1, 40), _image(device, 2, 40, 5, 4)


@_of("bias_add")
def _bias_add(device: torch.device) -> tuple[Any, ...]:
    return (_image(device, 2, 64, 5, 4), *_vectors(device, 1, 64), _image(device, 2, 64, 5, 4))


@_of("geglu")
def _geglu(device: torch.device) -> tuple[Any, ...]:
    return (randn(9, 128, dtype=HALF, device=device),)


@_of("swiglu")
def _swiglu(device: torch.device) -> tuple[Any, ...]:
    return tuple(randn(9, 128, dtype=HALF, device=device).chunk(2, -1))


@_of("swiglu8")
def _swiglu8(device: torch.device) -> tuple[Any, ...]:
    return *_swiglu(device), 64, randn(9, 64, dtype=HALF, device=device)


@_of("gelu8")
def _gelu8(device: torch.device) -> tuple[Any, ...]:
    return _swiglu(device)[0], "tanh", 64, randn(9, 64, dtype=HALF, device=device)


def _tokens(device: torch.device) -> list[Tensor]:
    return [randn(2, 9, 64, dtype=HALF, device=device) for _ in range(2)]


def _modulation(device: torch.device) -> list[Tensor]:
    return list(randn(2, 1, 192, dtype=HALF, device=device).chunk(3, -1))


@_of("modulated_norm")
def _modulated_norm(device: torch.device) -> tuple[Any, ...]:
    scale, shift, _ = _modulation(device)
    return _tokens(device)[0], *_vectors(device, 2, 64), 1e-5, scale, shift, True, True


@_of("gated_residual")
def _gated_residual(device: torch.device) -> tuple[Any, ...]:
    return *_tokens(device), _modulation(device)[2], *_vectors(device, 1, 64), 1e-5, True


@_of("gated_norm")
def _gated_norm(device: torch.device) -> tuple[Any, ...]:
    scale, shift, _ = _modulation(device)
    return *_gated_residual(device), *_vectors(device, 2, 64), 1e-5, scale, shift, False, True


@_of("modulated_norm8")
def _modulated_norm8(device: torch.device) -> tuple[Any, ...]:
    return *_modulated_norm(device), 64


@_of("gated_norm8")
def _gated_norm8(device: torch.device) -> tuple[Any, ...]:
    return *_gated_norm(device), 64


@_of("norm_rotary")
def _norm_rotary(device: torch.device) -> tuple[Any, ...]:
    angles = [randn(1, 9, 1, 64, dtype=torch.float32, device=device) for _ in range(2)]
    return randn(2, 9, 3, 64, dtype=HALF, device=device), *_vectors(device, 1, 64), 1e-5, *angles, "halves"


@_of("timestep_embedding")
def _timestep_embedding(device: torch.device) -> tuple[Any, ...]:
    frequency = torch.exp(-0.5 * torch.arange(16, dtype=torch.float32))[None]
    return torch.tensor([[3], [40]], device=device), frequency.to(device), True


@_of("group_norm")
def _group_norm(device: torch.device) -> tuple[Any, ...]:
    return (_image(device, 2, 64, 5, 4), 4, *_vectors(device, 2, 64), 1e-5)


@_of("add_group_norm")
def _add_group_norm(device: torch.device) -> tuple[Any, ...]:
    x, residual = (_image(device, 2, 64, 5, 4) for _ in range(2))
    conv_bias, weight, bias = _vectors(device, 3, 64)
    return x, conv_bias, residual, 1.0, 4, weight, bias, 1e-5


@_of("cat_group_norm")
def _cat_group_norm(device: torch.device) -> tuple[Any, ...]:
    a, residual, b = (_image(device, 2, channels, 5, 4) for channels in (64, 64, 32))
    return (a, *_vectors(device, 1, 64), residual, b, 4, *_vectors(device, 2, 96), 1e-5)


@_of("conv_group_norm")
def _conv_group_norm(device: torch.device) -> tuple[Any, ...]:
    x, residual = _image(device, 2, 64, 16, 16), _image(device, 2, 320, 16, 16)
    return (x, _filters(device, 320, 64), *_vectors(device, 1, 320), residual, 32, *_vectors(device, 2, 320), 1e-5)


@_of("conv2d")
def _conv2d(device: torch.device) -> tuple[Any, ...]:
    return _image(device, 2, 64, 16, 16), _filters(device, 320, 64)


@_of("narrow_conv")
def _narrow_conv(device: torch.device) -> tuple[Any, ...]:
    return (_image(device, 2, 4, 5, 4), _filters(device, 32, 4), *_vectors(device, 1, 32))


@_of("upsample")
def _upsample(device: torch.device) -> tuple[Any, ...]:
    return _image(device, 2, 64, 5, 4), (10, 8), (0.5, 0.5)


@_of("upsample_conv2d")
def _upsample_conv2d(device: torch.device) -> tuple[Any, ...]:
    return _image(device, 1, 128, 5, 4), _filters(device, 128, 128)


@_of("linear_accumulate")
def _linear_accumulate(device: torch.device) -> tuple[Any, ...]:
    return randn(9, 64, dtype=HALF, device=device), _matrix(device, 32, 64), randn(9, 32, dtype=HALF, device=device)


@_of("linear_gelu")
def _linear_gelu(device: torch.device) -> tuple[Any, ...]:
    return randn(9, 64, dtype=HALF, device=device), _matrix(device, 32, 64), *_vectors(device, 1, 32)


@_of("mma_linear")
def _mma_linear(device: torch.device) -> tuple[Any, ...]:
    return (randn(70, 64, dtype=HALF, device=device), _matrix(device, 168, 64), *_vectors(device, 1, 168))


@_of("mma_conv2d")
def _mma_conv2d(device: torch.device) -> tuple[Any, ...]:
    return _image(device, 2, 64, 9, 7), _filters(device, 168, 64), *_vectors(device, 1, 168)


@_of("linear_geglu")
def _linear_geglu(device: torch.device) -> tuple[Any, ...]:
    return (randn(256, 64, dtype=HALF, device=device), _matrix(device, 320, 64), *_vectors(device, 1, 320))


def _eight_bits(device: torch.device, columns: int) -> tuple[Tensor, ...]:
    x, weight = (torch.randint(-127, 128, (size, 64), dtype=torch.int8, device=device) for size in (70, columns))
    scales = (torch.rand(size, device=device) / 64 for size in (70, columns))
    return x, next(scales), weight, next(scales), *_vectors(device, 1, columns)


@_of("linear8")
def _linear8(device: torch.device) -> tuple[Any, ...]:
    return *_eight_bits(device, 168), randn(70, 168, dtype=HALF, device=device)


@_of("geglu8")
def _geglu8(device: torch.device) -> tuple[Any, ...]:
    return _eight_bits(device, 320)


@_of("linear_layer_norm")
def _linear_layer_norm(device: torch.device) -> tuple[Any, ...]:
    x, residual = randn(256, 64, dtype=HALF, device=device), randn(256, 320, dtype=HALF, device=device)
    bias, weight, norm_bias = _vectors(device, 3, 320)
    return x, _matrix(device, 320, 64), bias, residual, weight, norm_bias, 1e-5


@_of("attention")
def _attention(device: torch.device) -> tuple[Any, ...]:
    return tuple(heads((1, 2, 70, 20, 40), HALF, device))


@_of("query_attention")
def _query_attention(device: torch.device) -> tuple[Any, ...]:
    _, k, v = heads((1, 5, 64, 20, 64), HALF, device)
    return randn(1, 64, 320, dtype=HALF, device=device), _matrix(device, 320, 320), k, v
