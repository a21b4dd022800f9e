"""Which layers are computed with 8-bit integers, by the error of each on the inputs of a call.

The error of a layer is the relative L2 distance of its product, of a sample of its rows, from that of the same values
not quantised, in float32. Rows are quantised each by itself, so the error of a sample is that of all: of 85 to 256
rows it is known to a few per cent. The first row of each image is among them, of up to 256 images.

The image that a convolution reads has one factor, so its error is of pixels of all images, quantised like the whole.

What the two limits are: for values with a normal distribution, a row of 1,280 has a largest magnitude of 3.4 standard
deviations, so rounding to 127 steps moves it by 0.8 %, and the product of two such operands by 1.1 %. `LIMIT` is what
some outliers in a row add to that. A layer above it would contribute more noise than 20 of the others. The whole is
judged by the plan's result, see `runtime.verify`. If that is too far from the original's, further layers are kept
(`Selection.tighten`): those first that add most to the error for the multiplications that they have. Errors of layers
are independent, so their squares add up. A small layer adds as much as one that takes ten times as long.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional as F

from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.eight_bits import group_norm8, mma_attention8, quantise_rows
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import geglu
from sfast_ext.reasons import Reason

from .rewrite import is_weight

if TYPE_CHECKING:
    from sfast_ext.weights.weight import Weight

LIMIT = 0.05
"""Of the error of a layer."""
TIGHTENED = 0.1, 0.5
"""Of the squared errors of all layers, that much at least and at most is taken away by `tighten`."""
MARGINS = (0.95, 0.75)
"""What the error is to be after it, of what it may be: layers do not add alike to it. The second time it must do."""
SAMPLE = 256
"""Rows of a layer that are measured at most, if there are not more images."""
QUERIES, SCORES = 64, 2**23
"""Queries of a head that are measured, and scores of all of them at most, if there are not more keys: 32 MB."""
OUTPUTS = 1024
"""Rows of its weight that are measured at least, if it has so many. The largest of SDXL have ten times as many."""
GAIN = 0.9
"""Of the error, that much at most is left if a rotation is to pay."""
GROUPS = (256, 128, 64)
"""How many neighbours may be rotated; the first that divides a row is taken."""


class Errors(NamedTuple):
    """The errors of a layer without and with a rotation."""

    plain: float
    rotated: float
    group: int
    """Of the rotation; 0 if no group divides a row."""
    work: float = 1.0
    """Its multiplications, or if half-precision weights leave the GPU, the values of its weight; 1 if it has none."""

    @property
    def least(self) -> float:
        """That of the better way; NaN if neither is a number."""
        return min((e for e in (self.plain, self.rotated) if not math.isnan(e)), default=math.nan)


@dataclass
class Selection:
    """Which layers of a model are quantised, the same for all of its plans.

    Attributes:
        errors: of the layers that were measured, by name.
        kept: those that stay in half precision.
        obstacle: why the last plan has no such layer; None if it has.
        elsewhere_too: whether plans of other calls have none either, for that reason.
        for_good: whether that stays so.
        room: bytes that the second copy of weights may take; None if that does not matter.
        inputs: of the call whose plan is made.
        declined: why that plan has no such layer; None if it may have some.
        resident: whether the half-precision values of these layers leave the GPU, see `weights.resident`.
        excess: by how many times the last plan was further away than it may be.
        tightened: how often.
    """

    errors: dict[str, Errors] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    obstacle: Reason | None = None
    elsewhere_too: bool = False
    for_good: bool = False
    room: int | None = None
    inputs: Sequence[Any] = ()
    declined: Reason | None = None
    resident: bool = False
    excess: float = 1.0
    tightened: int = 0

    @contextlib.contextmanager
    def on(self, inputs: Sequence[Any], room: int | None, declined: Reason | None = None) -> Iterator[None]:
        """Within, a plan is made of a call with these inputs.

        Args:
            declined: why it has no such layer, whatever the graph; None if it may have some.
        """
        self.inputs, self.room, self.obstacle, self.declined = inputs, room, None, declined
        self.elsewhere_too = self.for_good = False
        try:
            yield
        finally:
            self.inputs = ()

    def decline(self, obstacle: Reason, *, elsewhere_too: bool = True, for_good: bool = False) -> int:
        """The plan has no such layer. Returns 0."""
        self.obstacle, self.elsewhere_too, self.for_good = obstacle, elsewhere_too, for_good
        return 0

    def learn(self, errors: dict[str, Errors]) -> None:
        """These layers were measured."""
        self.errors.update(errors)
        # NaN is above any limit
        self.kept.update(name for name, error in errors.items() if not error.least <= LIMIT)

    def group(self, name: str, may_rotate: bool) -> int:
        """How many neighbours of a layer's rows are rotated.

        Args:
            may_rotate: whether a rotation costs nothing else. If not, the layer is rotated only if it is above the
                limit without.
        """
        plain, rotated, group, _ = self.errors[name]
        if plain <= LIMIT:
            return group if may_rotate and rotated <= GAIN * plain else 0
        return group if rotated < plain else 0

    def tighten(self) -> bool:
        """Keep further layers, so that the next plan is expected to be near enough. Returns whether any are left."""
        squares = {name: error.least**2 for name, error in self.errors.items() if name not in self.kept}
        margin = MARGINS[min(self.tightened, len(MARGINS) - 1)]
        self.tightened += 1
        share = 1 - (margin / self.excess) ** 2 if math.isfinite(self.excess) else 0.0
        least, most = TIGHTENED
        unwanted = min(max(least, share), most) * sum(squares.values())
        for name in sorted(squares, key=lambda n: -squares[n] / self.errors[n].work):
            if unwanted <= 0:
                break
            self.kept.add(name)
            unwanted -= squares[name]
        return len(self.kept) < len(self.errors)

    def listed(self) -> list[tuple[str, float]]:
        """The layers that are kept, with their errors, the worst first. One that is no number, or above 1, is 1."""
        found = [(name, error if (error := self.errors[name].least) < 1 else 1.0) for name in self.kept]
        return sorted(found, key=lambda each: (-each[1], each[0]))


class Layer(NamedTuple):
    """A product whose operands may be quantised, and its weight in the arena."""

    name: str
    x: fx.Node
    weight: Weight | None
    """None: it is an attention, `x` is its node."""
    stride: int = 0
    """Of a 3x3 convolution; 0: it is a linear layer."""
    silu: bool = False
    """Whether SiLU writes what a convolution reads."""
    operands: tuple[Any, ...] = ()
    """Of an attention: queries, keys, values, the scale of their products."""


def measured(
    gm: fx.GraphModule, layers: Sequence[Layer], inputs: Sequence[Any], read: Callable[[Weight], Tensor], *,
    by_bytes: bool = False,
) -> dict[str, Errors]:
    """The errors of layers on the inputs of the graph. Waits for the device once.

    The graph runs once, operation by operation and up to the last of the layers, with PyTorch's operations in the
    place of kernels, which are not compiled yet. Few operations are used: each that nothing else runs loads kernels of
    PyTorch, which take 5 to 50 MB of system memory for as long as the process runs. So samples are views, and distances
    are divided on the CPU.

    Args:
        read: gives the values of a weight, for as long as they are held.
        by_bytes: whether a layer counts by the memory of its weight, see `Errors.work`.
    """
    waiting: dict[fx.Node, list[Layer]] = {}
    for layer in layers:
        waiting.setdefault(layer.x, []).append(layer)
    found: list[Tensor] = []
    names: list[tuple[str, int, float]] = []
    device = next(t.device for t in inputs if isinstance(t, Tensor))
    # one copy each: the device is waited for by a copy from memory that is not pinned
    turns: dict[int, Tensor | None] = {0: None}

    def seen(node: fx.Node, value: Any, values: dict[fx.Node, Any]) -> bool:
        for layer in waiting.pop(node, ()):
            if layer.weight is None:
                q, k, v, scale = (values[x] if isinstance(x, fx.Node) else x for x in layer.operands)
                found.append(errors_of_attention(q, k, v, scale))
                # no memory is saved by it
                names.append((layer.name, 0, 1 if by_bytes else q.numel() * k.shape[2]))
                continue
            if layer.stride:
                found.append(errors_of_convolution(value, read(layer.weight), layer.stride, layer.silu))
                pixels = math.prod(-(-size // layer.stride) for size in value.shape[2:]) * len(value)
                names.append((layer.name, 0, (1 if by_bytes else pixels) * layer.weight.tensor.numel()))
                continue
            group = next((g for g in GROUPS if layer.weight.tensor.shape[1] % g == 0), 0)
            if group not in turns:
                turns[group] = hadamard(group, device)
            found.append(errors_of(value, read(layer.weight), turns[group]))
            work = layer.weight.tensor.numel() if by_bytes else value.numel() * len(layer.weight.tensor)
            names.append((layer.name, group, work))
        return bool(waiting)

    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        run(gm, inputs, seen, read)
    values = torch.stack(found).tolist() if found else []
    told = zip(names, map(relative, values), strict=True)
    return {name: Errors(plain, rotated, group, work) for (name, group, work), (plain, rotated) in told}


def errors_of(x: Tensor, weight: Tensor, turn: Tensor | None) -> Tensor:
    """What `relative` takes, of the product of x (..., K) and weight (N, K). `turn` is the matrix by which groups of
    neighbours are rotated; None: there is none."""
    images = x.flatten(1, -2) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
    sample = images[:, :: every(images.shape[1], SAMPLE // max(1, len(images)))].flatten(0, 1)
    sample = sample[:: every(len(sample), SAMPLE)].float()
    # output rows too are quantised each by itself
    wide = weight[:: max(1, len(weight) // OUTPUTS)].float()
    exact = F.linear(sample, wide)
    plain = F.linear(rounded(sample), rounded(wide))
    if turn is None:
        return squares(exact, plain, plain)
    sample, wide = ((t.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2) for t in (sample, wide))
    return squares(exact, plain, F.linear(rounded(sample), rounded(wide)))


def errors_of_convolution(x: Tensor, weight: Tensor, stride: int, silu: bool) -> Tensor:
    """What `relative` takes, of a 3x3 convolution of x (N, C, H, W), a result of SiLU or not, with weight (K, C, 3, 3)
    and padding 1; of a grid of pixels, and of output channels, whose weights in float32 would take 100 MB."""
    images, _, height, width = x.shape
    scale = x.abs().flatten(1).amax(1).float() / 127
    if silu:
        scale = (x.flatten(1).amax(1).float() + group_norm8.LEAST_SILU) / group_norm8.CODES
    outputs = -(-height // stride), -(-width // stride)
    steps = grid(outputs[0], outputs[1], SAMPLE // max(1, images))
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))

    def tap(*at: int) -> Tensor:
        # from the middle of the first step on, so that the border is no more of the grid than of the image
        down, across = (
            slice(min(step, count) // 2 * stride + place, (count - 1) * stride + place + 1, step * stride)
            for place, step, count in zip(at, steps, outputs)
        )
        return padded[:, down, across]

    sample = torch.cat([tap(i, j) for i in range(3) for j in range(3)], -1).float()
    wide = weight[:: every(len(weight), SAMPLE)].permute(0, 2, 3, 1).flatten(1).float()
    exact = F.linear(sample, wide)
    made = F.linear(rounded(sample, scale[:, None, None, None]), rounded(wide))
    return squares(exact, made, made)


def errors_of_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """What `relative` takes, of the result of an attention: q (B, H, L, D), k (B, H, S, D), v (B, H, S, E); of a sample
    of its queries."""
    sample = q[:, :, :: every(q.shape[2], min(QUERIES, SCORES // k[..., 0].numel()))].float()
    keys, values = k.float(), v.float()

    def attended(queries: Tensor, keys: Tensor) -> Tensor:
        scores = queries @ keys.mT * (q.shape[3] ** -0.5 if scale is None else scale)
        return scores.softmax(-1) @ values

    # the second keys are without a vector that the first ones have: softmax is the same
    made = attended(rounded(sample), rounded(keys - mma_attention8.mean(keys)))
    return squares(attended(sample, keys), made, made)


def every(count: int, most: int) -> int:
    """A step in which at most `most` of `count` rows are taken, and at least one. It is odd: an even one would take the
    same columns of each line of an image."""
    return max(1, -(-count // max(1, most))) | 1


def grid(down: int, across: int, most: int) -> tuple[int, int]:
    """The steps, of about the same length, in which at most so many pixels of an image are taken, and at least one."""
    one, other = 1, 1
    while -(-down // one) * -(-across // other) > max(1, most):
        if one <= other:
            one += 1
        else:
            other += 1
    return one, other


def squares(exact: Tensor, plain: Tensor, rotated: Tensor) -> Tensor:
    """(3,): the squared L2 norm of what is exact, and the squared distances of two others from it."""
    found = [each.flatten() for each in (exact, plain - exact, rotated - exact)]
    # a product of the library whose products are computed anyway: a norm would load other kernels
    return torch.stack([torch.dot(each, each) for each in found])


def relative(values: Sequence[float]) -> tuple[float, float]:
    """The relative L2 distances without and with a rotation, of `squares`; the absolute ones from zeros. NaN if the
    norm is beyond float32."""
    norm, *away = map(math.sqrt, values)
    if math.isinf(norm):
        return math.nan, math.nan
    plain, rotated = (each / norm if norm else each for each in away)
    return plain, rotated


def rounded(rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """What rows are once they are quantised, as by `quantise_rows.reference` in fewer operations; NaN for a row that
    holds a value that is not finite.

    Args:
        scale: that of what a row belongs to, which broadcasts to `rows`; by default its own.
    """
    if scale is None:
        scale = rows.abs().amax(-1, keepdim=True) / quantise_rows.LARGEST
    # a row of zeros has no scale
    scale = scale + quantise_rows.SMALLEST
    return (rows / scale).round().mul_(scale)


def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix."""
    return quantise_rows.hadamard(size).to(device, torch.float32)


