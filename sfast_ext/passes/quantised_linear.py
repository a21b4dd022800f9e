"""Linear layers that a library quantised to 8-bit integers, as kernels of 8-bit integers.

The forward of such a layer quantises the rows of its input, multiplies integers and applies the scales, each an
operation that reads and writes whole tensors. SDNQ (0.2, `int8` weights with quantised products, no group of columns)
computes what `quantise_rows` and `linear8` compute: symmetric, a scale for each row of the input and of the weight, in
float32; sums are the same, and codes but for one of 1,000, near the middle of two. Other formats keep the operations
that the library runs: those of comfy_kitchen round the scale and the quotient to the dtype of the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sfast_ext.kernels.eight_bits import add_layer_norm8, geglu8, layer_norm8, linear8, quantise_rows
from sfast_ext.kernels.pointwise import geglu

from .eight_bits_inputs import quantised_by_norm, results
from .eight_bits_match import COLUMNS, DEPTH, norm_of
from .fusion import fusion
from .rewrite import (
    CAST,
    HALF,
    RESHAPE,
    argument,
    call,
    dtype,
    is_op,
    is_weight,
    meta_like,
    only_user,
    overloads,
    replace,
    reshaped,
    shape,
)

if TYPE_CHECKING:
    from .context import PassContext

INT_MM = overloads("_int_mm")
ABS, AMAX, ROUND, CLAMP = (overloads(name) for name in ("abs", "amax", "round", "clamp"))
DIV = overloads("div.Tensor", "div.Scalar")
MUL = overloads("mul.Tensor")
ADDCMUL = overloads("addcmul")
SCALED_MM = "sdnq::scaled_mm"
"""SDNQ's operator for GPUs: sums of integers, times the scales, plus the bias, by Triton."""


class Layer(NamedTuple):
    """The product of a quantised layer."""

    x: fx.Node
    """The input in half precision, (rows, K), with the codes that the product reads made of it."""
    weight: fx.Node
    """(K, N), the transpose of rows that are contiguous."""
    scales: fx.Node
    """(1, N) in float32."""
    bias: fx.Node | None
    result: fx.Node
    """(rows, N), which is replaced."""


