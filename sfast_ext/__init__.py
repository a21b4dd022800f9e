"""Stable Fast: captures the real forward of a diffusion model's network, rewrites it and replays it as a CUDA graph.

accelerator = sfast_ext.accelerate(pipe.unet)
image = pipe(prompt).images[0]
accelerator.release()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfast_ext.accelerator import Accelerator, accelerate, accelerator_of
    from sfast_ext.config import Config
    from sfast_ext.hooks import Hooks
    from sfast_ext.report import Report

__version__ = "0.1.0"
__all__ = ["Accelerator", "Config", "Hooks", "Report", "accelerate", "accelerator_of"]
_HOMES = {
    "Accelerator": "accelerator",
    "Config": "config",
    "Hooks": "hooks",
    "Report": "report",
    "accelerate": "accelerator",
    "accelerator_of": "accelerator",
}


def __getattr__(name: str) -> Any:
    # imported when it is used: the command line answers without torch as well
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
