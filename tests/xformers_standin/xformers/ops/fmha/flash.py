"""FlashAttention: half precision, no bias but a causal one."""

import torch

from .attn_bias import LowerTriangularMask
from .common import AttentionFwOpBase, attend

_library = torch.library.Library("xformers_flash", "DEF")
_library.define(
    "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "int max_seqlen_q, int max_seqlen_k, float p, float softmax_scale, bool is_causal, int window_left, "
    "int window_right, bool return_softmax) -> (Tensor, Tensor, Tensor)"
)


def _flash_fwd(q, k, v, cu_q, cu_k, used, max_q, max_k, p, scale, causal, left, right, return_softmax):
    out, lse = attend(q, k, v, None, scale, causal)
    return out, lse, torch.zeros(2, dtype=torch.int64, device=q.device)


for _key in ("CUDA", "CPU"):
    _library.impl("flash_fwd", _flash_fwd, _key)


class FwOp(AttentionFwOpBase):
    OPERATOR = torch.ops.xformers_flash.flash_fwd
    SUPPORTED_DTYPES = {torch.half, torch.bfloat16}
    SUPPORTED_MAX_K = 256
    SUPPORTED_ATTN_BIAS_TYPES = {type(None), LowerTriangularMask}
    NAME = "flshattF"

    @classmethod
    def apply(cls, inp, needs_gradient):
        q, k, v = inp.query, inp.key, inp.value
        causal = isinstance(inp.attn_bias, LowerTriangularMask)
        lengths = (None, None, None, q.shape[1], k.shape[1])
        out, lse, _ = cls.OPERATOR(q, k, v, *lengths, inp.p, inp.scale_float, causal, -1, -1, return_softmax=False)
        return out, lse
