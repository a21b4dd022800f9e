"""The proof that a plan may be used: right on the user's own inputs, and faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sfast_ext.call_signature import Call, flatten_output
from sfast_ext.config import Config
from sfast_ext.report import at
from sfast_ext.runtime.plan import Plan
from sfast_ext.timing import timer

# measurements of which the median counts
TIMED_RUNS = 3
# a replay may measure this much slower than the original before it counts as slower
TIMING_NOISE = 1.03
# where the original takes this many times as long, one call of each has told enough
CLEARLY_FASTER = 1.5


def verify_plan(
    plan: Plan,
    run: Callable[[], list[torch.Tensor]],
    original: Callable[[], Any],
    call: Call,
    result: Any,
    original_s: float,
    config: Config,
) -> str | None:
    """Check and time a new plan.

    Args:
        run: runs the plan as it will be run, by its CUDA graph where it may have one.
        original: runs the original forward on the same inputs.
        result: what the original forward returned for them.
        original_s: seconds that took.

    Returns:
        The reason to drop the plan, or None.
    """
    references = flatten_output(result)[1]
    # of a result that is nowhere finite nothing can be said: the plan is not relied upon until it was compared
    checked = config.check != "never" and comparable(references)
    at("first run")
    outputs = run()
    if checked:
        at("check")
        plan.error = relative_error(outputs, references)
        if not plan.error <= config.tolerance:
            return too_inaccurate(plan.error, config)
    at("timing")
    if plan.device.type != "cuda":
        # run once: a clock of coarse steps may not have moved
        plan.ms_before, plan.ms_after = 1000 * original_s or None, milliseconds(run, plan.device, 1)
        return None
    # calls of their own: the first ones paid for their warm-up
    plan.ms_after, plan.ms_before = milliseconds(run, plan.device, 1), milliseconds(original, plan.device, 1)
    if plan.ms_before < CLEARLY_FASTER * plan.ms_after:
        plan.ms_after, plan.ms_before = milliseconds(run, plan.device), milliseconds(original, plan.device)
    if config.drop_slower and plan.ms_after > TIMING_NOISE * plan.ms_before:
        return f"its plan is slower than the original ({plan.ms_after:.1f} ms against {plan.ms_before:.1f} ms)"
    return None


def too_inaccurate(error: float, config: Config) -> str:
    """Why a plan of this error is not used."""
    return f"its plan differs from the original by {error:.2g}, more than the tolerance of {config.tolerance:g}"


def relative_error(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest relative L2 error of a list of tensors, in fp32; infinite where a value is NaN or Inf and the
    reference's is not, or where shapes differ. Values that the reference itself has not finite do not count."""
    worst = 0.0
    if len(outputs) != len(references):
        return math.inf
    for output, reference in zip(outputs, references):
        if output.shape != reference.shape or output.dtype != reference.dtype:
            return math.inf
        if not reference.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(output, reference) else math.inf)
            continue
        ours, theirs = output.float(), reference.float()
        finite = torch.isfinite(theirs)
        if not bool(torch.isfinite(ours[finite]).all()):
            return math.inf
        zero = torch.zeros((), device=theirs.device)
        theirs = torch.where(finite, theirs, zero)
        distance, norm = _norm(torch.where(finite, ours, zero) - theirs), _norm(theirs)
        worst = max(worst, distance / norm if norm > 0 else distance)
    return worst


def _norm(values: torch.Tensor) -> float:
    # squares of float32 overflow from 2e19 on, and where both norms are infinite there is no error to be told
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def comparable(references: Sequence[torch.Tensor]) -> bool:
    """Whether there is a value that another result can be compared with: a model may give NaN and nothing else."""
    return any(not r.is_floating_point() or bool(torch.isfinite(r).any()) for r in references)


def milliseconds(run: Callable[[], Any], device: torch.device, times: int = TIMED_RUNS) -> float:
    """The median of so many times of a call: on a GPU by events, which waits for it; on a CPU by `timing.timer`."""
    if device.type != "cuda":
        return sorted(timer.milliseconds(run) for _ in range(times))[times // 2]
    taken = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return sorted(taken)[len(taken) // 2]
