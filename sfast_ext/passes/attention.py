"""Scaled dot product attention, lowered onto the fastest backend that supports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sfast_ext.kernels.attention import attention as kernel
from sfast_ext.kernels.linear import mma_gemm

from .fusion import fusion
from .rewrite import argument, call, dtype, overloads, replace

if TYPE_CHECKING:
    from .context import PassContext

ATTENTION = overloads("scaled_dot_product_attention")
IN_8_BITS = "eight_bits"
"""In `meta` of an attention: whether its queries and keys may be 8-bit integers."""


@fusion(ATTENTION, skip_pinned_inputs=True)
def attention(node: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Replaces an attention without dropout by the fastest of the kernels of this project and of the libraries.

    Pattern: scaled_dot_product_attention(q, k, v, ...)
    Replacement: kernel.launch(q, k, v, mask=..., is_causal=..., scale=...), with faster_sums=True
        if the user has chosen so, with eight_bits=True if the pass `eight_bits` has
    """
    options = kernel_options(node) if ctx.supported(kernel.launch) else None
    if options is None:
        return False
    if ctx.faster_sums and dtype(node) == torch.float16 and mma_gemm.half_sums_profitable(ctx.device):
        options["faster_sums"] = True
    if node.meta.get(IN_8_BITS):
        options["eight_bits"] = True
    with node.graph.inserting_before(node):
        new = call(node.graph, kernel.launch, node.args[:3], node, options)
    replace(node, new)
    return True


def kernel_options(node: fx.Node) -> dict[str, Any] | None:
    """Returns an attention's options as the kernels take them; None if it has other options than their defaults."""
    if len(node.args) < 3 or argument(node, 4, "dropout_p", 0.0) != 0 or node.kwargs.get("enable_gqa", False):
        return None
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", False)
    return {"mask": mask, "is_causal": causal, "scale": node.kwargs.get("scale")}
