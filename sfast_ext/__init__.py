"""Stable Fast: captures the real forward of a diffusion model's network, rewrites it and replays it as a CUDA graph.

accelerator = sfast_ext.accelerate(pipe.unet)
image = pipe(prompt).images[0]
accelerator.release()
"""

from __future__ import annotations

from sfast_ext.accelerator import Accelerator, accelerate, accelerator_of
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.report import Report

__version__ = "0.1.0"
__all__ = ["Accelerator", "Config", "Hooks", "Report", "accelerate", "accelerator_of"]
