"""A linear layer and GELU by tanh in one GEMM: cuBLASLt computes GELU where the sums are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import Declined, kernel
from sfast_ext.kernels.backend.triton_runtime import HALF


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (..., K), weight (N, K), bias (N,) -> gelu(x @ weight.T + bias), by tanh.

    Computes in float32 (float64 if x is) and rounds once, to x's dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(compute), weight.to(compute), bias.to(compute))
    return F.gelu(y, approximate="tanh").to(x.dtype)


def fallback(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`reference` by two operations of PyTorch, in x's dtype."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@kernel(reference, needs_triton=False, fallback=fallback)
def launch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`reference` by cuBLASLt, on CUDA in float16 or bfloat16, one dtype for all operands."""
    if not x.is_cuda or x.dtype not in HALF or not x.dtype == weight.dtype == bias.dtype:
        raise Declined("no half precision, or several dtypes")
    if weight.dim() != 2 or bias.shape != weight.shape[:1] or not x.numel() or not bias.is_contiguous():
        raise Declined("a bias of another shape, or nothing to multiply")
    # on a CPU this operator's GELU is another
    y = torch.ops.aten._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]
