from __future__ import annotations

import torch

from . import cutlass, flash
from .attn_bias import AttentionBias, BlockDiagonalMask, LowerTriangularMask  # noqa: F401
from .common import AttentionFwOpBase, Inputs

MemoryEfficientAttentionCutlassOp = (cutlass.FwOp, None)
MemoryEfficientAttentionFlashAttentionOp = (flash.FwOp, None)
ALL_FW_OPS = [cutlass.FwOp, flash.FwOp]


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op=None,
) -> torch.Tensor:
    inp = Inputs(query=query, key=key, value=value, p=p, attn_bias=attn_bias, scale=scale)
    return _memory_efficient_attention(inp, op=op)


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionFwOpBase] | None = None,
) -> torch.Tensor:
    inp = Inputs(query=query, key=key, value=value, p=p, attn_bias=attn_bias, scale=scale)
    return _memory_efficient_attention_forward(inp, op=op)


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionFwOpBase] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if p != 0.0:
        raise NotImplementedError("dropout is not supported on the non-autograd API.")
    inp = Inputs(query=query, key=key, value=value, p=p, attn_bias=attn_bias, scale=scale)
    return _memory_efficient_attention_forward_requires_grad(inp, op=op)


def _memory_efficient_attention(inp, op=None):
    return _memory_efficient_attention_forward(inp, op=op[0] if op is not None else None)


def _memory_efficient_attention_forward(inp, op):
    inp.validate_inputs()
    output_shape = inp.normalize_bmhk()
    out, *_ = _chosen(inp, op).apply(inp, needs_gradient=False)
    return out.reshape(output_shape)


def _memory_efficient_attention_forward_requires_grad(inp, op):
    inp.validate_inputs()
    output_shape = inp.normalize_bmhk()
    out, lse = _chosen(inp, op).apply(inp, needs_gradient=True)
    return out.reshape(output_shape), lse


def _chosen(inp, op):
    if op is not None:
        reasons = op.not_supported_reasons(inp)
        if reasons:
            raise ValueError(f"Operator `{op.NAME}` does not support inputs: {reasons}")
        return op
    for candidate in (flash.FwOp, cutlass.FwOp):
        if candidate.supports(inp):
            return candidate
    raise NotImplementedError("No operator found for `memory_efficient_attention_forward`")
