"""Times `mma_attention` beside the attentions of PyTorch."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.ampere.turns import Call, in_turns
from sfast_ext.kernels.attention import attention, mma_attention
from sfast_ext.runtime.verify import relative_error

WHAT = "attention"
"""What the rows say they are."""
BEGIN, END = "<!-- ampere attention: begin -->", "<!-- ampere attention: end -->"
SHAPES = ((8, 4096, 4096, 40), (8, 1024, 1024, 80), (8, 256, 256, 160), (8, 4096, 77, 40),
          (10, 4096, 4096, 64), (20, 1024, 1024, 64), (20, 1024, 77, 64))  # fmt: skip
"""Heads, rows, keys and head dimension of SD 1.5 (512x512) and SDXL (1024x1024), two images."""
OURS = "mma_attention"
BACKENDS = {
    "FlashAttention-2": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "cuDNN": "CUDNN_ATTENTION",
}
"""By the names of `torch.nn.attention.SDPBackend`, which torch has from 2.3 on."""


def _heads(heads: int, tokens: int, size: int) -> Tensor:
    """(2, heads, tokens, size) of a layer's (2, tokens, heads · size), as models have it."""
    return torch.randn(2, tokens, heads, size, device="cuda").half().transpose(1, 2)


def _by(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def row(heads: int, rows: int, keys: int, size: int) -> dict[str, Any]:
    """The row of a shape: microseconds and relative error against float32 of each that takes it."""
    q, k, v = _heads(heads, rows, size), _heads(heads, keys, size), _heads(heads, keys, size)
    if mma_attention.accepts(q, k, v, None) is not None:
        raise RuntimeError(f"mma_attention does not take heads of {size}")
    calls: dict[str, Call] = {OURS: functools.partial(mma_attention.launch, q, k, v, None)}
    calls |= {name: functools.partial(_by, backend, q, k, v) for name, backend in BACKENDS.items()}
    wanted, errors = attention.reference(q.float(), k.float(), v.float()), {}
    for name, call in calls.items():
        # a backend may not take a shape, or not be part of this torch
        with contextlib.suppress(RuntimeError) if name != OURS else contextlib.nullcontext():
            errors[name] = relative_error([call().float()], [wanted])
    times = in_turns({name: calls[name] for name in errors})
    return {"what": WHAT, "shape": f"{heads}×{rows}×{keys}×{size}", "us": times, "errors": errors}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        f"| Heads × rows × keys × head dimension | `{OURS}`, µs | "
        + " | ".join(f"{name}, µs" for name in BACKENDS)
        + f" | `{OURS}` / FlashAttention-2 |",
        "|---" * (3 + len(BACKENDS)) + "|",
    ]
    for each in rows:
        times = each["us"]
        theirs = " | ".join(f"{times[name]:.1f}" if name in times else "none" for name in BACKENDS)
        flash = times.get("FlashAttention-2")
        ratio = f"{times[OURS] / flash:.2f}" if flash else ""
        lines.append(f"| {each['shape']} | {times[OURS]:.1f} | {theirs} | {ratio} |")
    return lines