def quantised_linear(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replaces the operations of a quantised layer by two kernels.

    Pattern: (_int_mm(codes, weight).float() * scale * scales + bias).to(half) with scale = amax(abs(x), -1) / 127 and
    codes = clamp(round(x / scale)).to(int8); or, of SDNQ, scaled_mm(codes, weight, scale, scales, bias, half)
    Replacement: linear8.launch(q, scale, weight.t(), scales, bias) with (q, scale) = quantise_rows.launch(x)
    """
    targets = {n.target for n in gm.graph.nodes if n.op == "call_function"}
    products = {t for t in targets if getattr(getattr(t, "_schema", None), "name", "") == SCALED_MM} | INT_MM
    if products.isdisjoint(targets):
        return 0
    return fusion(products, needs=(quantise_rows.launch, linear8.launch), hoist=True)(_quantised_linear)(gm, ctx)


def _quantised_linear(product: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    layer = _of_integers(product) if is_op(product, INT_MM) else _of_scaled(product)
    if layer is None or not _fits(layer, pinned):
        return False
    _rewrite(layer, pinned)
    return True


def _of_scaled(product: fx.Node) -> Layer | None:
    """Matches SDNQ's operator and what precedes it."""
    codes, weight, scale, scales = product.args[:4]
    x = _quantised(codes, scale)
    if x is None or not isinstance(weight, fx.Node) or not isinstance(scales, fx.Node):
        return None
    return Layer(x, weight, scales, argument(product, 4, "bias"), product)


def _of_integers(product: fx.Node) -> Layer | None:
    """Matches what follows and precedes a product of integers."""
    codes, weight = product.args
    sums = _sole(only_user(product), CAST, torch.float32)
    scaled = _sole(only_user(sums) if sums else None, MUL, torch.float32)
    last = _sole(only_user(scaled) if scaled else None, MUL | ADDCMUL, torch.float32)
    result = only_user(last) if last else None
    if sums is None or scaled is None or last is None or not is_op(result, CAST) or result is None:
        return None
    scale = _other(scaled, sums)
    bias, scales = (last.args[0], last.args[2]) if is_op(last, ADDCMUL) else (None, _other(last, scaled))
    if is_op(last, ADDCMUL) and (last.args[1] is not scaled or argument(last, 3, "value", 1) != 1):
        return None
    x = _quantised(codes, scale)
    return None if x is None else Layer(x, weight, scales, bias, result)  # type: ignore[arg-type]


def _sole(node: fx.Node | None, ops: frozenset[Any], kind: torch.dtype) -> fx.Node | None:
    return node if node is not None and is_op(node, ops) and dtype(node) == kind else None


def _other(node: fx.Node, known: fx.Node) -> Any:
    """The second factor of a product."""
    first, second = node.args[:2]
    return second if first is known else first


def _quantised(codes: Any, scale: Any) -> fx.Node | None:
    """The tensor in half precision that was quantised to these codes with this scale; None if it was otherwise."""
    if not is_op(codes, CAST) or dtype(codes) != torch.int8:
        return None
    clamped: Any = codes.args[0]
    bounds = [argument(clamped, i, name) for i, name in ((1, "min"), (2, "max"))] if is_op(clamped, CLAMP) else []
    # the scale leaves no code below -127
    if bounds not in ([-128, 127], [-127, 127]):
        return None
    rounded: Any = clamped.args[0]
    quotient: Any = rounded.args[0] if is_op(rounded, ROUND) and not rounded.kwargs else None
    if not is_op(quotient, DIV) or quotient.args[1] is not scale or quotient.kwargs:
        return None
    wide: Any = quotient.args[0]
    largest: Any = scale.args[0] if is_op(scale, DIV) and scale.args[1] == quantise_rows.LARGEST else None
    if not is_op(largest, AMAX) or largest.args[1] not in ([-1], -1) or argument(largest, 2, "keepdim") is not True:
        return None
    magnitude: Any = largest.args[0]
    if not is_op(magnitude, ABS) or magnitude.args[0] is not wide or scale.kwargs:
        return None
    x = wide.args[0] if is_op(wide, CAST) and dtype(wide) == torch.float32 else None
    return x if isinstance(x, fx.Node) and dtype(x) in HALF and shape(x) == shape(wide) else None


def _rewrite(layer: Layer, pinned: set[fx.Node]) -> None:
    x, weight, scales, bias, result = layer
    graph, rows = result.graph, shape(x) or ()
    columns = (shape(result) or ())[-1]
    with graph.inserting_before(result):
        # the layers that read a norm's result quantise it as it is, not its rows in another shape each
        source: Any = x.args[0] if is_op(x, RESHAPE) and (shape(x.args[0]) or ())[-1:] == rows[-1:] else x
        source = source if source not in pinned else x
    pair = next((user for user in source.users if is_op(user, (quantise_rows.launch,)) and not user.kwargs), None)
    if pair is None:
        with graph.inserting_after(source):
            pair = call(graph, quantise_rows.launch, (source,), None)
        q, scale = results(pair, source, 0)
    else:
        q, scale = sorted(pair.users, key=lambda user: user.args[1])  # type: ignore[arg-type,return-value]
    with graph.inserting_before(result):
        codes = call(graph, torch.ops.aten.t.default, (weight,), meta_like(weight, (shape(weight) or ())[::-1]))
        flat = call(graph, torch.ops.aten.view.default, (scales, [columns]), meta_like(scales, (columns,)))
        kind = dtype(result)
        size = (*(shape(source) or ())[:-1], columns)
        new = call(graph, linear8.launch, (q, scale, codes, flat, bias), meta_like(result, size), {"dtype": kind})
        same = reshaped(graph, new, shape(result) or ())
    replace(result, same)


def _fits(layer: Layer, pinned: set[fx.Node]) -> bool:
    """Whether the kernels take the operands."""
    x, weight, scales, bias, result = layer
    kind = dtype(x)
    if not all(isinstance(node, fx.Node) and is_weight(node) for node in (weight, scales)):
        return False
    size = shape(weight) or ()
    if len(size) != 2 or dtype(weight) != torch.int8 or size[1] % COLUMNS or size[0] % DEPTH:
        return False
    # rows of K values each, one after the other
    if weight.meta["weight"].tensor.stride() != (1, size[0]):
        return False
    if dtype(scales) != torch.float32 or shape(scales) != (1, size[1]) or dtype(result) != kind:
        return False
    if bias is not None and (not is_weight(bias) or dtype(bias) != kind or shape(bias) != (size[1],)):
        return False
    return pinned.isdisjoint([x, weight, scales, result]) and len(shape(x) or ()) == 2 and len(shape(result) or ()) == 2


@fusion((quantise_rows.launch,), needs=(layer_norm8.launch, add_layer_norm8.launch), skip_pinned_inputs=True)
def quantised_norm(quantise: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Lets a norm write the codes of its result.

    Pattern: quantise_rows.launch(layer_norm.launch(...)) or of the norm of add_layer_norm.launch(...)
    Replacement: layer_norm8.launch(...), add_layer_norm8.launch(...)
    """
    x: Any = quantise.args[0]
    norm = norm_of(x) if len(quantise.args) == 1 and not quantise.kwargs else None
    if norm is None or norm in pinned or only_user(x) != quantise:
        return False
    pair = quantised_by_norm(norm, x)
    if pair is None:
        return False
    for user in list(quantise.users):
        index: Any = user.args[1]
        replace(user, pair[index])
    return True


@fusion((geglu.launch,), needs=(geglu8.launch,), skip_pinned_inputs=True)
def quantised_geglu(activation: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Lets a product of integers compute GEGLU.

    Pattern: geglu.launch(linear8.launch(q, scale, rows, scales, bias, dtype=...), ...)
    Replacement: geglu8.launch(q, scale, rows, scales, bias, ..., dtype=...)
    """
    product: Any = activation.args[0]
    if not is_op(product, (linear8.launch,)) or only_user(product) != activation or len(product.args) != 5:
        return False
    options = {**dict(zip(("gate_first", "approximate"), activation.args[1:])), **activation.kwargs, **product.kwargs}
    with activation.graph.inserting_before(activation):
        new = call(activation.graph, geglu8.launch, product.args, activation, options)
    replace(activation, new)
    return True
