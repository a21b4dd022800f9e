"""What is done to a captured graph, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import fx

from sfast_ext import kernels
from sfast_ext.report import at

from . import (
    attention,
    attention_casts,
    attention_heads,
    bias_add,
    channels_last,
    cleanup,
    conv2d,
    conv_group_norm,
    cse,
    geglu,
    group_norm,
    group_norm_inputs,
    im2col,
    layer_norm,
    linear_accumulate,
    linear_geglu,
    linear_layer_norm,
    narrow_conv,
    packed_linear,
    query_attention,
    rewrite,
    scaled_dot_product,
    sliced_attention,
    timestep_embedding,
    upsample,
    upsample_conv2d,
)

if TYPE_CHECKING:
    from sfast_ext.weights.submodule_arena import Arena


@dataclass
class PassContext:
    """What passes may make use of: kernels in Triton, and whether images are to lie channels-last."""

    arena: Arena
    device: torch.device
    triton: bool
    channels_last: bool = True

    def serves(self, *modules: ModuleType) -> bool:
        """Whether all of these kernels may be launched: what is not served stays as it was recorded."""
        return all(kernels.serves(module, self.device, triton=self.triton) for module in modules)


Pass = Callable[[fx.GraphModule, PassContext], int]

PASSES: list[tuple[str, Pass]] = [
    ("cleanup", cleanup.cleanup),
    ("cse", cse.cse),  # makes siblings of what was computed again and again
    ("fold_constants", cse.fold_constants),
    ("scaled_dot_product", scaled_dot_product.scaled_dot_product),
    ("sliced_attention", sliced_attention.sliced_attention),
    ("attention_heads", attention_heads.attention_heads),
    ("attention_casts", attention_casts.attention_casts),
    ("packed_linear", packed_linear.packed_linear),
    ("channels_last", channels_last.channels_last),  # where it pays
    ("cleanup", cleanup.cleanup),  # the permutes of 1x1 convolutions meet those of the token reshapes
    ("narrow_conv", narrow_conv.narrow_conv),
    ("group_norm", group_norm.group_norm),
    ("add_layer_norm", layer_norm.add_layer_norm),
    ("layer_norm", layer_norm.layer_norm),
    ("geglu", geglu.geglu),
    ("linear_geglu", linear_geglu.linear_geglu),
    ("linear_accumulate", linear_accumulate.linear_accumulate),
    ("linear_layer_norm", linear_layer_norm.linear_layer_norm),
    ("bias_add", bias_add.bias_add),
    ("group_norm_inputs", group_norm_inputs.group_norm_inputs),  # joins what group_norm and bias_add have made
    ("im2col", im2col.im2col),  # takes what the norms and bias_add have left of a convolution
    ("upsample_conv2d", upsample_conv2d.upsample_conv2d),
    ("conv2d", conv2d.conv2d),  # what is left to cuDNN
    ("conv_group_norm", conv_group_norm.conv_group_norm),
    ("upsample", upsample.upsample),
    ("timestep_embedding", timestep_embedding.timestep_embedding),
    ("query_attention", query_attention.query_attention),
    ("attention", attention.attention),
]


def run_passes(gm: fx.GraphModule, ctx: PassContext) -> dict[str, int]:
    """Rewrites the graph of `gm` in place; how often each pass matched. What goes in and what comes out stays the same.

    `gm` is not recompiled, which takes longer than all passes.
    """
    counts: dict[str, int] = {}
    if not supported(gm.graph):
        return counts
    rewrite.hoist_weights(gm.graph)
    for name, function in PASSES:
        at(f"pass {name}")
        counts[name] = counts.get(name, 0) + function(gm, ctx)
    rewrite.eliminate_dead(gm.graph)
    return counts


def supported(graph: fx.Graph) -> bool:
    """No operation that depends on strides, no unknown size, no autocast that is yet to do its work."""
    for node in graph.nodes:
        if rewrite.enters_autocast(node) and rewrite.argument(node, 2, "enabled") is not False:
            return False
        if node.op == "call_function" and node.target in rewrite.READS_STRIDES:
            return False
        if rewrite.value(node) is not None and rewrite.shape(node) is None:
            return False
    return True
