"""The kernel of CUTLASS: any dtype, tensors for a bias."""

import torch

from .attn_bias import BlockDiagonalMask, LowerTriangularMask, LowerTriangularMaskWithTensorBias
from .common import AttentionFwOpBase, attend

_library = torch.library.Library("xformers", "DEF")
_library.define(
    "efficient_attention_forward_cutlass(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, float dropout_p, bool compute_logsumexp, "
    "int custom_mask_type, float? scale, Tensor? seqlen_k, int? window_size) -> (Tensor, Tensor, int, int)"
)


def _forward(query, key, value, attn_bias, start_q, start_k, longest, p, lse, mask_type, scale, seqlen_k, window):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_bias is not None and attn_bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    return (*attend(query, key, value, attn_bias, scale, mask_type == 1), 0, 0)


for _key in ("CUDA", "CPU"):
    _library.impl("efficient_attention_forward_cutlass", _forward, _key)


class FwOp(AttentionFwOpBase):
    OPERATOR = torch.ops.xformers.efficient_attention_forward_cutlass
    SUPPORTED_DTYPES = {torch.float, torch.half, torch.bfloat16}
    SUPPORTED_MAX_K = 65536
    SUPPORTED_ATTN_BIAS_TYPES = {
        type(None), torch.Tensor, LowerTriangularMask, LowerTriangularMaskWithTensorBias, BlockDiagonalMask,
    }  # fmt: skip
    NAME = "cutlassF"

    @classmethod
    def apply(cls, inp, needs_gradient):
        bias = inp.attn_bias if isinstance(inp.attn_bias, torch.Tensor) else getattr(inp.attn_bias, "_bias", None)
        if isinstance(inp.attn_bias, BlockDiagonalMask):
            rows = inp.query.shape[1]
            bias = inp.attn_bias.materialize((1, 1, rows, rows), inp.query.dtype, inp.query.device)
        out, lse, _, _ = cls.OPERATOR(
            query=inp.query,
            key=inp.key,
            value=inp.value,
            attn_bias=bias,
            seqstart_q=None,
            seqstart_k=None,
            max_seqlen_q=-1,
            dropout_p=inp.p,
            compute_logsumexp=needs_gradient,
            custom_mask_type=int(isinstance(inp.attn_bias, LowerTriangularMask)),
            scale=inp.scale,
            seqlen_k=None,
            window_size=None,
        )
        return out, lse
