"""The time in which a plan is made, as users see it."""

from __future__ import annotations

import logging

import torch

from sfast_ext import host_gpu
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.preparation import Preparation, StageTimes
from sfast_ext.runtime.model_state import ModuleContext

_gpu_times, _cpu_times = StageTimes(nvrtc.folder), StageTimes()
"""Those on a CPU are of no use to a later process."""


def preparation(context: ModuleContext, label: str, device: torch.device) -> Preparation:
    """Within, a plan of a module is made, for calls that the label describes."""
    return Preparation(
        context.report,
        label,
        logging.DEBUG if context.is_part else logging.INFO,
        # another card takes another time
        kind=f"{type(context.module).__qualname__} {host_gpu.card(device)}".rstrip(),
        times=_gpu_times if device.type == "cuda" else _cpu_times,
        interrupted=context.hooks.interrupted,
    )
