"""Decides whether channels-last images are faster on this GPU, by timing the operations that depend on the layout.

Without kernels of this project that depends on the GPU and on the model: tensor cores read channels-last images
directly, but PyTorch's group norm is slow there. On an NVIDIA H200 channels-last gains a fifth for SD 1.5 at 512x512,
and loses 1 % for SDXL.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional as F

from sfast_ext.kernels.backend import gpu_clock

from .channels_last import is_pointwise
from .cleanup import PERMUTE, permutation
from .rewrite import CONV, argument, dtype, inputs, is_op, overloads, shape

NORM = overloads("group_norm")
UPSAMPLE = overloads("upsample_nearest2d.vec", "upsample_nearest2d")
CAT = overloads("cat", "concat")
_INTO_TOKENS, _INTO_IMAGE = [0, 2, 3, 1], [0, 3, 1, 2]
# Not everything is timed: copies that a layout needs between operations are left out. On an NVIDIA H200 a plan of SDXL
# at 1024x1024 whose operations took 8 % less channels-last took 1 % more; if they took 16 % less, plans took less.
_CLEARLY = 0.9
_TIMES = 3  # runs of each operation
_CYCLES = 1_000_000  # the GPU waits before each operation, half a millisecond: by then the launches are in its queue


class Operation(NamedTuple):
    """An operation on images and the shapes that it is timed with."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    options: tuple[Any, ...]
    dtype: torch.dtype


def operations(graph: fx.Graph) -> Counter[Operation]:
    """Returns the operations of a graph that depend on the layout of images, (N, C, H, W), and how many of each."""
    found: Counter[Operation] = Counter()
    for node in graph.nodes:
        operation = _operation(node) if node.op == "call_function" else None
        if operation is not None:
            found[operation] += 1
    return found


def _operation(node: fx.Node) -> Operation | None:
    size, kind = shape(node), dtype(node)
    if size is None or len(size) != 4 or kind is None or not kind.is_floating_point:
        return None
    if is_op(node, CONV):
        images, weight = shape(node.args[0]), shape(argument(node, 1, "weight"))
        if images is None or weight is None:
            return None
        options = [argument(node, i, name, default) for i, name, default in _CONVOLUTION]
        bias = argument(node, 2, "bias") is not None
        name = "pointwise" if is_pointwise(node) else "convolution"
        return Operation(name, (images, weight), (bias, *map(_hashable, options)), kind)
    if is_op(node, NORM):
        return Operation("norm", (size,), (argument(node, 1, "num_groups"),), kind)
    if is_op(node, PERMUTE) and permutation(node) in (_INTO_TOKENS, _INTO_IMAGE):
        source = shape(node.args[0]) or ()
        return Operation("move", (size if permutation(node) == _INTO_IMAGE else source,), (), kind)
    if is_op(node, UPSAMPLE):
        return Operation("upsample", (shape(node.args[0]) or (), size), (), kind)
    if is_op(node, CAT) and argument(node, 1, "dim", 0) in (1, -3):
        return Operation("cat", tuple(shape(x) or () for x in inputs(node.args[0])), (), kind)
    return None


_CONVOLUTION = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1), (6, "groups", 1))


def _hashable(option: Any) -> Hashable:
    return tuple(option) if isinstance(option, (list, tuple)) else option


def runner(operation: Operation, device: torch.device, layout: torch.memory_format) -> Callable[[], Any] | None:
    """Returns a function that runs the operation on images of a layout; None if it is free there."""
    kind, shapes, options, kept = operation
    last = layout == torch.channels_last
    # the host's random state is left alone: an image is being made
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, dtype=kept, device=device, generator=generator)
    x, *others = (randn(size).to(memory_format=layout) for size in shapes)
    if kind in ("convolution", "pointwise"):
        weight, (has_bias, *rest) = others[0], options
        bias = randn(weight.shape[0]) if has_bias else None
        if kind == "pointwise" and last:
            matrix, pixels = weight.flatten(1), x.permute(0, 2, 3, 1)
            return lambda: F.linear(pixels, matrix, bias)
        return lambda: F.conv2d(x, weight, bias, *rest)
    if kind == "norm":
        affine = [randn(x.shape[1]) for _ in range(2)]
        return lambda: F.group_norm(x, options[0], *affine)
    if kind == "move":
        return None if last else lambda: x.permute(0, 2, 3, 1).contiguous()
    if kind == "upsample":
        return lambda: F.interpolate(x, size=shapes[1][2:], mode="nearest")
    return lambda: torch.cat([x, *others], 1)


def milliseconds(found: Counter[Operation], device: torch.device, layout: torch.memory_format) -> float:
    """Returns the GPU time of all operations in a layout."""
    total = 0.0
    for operation, count in found.items():
        run = runner(operation, device, layout)
        if run is not None:
            total += count * _time(run)
    return total


def _time(run: Callable[[], Any]) -> float:
    run()
    return gpu_clock.milliseconds(run, _TIMES, _CYCLES)


def channels_last_pays(graph: fx.Graph, device: torch.device) -> bool:
    """Whether the operations on images take clearly less time channels-last, without kernels of this project."""
    found = operations(graph)
    try:
        with torch.no_grad(), torch.cuda.device(device):
            contiguous, last = (
                milliseconds(found, device, layout) for layout in (torch.contiguous_format, torch.channels_last)
            )
    except torch.cuda.OutOfMemoryError:
        return False  # the plan itself needs no more than the original
    return last < _CLEARLY * contiguous
