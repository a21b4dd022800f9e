"""`python -m sfast_ext tune`: measures, for a model and sizes, what a first call has no time to, and keeps it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch

from sfast_ext import environment
from sfast_ext.kernels.backend import choices
from sfast_ext.tools import bench, measured
from sfast_ext.tools.lib import engines, machine, transformers

INTERRUPTED = 130
"""The exit status after Ctrl-C."""


@dataclass
class Options:
    """The arguments of the command."""

    model: str
    sizes: list[tuple[int, int]]
    batches: list[int]
    tokens: int


def tune(options: Options, device: torch.device) -> int:
    """Measure; returns how many shapes were new."""
    cases = [(size, images) for size in options.sizes for images in options.batches]
    half = torch.bfloat16 if transformers.is_transformer(options.model) else torch.float16
    unet = bench.make_unet(options.model, dtype=half, device=device)
    with choices.measuring(None, thorough=True) as budget, torch.no_grad():
        for done, ((width, height), images) in enumerate(cases, start=1):
            print(f"{done} of {len(cases)}: {width}x{height}, {images} at once …", file=sys.stderr, flush=True)
            before, began = budget.measured, time.perf_counter()
            args, kwargs = transformers.inputs_of(unet, width, height, images, tokens=options.tokens)
            engine = engines.StableFast(unet)
            try:
                engine.start(args, kwargs)
            finally:
                engine.stop()
            taken = time.perf_counter() - began
            print(f"  {budget.measured - before} shapes measured, {taken:.1f} s", file=sys.stderr, flush=True)
        return budget.measured


def main(options: Options) -> int:
    """Measure and print what is known; 1 without an NVIDIA GPU, 130 after Ctrl-C. What was measured is kept."""
    reason = environment.no_gpu()
    if reason is not None:
        print(f"Nothing can be measured: {reason}.", file=sys.stderr)
        return 1
    device = machine.device()
    status = 0
    try:
        tune(options, device)
    except KeyboardInterrupt:
        print("Interrupted; what was measured is kept.", file=sys.stderr)
        status = INTERRUPTED
    print("\n".join(measured.report(choices.memory_of(device).choices())))
    return status
