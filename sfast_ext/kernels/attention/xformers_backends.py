"""xformers' attention kernels, as candidates in addition to PyTorch's.

They matter if PyTorch has few: before 2.2 backends have no priority, and on Windows there is no FlashAttention
since. There are none if the host has not imported xformers.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend.choices import Run
from sfast_ext.kernels.backend.triton_runtime import HALF


def candidates(operands: Operands) -> dict[str, Run]:
    """xformers' kernels that may accept q (B, H, L, D), k and v (B, H, S, D), by name; they check their operands only
    when run. Empty if the host has not imported xformers."""
    q, k, v, mask, is_causal, scale = operands
    fmha: Any = sys.modules.get("xformers.ops.fmha")
    if fmha is None or q.dim() != 4 or q.dtype not in HALF or q.shape[:2] != k.shape[:2]:
        return {}
    if mask is not None and (mask.dtype != q.dtype or is_causal):
        return {}
    attend = getattr(fmha, "memory_efficient_attention_forward", None)
    found: dict[str, Run] = {}
    for name in ("flash3", "flash", "cutlass"):
        op = getattr(getattr(fmha, name, None), "FwOp", None)
        if op is None or attend is None:
            continue

        def run(op: Any = op) -> Tensor:
            bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
            if is_causal:
                bias = fmha.attn_bias.LowerTriangularMask()
            given = (x.transpose(1, 2) for x in (q, k, v))
            return attend(*given, attn_bias=bias, scale=scale, op=op).transpose(1, 2)

        found[f"xformers {name}"] = run
    return found
