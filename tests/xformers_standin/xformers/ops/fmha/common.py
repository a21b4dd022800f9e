from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .attn_bias import LowerTriangularMask, LowerTriangularMaskWithTensorBias


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None

    @property
    def scale_float(self):
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def validate_inputs(self):
        qkv = (self.query, self.key, self.value)
        if self.query.ndim not in (3, 4) or any(x.ndim != self.query.ndim for x in qkv):
            raise ValueError("Query/Key/Value should all have BMHK or BMK shape")
        if any(x.device != self.query.device for x in qkv) or any(x.dtype != self.query.dtype for x in qkv):
            raise ValueError("Query/Key/Value should all be on the same device and of the same dtype")
        plain = self.attn_bias is None or type(self.attn_bias) in (LowerTriangularMask, torch.Tensor)
        if self.query.ndim == 3 and not plain:
            raise ValueError("Please provide inputs in BMHK format")
        bias = self.attn_bias._bias if type(self.attn_bias) is LowerTriangularMaskWithTensorBias else self.attn_bias
        if self.query.ndim == 4 and isinstance(bias, torch.Tensor):
            expected = (self.query.shape[0], self.query.shape[2], self.query.shape[1], self.key.shape[1])
            if bias.shape != expected:
                raise ValueError(f"Invalid shape for attention bias: {bias.shape} (expected {expected})")
        inner = self.query.shape[2:]
        if self.key.shape[2:] != inner or self.key.shape[:2] != self.value.shape[:2]:
            raise ValueError("Incompatible shapes for attention inputs")

    def normalize_bmhk(self):
        """Three dimensions are one head, and so are they written back: callers keep the shape of the result."""
        shape = self.query.shape[:-1] + (self.value.shape[-1],)
        if self.query.ndim == 3:
            self.query, self.key, self.value = (x.unsqueeze(2) for x in (self.query, self.key, self.value))
            if isinstance(self.attn_bias, torch.Tensor):
                self.attn_bias = self.attn_bias.unsqueeze(1)
        return shape


class AttentionFwOpBase:
    OPERATOR: Any
    SUPPORTED_DEVICES = {"cuda", "cpu"}
    SUPPORTED_DTYPES: set[torch.dtype]
    SUPPORTED_MAX_K: int
    SUPPORTED_ATTN_BIAS_TYPES: set[Any]
    NAME: str

    @classmethod
    def supports(cls, inp):
        return not cls.not_supported_reasons(inp)

    @classmethod
    def not_supported_reasons(cls, inp):
        reasons = []
        if inp.query.device.type not in cls.SUPPORTED_DEVICES:
            reasons.append(f"device={inp.query.device.type}")
        if inp.query.dtype not in cls.SUPPORTED_DTYPES:
            reasons.append(f"dtype={inp.query.dtype}")
        if max(inp.query.shape[-1], inp.value.shape[-1]) > cls.SUPPORTED_MAX_K:
            reasons.append(f"more than {cls.SUPPORTED_MAX_K} channels")
        if type(inp.attn_bias) not in cls.SUPPORTED_ATTN_BIAS_TYPES:
            reasons.append(f"attn_bias type is {type(inp.attn_bias)}")
        return reasons


def attend(q, k, v, bias, scale, causal):
    """(B, M, H, K) in float32, as a kernel that no autocast reaches; contiguous, in the dtype of the queries."""
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bmhk,bnhk->bhmn", q.float(), k.float()) * scale
        if bias is not None:
            scores = scores + bias.float()
        if causal:
            scores = scores + torch.full(scores.shape[-2:], float("-inf"), device=q.device).triu(1)
        out = torch.einsum("bhmn,bnhk->bmhk", scores.softmax(-1), v.float()).to(q.dtype).contiguous()
        return out, scores.logsumexp(-1)
