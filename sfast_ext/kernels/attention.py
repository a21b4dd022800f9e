"""Scaled dot product attention through the fastest of the backends torch ships."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NEEDS_TRITON = False


def _preference() -> tuple[Any, list[Any]] | None:
    """torch's sdpa_kernel and the backends, fastest first; None where this torch takes no priority."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if "set_priority" not in inspect.signature(sdpa_kernel).parameters:
            return None
        return sdpa_kernel, [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
    except (ImportError, AttributeError):
        return None


_PREFERENCE = _preference()
_refused: set[tuple[Any, ...]] = set()  # what a preferred backend took and then raised on


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """F.scaled_dot_product_attention: q (..., L, D), k (..., S, D), v (..., S, E) -> (..., L, E)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`reference`, trying cuDNN, flash, efficient and math in this order; any strides, no synchronisation.

    A backend may accept a shape and then fail to plan it: then, and from then on, torch's own choice runs it.
    """
    if _PREFERENCE is None or not q.is_cuda:
        return reference(q, k, v, mask, is_causal, scale)
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        is_causal,
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
    )
    if key in _refused:
        return reference(q, k, v, mask, is_causal, scale)
    sdpa_kernel, backends = _PREFERENCE
    try:
        with sdpa_kernel(backends, set_priority=True):
            return reference(q, k, v, mask, is_causal, scale)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        out = reference(q, k, v, mask, is_causal, scale)  # raises where torch cannot either
        _refused.add(key)
        return out
