"""Cases of the kernels that write 8 bits: `CASES`, by kernel, as in cases.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.eight_bits import quantise_rows, quantise_weights
from sfast_ext.kernels.eight_bits.group_norm8 import CODES, LEAST_SILU

# rows, columns, and how many are rotated together; batch 2, the last three are SDXL's
ROWS = [(8192, 320, 64), (2048, 1280, 256), (2048, 2560, 256), (512, 5120, 256)]
ROWS += [(8192, 640, 128), (8192, 2560, 256), (2048, 5120, 256)]
NORM_ROWS = [(8192, 320), (2048, 640), (512, 1280), (2048, 1280), (8192, 640)]
# channels, and height and width, of SDXL's residual blocks; channels of both parts of a concatenation
NORM_IMAGES = [(320, 128), (640, 64), (1280, 32)]
JOINED = [(1280, 1280, 32), (1280, 640, 64), (640, 640, 64), (640, 320, 128), (320, 320, 128)]
# channels and number of SDXL's transformer blocks
BLOCKS = [(640, 10), (1280, 60)]
# rows and columns of a block's weights in channels, and whether their inputs are rotated: queries, keys and values in
# one, projections, both sides of the feed-forward part
BLOCK_WEIGHTS = [(3, 1, False), (1, 1, True), (1, 1, False), (1, 1, True), (8, 1, False), (1, 4, True)]


def bank(blocks: list[tuple[int, int]], dtype: torch.dtype, device: str) -> list[list[Any]]:
    """The arguments of `quantise_weights.launch` for transformer blocks (channels, number): weights at random, and an
    empty bank. Digests are views of one tensor."""
    shapes = [
        (rows * channels, columns * channels, rotated)
        for channels, count in blocks
        for rows, columns, rotated in count * BLOCK_WEIGHTS
    ]
    weights = [torch.randn(rows, columns, device=device, dtype=dtype) * columns**-0.5 for rows, columns, _ in shapes]
    rows = [torch.empty(weight.shape, device=device, dtype=torch.int8) for weight in weights]
    scales = [torch.empty(len(weight), device=device) for weight in weights]
    counts = [len(weight) for weight in weights]
    digests = [*torch.zeros(sum(counts), dtype=torch.int64, device=device).split(counts)]
    return [
        weights,
        rows,
        scales,
        digests,
        [largest_group(columns) if rotated else 0 for _, columns, rotated in shapes],
    ]


def largest_group(columns: int) -> int:
    """Of those that divide the columns."""
    return max(group for group in quantise_rows.GROUPS if not group or columns % group == 0)


def torch_quantise_rows(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """By PyTorch's operations; the rotation is a product."""
    y = x.float()
    if group:
        matrix = quantise_rows.hadamard(group).to(x.device, torch.float32)
        y = (y.unflatten(-1, (-1, group)) @ matrix).flatten(-2)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (y / scale).round().to(torch.int8), scale.squeeze(-1)


