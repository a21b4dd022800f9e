"""The passes that rewrite a captured graph, and their order.

A pass takes a graph module and a `PassContext`, rewrites the graph in place, and returns the number of rewrites. Most
passes match a node and what surrounds it: they are functions of one node under the decorator `fusion.fusion`. A pass
is named after the kernel that it fuses operations into.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import fx

from sfast_ext.report import at

from . import (
    attention,
    attention_casts,
    attention_heads,
    bias_add,
    channels_last,
    cleanup,
    complex_views,
    conv2d,
    conv_group_norm,
    cse,
    eight_bits,
    eight_bits_conv,
    gated_residual,
    geglu,
    group_norm,
    group_norm_inputs,
    im2col,
    in_place,
    joint_heads,
    layer_norm,
    linear_accumulate,
    linear_geglu,
    linear_gelu,
    linear_layer_norm,
    memory_order,
    mma_products,
    modulated_norm,
    narrow_conv,
    norm_rotary,
    packed_linear,
    quantised_linear,
    query_attention,
    rewrite,
    rms_norm,
    rotary_operators,
    scaled_dot_product,
    silu,
    sliced_attention,
    swiglu,
    timestep_embedding,
    upsample,
    upsample_conv2d,
)
from .context import PassContext
from .fusion import PassFunction


class Phase(IntEnum):
    """What passes do. The passes of a phase expect that those of earlier phases are done."""

    CANONICALIZE = 1
    """Bring equal computations into one form: PyTorch's operators in, fewer of PyTorch's operators out."""
    LAYOUT = 2
    """Change how weights and images lie in memory: packed linears, channels-last."""
    FUSION = 3
    """Replace groups of operations around a norm, an activation or an addition by one kernel."""
    LOWERING = 4
    """Replace what is left of convolutions, upsampling and attention by GEMMs, by kernels of this project or by a
    library, with what can still be fused into them."""
    MEMORY = 5
    """If memory counts (`PassContext.most_bytes`): need less at one time, by the order and by results in the memory
    of operands. Passes of other phases do not expect kernels that write to their operands."""


class Pass(NamedTuple):
    """An entry of the table of passes."""

    name: str
    function: PassFunction
    phase: Phase
    requires: tuple[str, ...] = ()
    """Names of passes that must have run before this one. A name that occurs twice stands for its last entry up to the
    phase of this pass. What other requirements imply is left out."""


CANONICALIZE, LAYOUT, FUSION, LOWERING, MEMORY = Phase

PASSES: list[Pass] = [
    Pass("cleanup", cleanup.cleanup, CANONICALIZE),
    # cleanup: operations are equal only if they read one node, not a copy of it
    Pass("cse", cse.cse, CANONICALIZE, ("cleanup",)),
    # cleanup: `detach_` pins the literals of a forward
    Pass("fold_constants", cse.fold_constants, CANONICALIZE, ("cleanup",)),
    Pass("quantised_linear", quantised_linear.quantised_linear, CANONICALIZE),
    Pass("silu", silu.silu, CANONICALIZE),
    Pass("rotary", norm_rotary.rotary, CANONICALIZE),
    Pass("rotary_operators", rotary_operators.rotary_operators, CANONICALIZE),
    # cleanup: dropout that drops nothing stands between softmax and matmul
    Pass("scaled_dot_product", scaled_dot_product.scaled_dot_product, CANONICALIZE, ("cleanup",)),
    # scaled_dot_product: it makes the attentions whose results are concatenated
    Pass("sliced_attention", sliced_attention.sliced_attention, CANONICALIZE, ("scaled_dot_product",)),
    # sliced_attention: it matches slices of operands whose heads are not split yet
    Pass("attention_heads", attention_heads.attention_heads, CANONICALIZE, ("sliced_attention",)),
    # attention_heads: it moves lossless casts of the operands back to the attention
    # rotary: its last cast would be moved
    Pass("attention_casts", attention_casts.attention_casts, CANONICALIZE, ("attention_heads", "rotary")),
    # cse: linears are packed if they read one node, not equal ones
    Pass("packed_linear", packed_linear.packed_linear, LAYOUT, ("cse",)),
    Pass("channels_last", channels_last.channels_last, LAYOUT),
    # channels_last: the permutes around its linears meet those that make tokens of an image and back
    Pass("cleanup", cleanup.cleanup, LAYOUT, ("channels_last",)),
    Pass("narrow_conv", narrow_conv.narrow_conv, FUSION),
    # packed_linear: biases are added to one packed projection of the timestep, not to each
    Pass("group_norm", group_norm.group_norm, FUSION, ("packed_linear",)),
    Pass("rms_norm", rms_norm.rms_norm, FUSION),
    # rms_norm: the kernel that is replaced
    Pass("norm_rotary", norm_rotary.norm_rotary, FUSION, ("rms_norm",)),
    # norm_rotary: the kernels that are replaced
    Pass("joint_heads", joint_heads.joint_heads, FUSION, ("norm_rotary",)),
    # rms_norm: the norm before the gate
    Pass("gated_residual", gated_residual.gated_residual, FUSION, ("rms_norm",)),
    # gated_residual: modulated_norm would take the norm and the gate, without the addition
    Pass("modulated_norm", modulated_norm.modulated_norm, FUSION, ("gated_residual",)),
    # modulated_norm: the kernel that is replaced
    Pass("gated_norm", gated_residual.gated_norm, FUSION, ("modulated_norm",)),
    # gated_residual: add_layer_norm would take the additions, without the gates
    Pass("add_layer_norm", layer_norm.add_layer_norm, FUSION, ("gated_residual",)),
    # add_layer_norm, modulated_norm: layer_norm would take the norms alone
    Pass("layer_norm", layer_norm.layer_norm, FUSION, ("add_layer_norm", "modulated_norm")),
    Pass("geglu", geglu.geglu, FUSION),
    Pass("swiglu", swiglu.swiglu, FUSION),
    # geglu: the kernel that is replaced
    Pass("linear_geglu", linear_geglu.linear_geglu, FUSION, ("geglu",)),
    # add_layer_norm: the kernel that returns the sum, and that gets a bias
    Pass("linear_accumulate", linear_accumulate.linear_accumulate, FUSION, ("add_layer_norm",)),
    # layer_norm, geglu, swiglu: the kernels that are replaced, or whose results are quantised
    # linear_accumulate: it needs the linears as they are
    Pass("eight_bits", eight_bits.eight_bits, FUSION, ("layer_norm", "geglu", "swiglu", "linear_accumulate")),
    # layer_norm, geglu: the kernels that are replaced
    Pass("quantised_norm", quantised_linear.quantised_norm, FUSION, ("layer_norm",)),
    Pass("quantised_geglu", quantised_linear.quantised_geglu, FUSION, ("geglu",)),
    # eight_bits: it needs the linears as they are
    Pass("linear_gelu", linear_gelu.linear_gelu, FUSION, ("eight_bits",)),
    # eight_bits: it needs norms and the linears that read them as they are
    # cleanup: between a 1x1 convolution that has become a linear and the norm only one reshape is left
    Pass("linear_layer_norm", linear_layer_norm.linear_layer_norm, FUSION, ("eight_bits", "cleanup")),
    # narrow_conv: its kernels add the bias themselves
    # group_norm: it takes the biases of the convolutions that it reads, which bias_add would add on their own
    # linear_accumulate: it needs residual additions that bias_add would take
    Pass("bias_add", bias_add.bias_add, FUSION, ("narrow_conv", "group_norm", "linear_accumulate")),
    # bias_add: its sums are matched, as well as plain ones
    Pass("group_norm_inputs", group_norm_inputs.group_norm_inputs, FUSION, ("bias_add",)),
    # eight_bits: it measures the layers
    # group_norm_inputs: the kernels that are replaced, and whose sums a convolution's kernel adds up
    Pass("eight_bits_conv", eight_bits_conv.eight_bits_conv, FUSION, ("eight_bits", "group_norm_inputs")),
    # group_norm_inputs: it replaces a norm that does not write the im2col matrix
    Pass("im2col", im2col.im2col, LOWERING, ("group_norm_inputs",)),
    # bias_add: only convolutions whose bias it has taken are matched
    Pass("upsample_conv2d", upsample_conv2d.upsample_conv2d, LOWERING, ("bias_add",)),
    # im2col, upsample_conv2d: conv2d would take their convolutions
    Pass("conv2d", conv2d.conv2d, LOWERING, ("im2col", "upsample_conv2d")),
    # conv2d: its kernel computes the statistics of the norm
    Pass("conv_group_norm", conv_group_norm.conv_group_norm, LOWERING, ("conv2d",)),
    Pass("mma_products", mma_products.mma_products, LOWERING),
    # upsample_conv2d: upsample would take its upsampling
    Pass("upsample", upsample.upsample, LOWERING, ("upsample_conv2d",)),
    # the multiplication by 1 that hosts write between the product and its sine is gone since the first cleanup
    Pass("timestep_embedding", timestep_embedding.timestep_embedding, LOWERING),
    # attention_heads: afterwards heads are split by a transpose, however the host writes it
    # packed_linear: it packs the queries of self-attentions, which query_attention would take
    Pass("query_attention", query_attention.query_attention, LOWERING, ("attention_heads", "packed_linear")),
    # query_attention: attention would take its attentions
    Pass("attention", attention.attention, LOWERING, ("query_attention",)),
    Pass("complex_views", complex_views.complex_views, LOWERING),
    Pass("in_place", in_place.in_place, MEMORY),
    Pass("memory_order", memory_order.memory_order, MEMORY),
]


def run_passes(gm: fx.GraphModule, ctx: PassContext) -> dict[str, int]:
    """Rewrites the graph of `gm` in place. Returns the number of rewrites by the name of the pass.

    Inputs and outputs stay as they are. `gm` is not recompiled, which takes longer than all passes.
    """
    counts: dict[str, int] = {}
    if not supported(gm.graph):
        return counts
    rewrite.hoist_weights(gm.graph)
    for entry in PASSES:
        at(f"pass {entry.name}")
        counts[entry.name] = counts.get(entry.name, 0) + entry.function(gm, ctx)
    rewrite.eliminate_dead(gm.graph)
    return counts


def supported(graph: fx.Graph) -> bool:
    """Whether passes may rewrite a graph: no operation reads strides, no size is unknown, no autocast is enabled."""
    for node in graph.nodes:
        if rewrite.enters_autocast(node) and rewrite.argument(node, 2, "enabled") is not False:
            return False
        if node.op == "call_function" and node.target in rewrite.READS_STRIDES:
            return False
        if rewrite.value(node) is not None and rewrite.shape(node) is None:
            return False
    return True
