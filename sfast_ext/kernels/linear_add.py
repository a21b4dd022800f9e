"""A linear layer and the residual added to it, as one matrix product: the residual is what the sums start from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext import native

NEEDS_TRITON = False

_ALIGNMENT = 16  # bytes: below it cuBLASLt's quick products cannot read, and the bias must not be read at all


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """x (..., K), weight (N, K), bias (N), residual (..., N) -> x @ weight.T + bias + residual, (..., N).

    The oracle: computes in float32 (float64 where x is) from the operands as they are and rounds once, to x's
    dtype. `F.linear(x, weight, bias) + residual` rounds the product before the sum.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    product = F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    return (product + residual.to(compute)).to(x.dtype)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`reference` by the native operation; what it cannot take is PyTorch's product and sum."""
    if _takes(x, weight, bias, residual):
        try:
            return torch.ops.sfast_ext.linear_add(x, weight, bias, residual)
        except NotImplementedError:  # cuBLASLt has no algorithm for it; said before anything was launched
            pass
    return F.linear(x, weight, bias) + residual


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """Whether the native operation does it, and fast: half precision, and rows that begin at 16 bytes."""
    if x.device.type != "cuda" or not native.takes(x.dtype, x.device) or weight.dim() != 2:
        return False
    for tensor in (x, weight, bias, residual):
        if tensor is None:
            continue
        # subclasses (fake, quantised) mean more than their memory says
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype != x.dtype or tensor.device != x.device:
            return False
        if tensor.data_ptr() % _ALIGNMENT:
            return False
    if x.shape[-1] != weight.shape[1] or residual.shape != (*x.shape[:-1], weight.shape[0]):
        return False
    return all(_even(tensor) for tensor in (x, weight, residual))


def _even(tensor: Tensor) -> bool:
    """Every row begins at an alignment's multiple."""
    step = _ALIGNMENT // tensor.element_size()
    if tensor.shape[-1] % step:
        return False
    return all(stride % step == 0 for stride in tensor.stride()[:-1])
