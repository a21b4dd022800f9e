"""What the status page is told of one accelerated module."""

from __future__ import annotations

from typing import Any

from sfast_ext.kernels.backend import health, registry
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.plans.plan import Plan
from sfast_ext.runtime.model_state import ModuleContext


def status(name: str, context: ModuleContext, plans: list[Plan], calls_per_s: float | None) -> dict[str, Any]:
    """The state of one accelerator.

    Args:
        name: that of the module in the report.
        plans: those of the accelerator, least recently used first.
        calls_per_s: see `Pace`.
    """
    device, model = context.device(), context.model
    latest = max((plan.generation_of_use for plan in plans), default=0)
    return {
        "name": name,
        "module": type(context.module).__qualname__,
        "device": str(device),
        "installed": context.slot.installed(),
        "plans": [{**p.status(), "last_pass": latest > 0 and p.generation_of_use == latest} for p in plans],
        "calls_per_s": calls_per_s,
        "parts": [_of_part(part) for part in context.parts],
        "weights": context.arena.status(),
        "eight_bits": model.eight_bits.status(
            [list(each.plans.values()) for each in model.accelerators()], context.arena.banks
        ),
        "graph_pool": pool_of(device).status() if device is not None and device.type == "cuda" else None,
        "kernels_disabled": health.disabled(device) if device is not None else {},
        "kernels_declined": registry.declined(),
    }


def _of_part(part: Any) -> dict[str, Any]:
    plans = list(part.plans.values())
    replays = sum(plan.replays for plan in plans)
    return {"name": part.name, "calls": part.calls, "plans": len(plans), "replays": replays}
