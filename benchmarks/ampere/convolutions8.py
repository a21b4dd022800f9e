"""Times `mma_conv8` next to `mma_gemm` and cuDNN: 3x3 convolutions of 8-bit integers next to the same in half
precision, and the group norms that write their input."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ampere.turns import Call, in_turns
from sfast_ext.kernels.eight_bits import conv2d8, group_norm8, mma_conv8, quantise_rows, quantise_weights
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.runtime.verify import relative_error

WHAT = "int8-convolution"
"""What the rows say they are."""
BEGIN, END = "<!-- ampere int8 convolution: begin -->", "<!-- ampere int8 convolution: end -->"
SHAPES = (
    (320, 128, 320), (640, 128, 320), (960, 128, 320), (320, 64, 640), (640, 64, 640), (960, 64, 640), (1280, 64, 640),
    (1920, 64, 640), (640, 32, 1280), (1280, 32, 1280), (1920, 32, 1280), (2560, 32, 1280),
)  # fmt: skip
"""Channels, height and width, and channels of the result: of SDXL's residual blocks at 1024x1024, two images."""


def row(channels: int, size: int, columns: int) -> dict[str, Any]:
    """A group norm, SiLU and a 3x3 convolution onto a residual: microseconds of both parts in half precision and in 8
    bits, by turns, and the errors of both results against float32."""
    torch.manual_seed(0)
    x, residual = _image(channels, size).half(), _image(columns, size).half()
    weight = (torch.randn(columns, channels, 3, 3, device="cuda") * (9 * channels) ** -0.5).half()
    weight = weight.contiguous(memory_format=torch.channels_last)
    vectors, bias = [torch.randn(channels, device="cuda").half() for _ in range(2)], _vector(columns)
    gamma, beta = vectors
    of_norm = x, 32, gamma, beta, 1e-5, None, True
    y = group_norm.launch(*of_norm)
    q, scale = group_norm8.launch(*of_norm)
    rows, row_scales = quantise_rows.launch(quantise_weights.matrix(weight))
    row_scales = torch.stack([row_scales, *quantise_weights.sums_of_codes(rows)])
    exact = F.silu(F.group_norm(x.float(), 32, *(v.float() for v in vectors)))
    target = F.conv2d(exact, weight.float(), bias.float(), padding=1) + residual.float()
    given = q, scale, rows, row_scales, bias, residual, 1, torch.float16
    pixels, device = 2 * size * size, x.device
    half: dict[str, Call] = {
        str(tile): functools.partial(mma_gemm.conv2d, y, weight, bias, tile=tile)
        for tile in mma_gemm.tiles(pixels, weight)
    }
    int8: dict[str, Call] = {
        str(tile): functools.partial(mma_conv8.conv2d, *given, tile=tile)
        for tile in mma_conv8.tiles(pixels, columns, channels, device)
    }
    cudnn = functools.partial(F.conv2d, y, weight, None, padding=1)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        cudnn()
        times = in_turns(
            {
                **{f"half {name}": call for name, call in half.items()},
                **{f"int8 {name}": call for name, call in int8.items()},
                "cuDNN": cudnn,
                "half norm": functools.partial(group_norm.launch, *of_norm),
                "int8 norm": functools.partial(group_norm8.launch, *of_norm),
            }
        )
    finally:
        torch.backends.cudnn.benchmark = before
    errors = {"half": _error(next(iter(half.values()))().float() + residual, target)}
    integers = conv2d8.reference(q, scale, rows, row_scales, bias, residual, 1, torch.float32)
    for name, call in int8.items():
        made = call()
        if not _error(made, integers) < 1e-3:
            raise RuntimeError(f"{name}: relative error {_error(made, integers):.1e} for {channels}→{columns}, {size}²")
        errors["int8"] = _error(made, target)
    return {
        "what": WHAT,
        "shape": f"{channels}→{columns}, {size}²",
        "half_us": {name: times[f"half {name}"] for name in half},
        "int8_us": {name: times[f"int8 {name}"] for name in int8},
        "cudnn_us": times["cuDNN"],
        "norm_us": {"half": times["half norm"], "int8": times["int8 norm"]},
        "errors": errors,
    }


def _image(channels: int, size: int) -> Tensor:
    image = torch.randn(2, channels, size, size, device="cuda")
    return image.contiguous(memory_format=torch.channels_last)


def _vector(size: int) -> Tensor:
    return torch.randn(size, device="cuda").half()


def _error(y: Tensor, target: Tensor) -> float:
    return relative_error([y.float()], [target])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        "| Shape | `mma_gemm`, float16, µs | `mma_conv8`, int8, µs | ratio | the tile | cuDNN, float16, µs |"
        " norm, float16, µs | norm, int8, µs | error in float16 | in int8 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        times, errors, norms = each["int8_us"], each["errors"], each["norm_us"]
        tile = min(times, key=lambda name: times[name])
        half = min(each["half_us"].values())
        lines.append(
            f"| {each['shape']} | {half:.1f} | {times[tile]:.1f} | {half / times[tile]:.2f} |"
            f" {tile.removeprefix('mma ')} | {each['cudnn_us']:.1f} | {norms['half']:.1f} | {norms['int8']:.1f} |"
            f" {errors['half']:.1e} | {errors['int8']:.1e} |"
        )
    return lines