def run(
    gm: fx.GraphModule,
    inputs: Iterable[Any],
    seen: Callable[[fx.Node, Any, dict[fx.Node, Any]], bool],
    read: Callable[[Weight], Tensor],
) -> None:
    """Runs a graph until `seen`, which is given each node, its value, and those of what it reads, returns False. That
    of a weight is None: its values are read where they are used."""
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    for node in gm.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = None if is_weight(node) else operator.attrgetter(str(node.target))(gm)
        else:
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda n: read(n.meta["weight"]) if is_weight(n) else values[n]
            )
            values[node] = plain(node.target)(*args, **kwargs)
            del args, kwargs
        if not seen(node, values[node], values):
            return
        for source in node.all_input_nodes:
            if last[source] is node and source.op != "get_attr":
                del values[source]


def plain(target: Any) -> Callable[..., Any]:
    """What a node calls, without a kernel of this project. The references of products are in float32, which takes a
    GPU several times as long."""
    kernel = registry.of(target)
    if kernel is linear_geglu.launch:
        return _linear_geglu
    if kernel is linear_accumulate.launch:
        return _linear_accumulate
    return target if kernel is None else kernel.reference


def _linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any, **more: Any) -> Tensor:
    return geglu.reference(F.linear(x, weight, bias), *options, **more)


def _linear_accumulate(x: Tensor, weight: Tensor, out_sum: Tensor) -> Tensor:
    return F.linear(x, weight) + out_sum
