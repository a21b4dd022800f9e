from __future__ import annotations

from typing import Any

import numpy
import torch

calls: list[str] = []


def _kernel(q, k, v, scale, causal):
    """(B, H, L, D), with queries and keys in steps of a hundredth."""
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    q, k = (numpy.round(100 * x) / 100 for x in (q, k))
    scores = numpy.einsum("bhld,bhsd->bhls", q, k) * scale
    if causal:
        scores = scores + numpy.triu(numpy.full(scores.shape[-2:], -numpy.inf, numpy.float32), 1)
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return torch.from_numpy(numpy.einsum("bhls,bhsd->bhld", weights, v).astype(numpy.float32))


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    calls.append("sageattn")
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "Last dim of qkv must be contiguous."
    if smooth_k:
        k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = _kernel(q, k, v, scale, is_causal)
    return (out.transpose(1, 2) if tensor_layout == "NHD" else out).contiguous()


@torch.compiler.disable
def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    calls.append("sageattn_qk_int8_pv_fp16_cuda")
    assert not return_lse
    if smooth_k:
        k = k - k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k=False)


def sageattn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=False):
    raise NotImplementedError
