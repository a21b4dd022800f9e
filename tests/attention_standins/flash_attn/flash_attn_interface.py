from __future__ import annotations

import numpy
import torch

calls: list[str] = []


def _fwd(q, k, v, scale, causal):
    """What a compiled extension would do: it reads memory, and no mode of torch's sees how. (B, L, H, D)."""
    calls.append("fwd")
    q, k, v = (x.detach().to(torch.float32).numpy() for x in (q, k, v))
    scores = numpy.einsum("blhd,bshd->bhls", q, k) * scale
    if causal:
        scores = scores + numpy.triu(
            numpy.full(scores.shape[-2:], -numpy.inf, numpy.float32), 1 + scores.shape[-1] - scores.shape[-2]
        )
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    # a thousandth more than attention is, so that a test can tell whose result it is
    return torch.from_numpy((1.001 * numpy.einsum("bhls,bshd->blhd", weights, v)).astype(numpy.float32))


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, return_softmax):
        assert dropout_p == 0.0
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out = _fwd(q, k, v, scale, causal).to(q.dtype)
        return (out, torch.zeros(0), torch.zeros(0)) if return_softmax else out


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False
):
    return FlashAttnFunc.apply(q, k, v, dropout_p, softmax_scale, causal, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    return FlashAttnFunc.apply(*qkv.unbind(2), dropout_p, softmax_scale, causal, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    return FlashAttnFunc.apply(q, *kv.unbind(2), dropout_p, softmax_scale, causal, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0):
    raise NotImplementedError
