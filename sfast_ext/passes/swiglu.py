"""SwiGLU, silu(gate) * value, as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from sfast_ext.kernels.pointwise import swiglu as kernel

from .fusion import fusion
from .rewrite import (
    HALF,
    SILU,
    call,
    dtype,
    is_cast,
    is_op,
    only_user,
    overloads,
    replace,
    same_meta,
    strip_lossless_casts,
)

if TYPE_CHECKING:
    from .context import PassContext

MUL = overloads("mul.Tensor")


@fusion(SILU, needs=(kernel.launch,), skip_pinned_inputs=True)
def swiglu(silu: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces SiLU, the casts around it and the multiplication, if nothing else reads its result.

    Pattern: [cast](silu([float](gate))) * value, of one shape and dtype
    Replacement: kernel.launch(gate, value)
    """
    gate: Any = strip_lossless_casts(silu.args[0])
    activated, product = silu, only_user(silu)
    if product is not None and is_cast(product) and dtype(product) == dtype(gate) and product not in pinned:
        activated, product = product, only_user(product)
    if product is None or not is_op(product, MUL) or product in pinned or product.args[0] is product.args[1]:
        return False
    value: Any = product.args[1] if product.args[0] is activated else product.args[0]
    if gate in pinned or value in pinned or dtype(gate) not in HALF:
        return False
    if not same_meta(gate, value) or not same_meta(gate, product) or not same_meta(gate, activated):
        return False
    with product.graph.inserting_before(product):
        new = call(product.graph, kernel.launch, (gate, value), product)
    replace(product, new)
    return True
