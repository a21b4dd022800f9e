"""The proof that a plan may be used: right on the user's own inputs, and faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sfast_ext.call_signature import Call, flatten_output
from sfast_ext.config import Config
from sfast_ext.report import at
from sfast_ext.runtime.plan import Plan, comparable, milliseconds, relative_error

# a replay may measure this much slower than the original before it counts as slower
NOISE = 1.03
# where the original takes this many times as long, one call of each has told enough
CLEARLY = 1.5


def prove(
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
            return too_far(plan.error, config)
    at("timing")
    if plan.device.type != "cuda":
        # run once: a clock of coarse steps may not have moved
        plan.ms_before, plan.ms_after = 1000 * original_s or None, milliseconds(run, plan.device, 1)
        return None
    # calls of their own: the first ones paid for their warm-up
    plan.ms_after, plan.ms_before = milliseconds(run, plan.device, 1), milliseconds(original, plan.device, 1)
    if plan.ms_before < CLEARLY * plan.ms_after:
        plan.ms_after, plan.ms_before = milliseconds(run, plan.device), milliseconds(original, plan.device)
    if config.drop_slower and plan.ms_after > NOISE * plan.ms_before:
        return f"its plan is slower than the original ({plan.ms_after:.1f} ms against {plan.ms_before:.1f} ms)"
    return None


def too_far(error: float, config: Config) -> str:
    """Why a plan of this error is not used."""
    return f"its plan differs from the original by {error:.2g}, more than the tolerance of {config.tolerance:g}"
