"""xformers' attention kernels beside PyTorch's: the fastest of those that accept a shape runs it.

They matter where PyTorch has few: before 2.2 backends have no priority, and on Windows there is no FlashAttention
since. Nothing is timed where the host has not imported xformers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("sfast_ext")

OWN = "torch"
# a candidate must take less than this fraction of PyTorch's time
MARGIN = 0.98
# relative L2 error against PyTorch's own, beyond rounding in bfloat16: versions of xformers that do not fit the GPU
# have given zeros and NaN
LIMIT = 2e-2

_HALF = (torch.float16, torch.bfloat16)
_ROUNDS, _RUNS = 3, 4
# clock cycles the GPU sleeps, about a millisecond: all runs of a round are queued by then
_HEAD_START = 2_000_000

Run = Callable[[], Tensor]


def candidates(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> dict[str, Run]:
    """xformers' kernels that may accept q (B, H, L, D), k and v (B, H, S, D), by name; they check their operands only
    when run. Empty where the host has not imported xformers."""
    fmha: Any = sys.modules.get("xformers.ops.fmha")
    if fmha is None or q.dim() != 4 or q.dtype not in _HALF or q.shape[:2] != k.shape[:2]:
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

        found[name] = run
    return found


class Choices:
    """Which of several functions runs a shape, by their times when it is first met.

    Args:
        clock: the milliseconds of a call.
        may_time: whether times can be taken now: not while a CUDA graph is captured.
    """

    def __init__(
        self,
        clock: Callable[[Run], float] | None = None,
        may_time: Callable[[], bool] | None = None,
    ) -> None:
        self._clock = clock or _milliseconds
        self._may_time = may_time or _outside_of_captures
        self._chosen: dict[Hashable, str] = {}

    def run(self, key: Hashable, own: Run, others: Mapping[str, Run]) -> Tensor:
        """The result of the one chosen for `key`; of `own` where none is chosen yet, and none can be."""
        name = self._chosen.get(key)
        if name is None:
            if not self._may_time():
                return own()
            name = self._chosen[key] = self._quickest(own, others)
        other = others.get(name)
        if other is None:
            return own()
        try:
            return other()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:
            logger.debug("xformers' %s raised and is put aside for %s", name, key, exc_info=True)
            self._chosen[key] = OWN
            return own()

    def _quickest(self, own: Run, others: Mapping[str, Run]) -> str:
        expected = own()
        best, least = OWN, MARGIN * self._clock(own)
        for name, other in others.items():
            try:
                if not _alike(other(), expected):
                    logger.debug("xformers' %s is put aside: its result is not PyTorch's", name)
                    continue
                taken = self._clock(other)
            except Exception as exc:
                logger.debug("xformers' %s is put aside: %s", name, exc)
                continue
            if taken < least:
                best, least = name, taken
        return best


def _alike(result: Tensor, expected: Tensor) -> bool:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    result, expected = result.float(), expected.float()
    return bool(torch.linalg.vector_norm(result - expected) <= LIMIT * torch.linalg.vector_norm(expected))


def _outside_of_captures() -> bool:
    return not torch.cuda.is_current_stream_capturing()


def _milliseconds(run: Run) -> float:
    """GPU milliseconds of a run without waiting for the CPU, as in a CUDA graph: the least of a few rounds."""
    least = float("inf")
    for _ in range(_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / _RUNS)
    return least
