"""Predicts the kernel launches of a rewritten graph, at its own image size and at other likely sizes.

Kernels are called in a dry run with tensors without memory; nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.backend.registry import Kernel

# Factors of height and width, most likely first. With these, Stable Diffusion 1.5 after 512x512 and XL after 1024x1024
# compile all that sizes from 384x384 to 1536x1536 launch; no other four factors miss less after other sizes.
_SCALES = ((1, 9 / 8), (3 / 2, 3 / 2), (3 / 4, 3 / 4), (1 / 2, 1 / 2))
_STEP = 8  # of a latent's height and width: images are mostly multiples of 64 pixels

Size = tuple[int, int]
"""Height and width: of a latent, or of a level of the UNet below it."""


@dataclass(frozen=True)
class Shape:
    """What a launch function reads of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    weight: bool = False  # its size does not depend on the image's


class Call(NamedTuple):
    """A call of a kernel, with shapes in place of tensors so that it keeps no tensor alive."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Launch(NamedTuple):
    """A kernel and what it is compiled for: arguments, with dtypes in place of tensors, and constants. `owner` is the
    name of the kernel that launches it."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    owner: str = ""


def calls(graph: fx.Graph) -> list[Call]:
    """The distinct calls of kernels in a graph, from the shapes and dtypes of the nodes."""
    found: dict[str, Call] = {}
    for node in graph.nodes:
        if isinstance(node.target, Kernel) and _compiled(node.target):
            call = Call(node.target, *map_aggregate((node.args, dict(node.kwargs)), _described))
            found.setdefault(str(call), call)
    return list(found.values())


def launched(calls: Iterable[Call], device: torch.device | None = None) -> dict[Any, Launch]:
    """The launches of calls on a device, by `key`; none of a call that raises."""
    found: dict[Any, Launch] = {}
    for function, args, kwargs in calls:
        try:
            with torch.no_grad(), triton_runtime.dry_run(device) as recorded:
                function(*map_aggregate(args, _stand_in), **map_aggregate(kwargs, _stand_in))
        except Exception:
            continue  # compiled at its first launch
        for kernel, operands, constants, owner in recorded:
            kinds = tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in operands)
            launch = Launch(kernel, kinds, constants, owner)
            found.setdefault(key(launch), launch)
    return found


def key(launch: Launch) -> Any:
    """Equal for launches that share a compilation: Triton specializes integers on width, 1 and divisibility by 16."""
    kernel = launch.kernel
    if not hasattr(kernel, "fn"):
        # CUDA C++: compiled by its constants alone
        return id(kernel), tuple(sorted(launch.constants.items()))
    unspecialized = set(getattr(kernel, "do_not_specialize", None) or ())  # names; positions in older versions
    seen: list[Any] = []
    for place, (name, value) in enumerate(zip(kernel.arg_names, launch.args)):
        if type(value) is not int:
            seen.append(value if isinstance(value, torch.dtype) else type(value))
            continue
        wide = not -(2**31) <= value < 2**31
        plain = name in unspecialized or place in unspecialized
        seen.append(wide if plain else (wide, value == 1, value % 16 == 0))
    return id(kernel), tuple(seen), tuple(sorted(launch.constants.items()))


def latent(graph: fx.Graph) -> Size | None:
    """Height and width of the largest placeholder (N, C, H, W) of a graph; None if there is none."""
    shapes = [_described(node) for node in graph.nodes if node.op == "placeholder"]
    sizes = [shape.size[2:] for shape in shapes if isinstance(shape, Shape) and len(shape.size) == 4]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def likely_sizes(latent: Size) -> list[Size]:
    """Other sizes, most likely first, that together launch nearly all that any other size does."""
    found = [(_rounded(latent[0] * down), _rounded(latent[1] * across)) for down, across in _SCALES]
    return [size for size in dict.fromkeys(found) if size != latent]


def _rounded(pixels: float) -> int:
    return max(_STEP, round(pixels / _STEP) * _STEP)


def resized(calls: Iterable[Call], latent: Size, other: Size) -> list[Call]:
    """Calls at another size of the latent. A guess: numbers are left as they are, and anything as large as a feature
    map passes for one."""
    given = list(calls)
    seen = _feature_map_sizes(given)
    levels = {size: to for size, to in zip(_levels(latent), _levels(other)) if size in seen}

    def scaled(x: Any) -> Any:
        return _scaled(x, levels) if isinstance(x, Shape) and not x.weight else x

    return [Call(call.function, *map_aggregate((call.args, call.kwargs), scaled)) for call in given]


def _feature_map_sizes(calls: list[Call]) -> set[tuple[int, ...]]:
    """Heights and widths of 4D operands that are no weights."""
    found: set[tuple[int, ...]] = set()

    def look(x: Any) -> Any:
        if isinstance(x, Shape) and len(x.size) == 4 and not x.weight:
            found.add(x.size[2:])
        return x

    map_aggregate([(call.args, call.kwargs) for call in calls], look)
    return found


def _levels(size: Size) -> Iterator[Size]:
    """The sizes of a UNet's levels: a size, halved repeatedly by convolutions of stride 2 with padding 1."""
    while min(size) > 1:
        yield size
        size = (size[0] + 1) // 2, (size[1] + 1) // 2


def _scaled(shape: Shape, levels: dict[Size, Size]) -> Shape:
    """A feature map (N, C, H, W), or one flattened to (N, L, C) or (N, heads, L, D), or numbers for each of its pixels,
    (N, L) in float32, at another size; other shapes as they are.

    Strides over all pixels are scaled; strides within a pixel, as of queries next to keys and values, stay.
    """
    size, stride = list(shape.size), list(shape.stride)
    if len(size) == 4 and (to := levels.get((size[2], size[3]))) and stride[2] == size[3] * stride[3]:
        pixels, wanted, step = size[2] * size[3], to[0] * to[1], stride[3]
        size[2:] = to
        others = range(2)
        stride[2] = to[1] * step
    elif len(size) in (3, 4) and (wanted := _lengths(levels).get(size[-2], 0)):
        pixels, step = size[-2], stride[-2]
        size[-2] = wanted
        others = range(len(size))
    elif len(size) == 2 and shape.dtype == torch.float32 and (wanted := _lengths(levels).get(size[-1], 0)):
        # the scales of rows of 8-bit integers
        pixels, step = size[-1], stride[-1]
        size[-1] = wanted
        others = range(1)
    else:
        return shape
    for dim in others:
        if 0 < pixels * step <= stride[dim]:
            stride[dim] = stride[dim] * wanted // pixels
    return replace(shape, size=tuple(size), stride=tuple(stride))


def _lengths(levels: dict[Size, Size]) -> dict[int, int]:
    return {size[0] * size[1]: to[0] * to[1] for size, to in levels.items()}


def _compiled(kernel: Kernel[..., Any]) -> bool:
    """Whether a kernel may launch what is compiled."""
    return bool(kernel.triton_functions or kernel.cuda_sources or kernel.uses)


def _described(x: Any) -> Any:
    """Shapes in place of a node's value, or of a tensor."""
    if isinstance(x, fx.Node):
        return map_aggregate(x.meta.get("val"), _weight if x.op == "get_attr" else _value)
    return _weight(x)


def _value(x: Any, weight: bool = False) -> Any:
    return Shape(tuple(x.shape), x.stride(), x.dtype, weight) if isinstance(x, torch.Tensor) else x


def _weight(x: Any) -> Any:
    return _value(x, True)


def _stand_in(x: Any) -> Any:
    return torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="meta") if isinstance(x, Shape) else x