def _torch_layer_norm8(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch_quantise_rows(F.layer_norm(x, x.shape[-1:], weight, bias, eps))


def _torch_add_layer_norm8(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    return total, *_torch_layer_norm8(total, weight, bias, eps)


def _torch_quantise_weights(weights: Any, rows: Any, scales: Any, digests: Any, groups: Any) -> tuple[Tensor, ...]:
    return tuple(torch_quantise_rows(weight, group)[0] for weight, group in zip(weights, groups))


MakeCase = Callable[[str, str, Callable[..., Any], list[Any], dict[str, Any]], Any]


def _quantise_rows(o: Any, case: MakeCase) -> Iterator[Any]:
    for rows, columns, group in ROWS:
        for each in (0, group):
            operands = [o.randn(rows, columns), each]
            yield case("quantise_rows", f"{rows}x{columns} by {each}", torch_quantise_rows, operands, {})


def _quantise_weights(o: Any, case: MakeCase) -> Iterator[Any]:
    """Of a block, unchanged but for the first call; what must be read."""
    for channels, _ in BLOCKS:
        given = bank([(channels, 1)], o.dtype, o.device)
        weights = given[0]
        yield replace(
            case("quantise_rows", f"a block of {channels}", torch_quantise_rows, [weights[0], 0], {}),
            kernel="quantise_weights",
            ours=functools.partial(_launched, *given),
            torch=functools.partial(_torch_quantise_weights, *given),
            target=functools.partial(_target, *given),
            bytes=sum(weight.numel() * weight.element_size() for weight in weights),
            composition=(_torch_quantise_weights, given, {}),
        )


def _launched(*given: Any) -> tuple[Tensor, ...]:
    return tuple(quantise_weights.launch(*given))


def _target(weights: Any, *given: Any) -> tuple[Tensor, ...]:
    return tuple(quantise_weights.reference([weight.double() for weight in weights], *given))


def _layer_norm8(o: Any, case: MakeCase) -> Iterator[Any]:
    for rows, columns in NORM_ROWS:
        operands = [o.randn(rows, columns), o.randn(columns), o.randn(columns), 1e-5]
        yield case("layer_norm8", f"{rows}x{columns}", _torch_layer_norm8, operands, {})


def _add_layer_norm8(o: Any, case: MakeCase) -> Iterator[Any]:
    for rows, columns in NORM_ROWS:
        operands = [o.randn(rows, columns), o.randn(rows, columns), o.randn(columns), o.randn(columns), 1e-5]
        yield case("add_layer_norm8", f"{rows}x{columns}", _torch_add_layer_norm8, operands, {})


def group_norm8(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool) -> tuple[Tensor, Tensor]:
    """By PyTorch's operations, as `group_norm8.reference`."""
    y = F.group_norm(x, groups, weight, bias, eps)
    if not silu:
        q, scale = torch_quantise_rows(y.flatten(1))
        return q.view(x.shape), torch.stack([scale, torch.zeros_like(scale)])
    y = F.silu(y)
    scale = (y.flatten(1).amax(1) + LEAST_SILU) / CODES
    zero = (LEAST_SILU / scale + 0.5).floor() - 127
    q = (y / scale[:, None, None, None] + zero[:, None, None, None]).round().to(torch.int8)
    return q, torch.stack([scale, zero])


def _torch_group_norm8(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shift: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    return group_norm8(x + shift[:, :, None, None], groups, weight, bias, eps, silu)


def _torch_add_group_norm8(
    x: Tensor, conv_bias: Tensor, residual: Tensor, scale: float, groups: int, weight: Tensor, bias: Tensor,
    eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = (x + conv_bias[:, None, None] + residual) * scale
    return total, *group_norm8(total, groups, weight, bias, eps, silu)


def _torch_cat_group_norm8(
    a: Tensor, conv_bias: Tensor | None, residual: Tensor | None, b: Tensor, groups: int, weight: Tensor, bias: Tensor,
    eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    joined = torch.cat([a, b], 1)
    return joined, *group_norm8(joined, groups, weight, bias, eps, silu)


def _group_norm8(o: Any, case: MakeCase) -> Iterator[Any]:
    for channels, size in NORM_IMAGES:
        operands = [o.image(channels, size), 32, o.randn(channels), o.randn(channels), 1e-5]
        options = {"shift": o.randn(2, channels), "silu": True}
        yield case("group_norm8", f"2x{channels}x{size}x{size}", _torch_group_norm8, operands, options)


def _add_group_norm8(o: Any, case: MakeCase) -> Iterator[Any]:
    for channels, size in NORM_IMAGES:
        operands = [o.image(channels, size), o.randn(channels), o.image(channels, size), 1.0, 32]
        operands += [o.randn(channels), o.randn(channels), 1e-5]
        shape = f"2x{channels}x{size}x{size}"
        yield case("add_group_norm8", shape, _torch_add_group_norm8, operands, {"silu": True})


def _cat_group_norm8(o: Any, case: MakeCase) -> Iterator[Any]:
    for below, skip, size in JOINED:
        operands = [o.image(below, size), None, None, o.image(skip, size), 32]
        operands += [o.randn(below + skip), o.randn(below + skip), 1e-5]
        shape = f"2x{below}+{skip}x{size}x{size}"
        yield case("cat_group_norm8", shape, _torch_cat_group_norm8, operands, {"silu": True})


CASES = {
    "group_norm8": _group_norm8,
    "add_group_norm8": _add_group_norm8,
    "cat_group_norm8": _cat_group_norm8,
    "quantise_rows": _quantise_rows,
    "quantise_weights": _quantise_weights,
    "layer_norm8": _layer_norm8,
    "add_layer_norm8": _add_layer_norm8,
}
