"""How far plans are from the original, next to what rounding to fewer bits moves the original by: what
`verify.MAX_NOISE` is chosen from.

    python -m benchmarks.rounding                                   # tiny models on a CPU
    python -m benchmarks.rounding --device cuda --json rounding.json

The ratio of both is 0.05 to 0.7 for correct plans. A plan above `MAX_NOISE` is rejected. `alone` is how long the
original takes in a call, `measured` how long the run takes in which values are rounded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import records
from sfast_ext import Config, accelerate, environment
from sfast_ext.call_signature import flatten_output
from sfast_ext.runtime import verify
from sfast_ext.runtime.verify import relative_errors, rounded_otherwise
from sfast_ext.tools.lib import exact, machine, models, vaes
from sfast_ext.tools.text import table

HALF = (torch.float16, torch.bfloat16)
CASES: dict[str, list[tuple[str, int, int, int]]] = {
    "cpu": [(f"tiny-{name}", 64, 64, 1) for name in ("sd15", "sd15-inpaint", "sd21", "sdxl", "sdxl-refiner")]
    + [("tiny-sdxl", 72, 40, 2), ("tiny-sd decoder", 64, 64, 1), ("tiny-sd encoder", 64, 64, 1)],
    "cuda": [
        ("sd15", 512, 512, 1), ("sd15", 904, 520, 1), ("sd15", 512, 512, 4), ("sd15-inpaint", 512, 768, 1),
        ("sd21", 768, 768, 1), ("sdxl", 1024, 1024, 1), ("sdxl", 832, 1216, 2), ("sd decoder", 512, 512, 1),
        ("sd decoder", 1024, 1024, 1), ("sd encoder", 1024, 1024, 1),
    ],
}  # fmt: skip
"""Model or part of a VAE, width, height, images."""
STEPS = (981, 601, 21)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="rounding", description=__doc__)
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--model", action="append", help="these models alone")
    parser.add_argument("--reference-kernels", action="store_true", help="plans call the kernels' references, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(given)


def rows(device: str, only: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each case, dtype, way to run a plan and timestep."""
    for name, width, height, images in CASES[device]:
        if only and name not in only:
            continue
        for dtype in (*HALF, torch.float32):
            # a checkpoint in half precision loaded in float32 is a matter of autocast
            for way in ("as it is", *(("autocast",) if dtype is torch.float32 else ())):
                try:
                    yield from _case(name, width, height, images, dtype, way, device)
                finally:
                    if device == "cuda":
                        torch.cuda.empty_cache()


def _case(
    name: str, width: int, height: int, images: int, dtype: torch.dtype, way: str, device: str
) -> Iterator[dict[str, Any]]:
    size = f"{width}x{height}x{images}"
    module, call = _module(name, width, height, images, dtype, device)
    with _surroundings(device, dtype, way), mock.patch.object(verify, "MAX_NOISE", math.inf):
        accelerator = accelerate(module, Config(allow_cpu=True, tolerance=1.0, drop_slower=False))
        for step in STEPS if "sd " not in name else (0,):
            args, kwargs = call(step)
            original = functools.partial(accelerator.run_original, *args, **kwargs)
            module(*args, **kwargs)
            ours = flatten_output(module(*args, **kwargs))[1]
            alone, theirs = _timed(original, device)
            measured, moved = _timed(functools.partial(rounded_otherwise, original), device)
            references = flatten_output(theirs)[1]
            assert moved is not None and accelerator.plans, accelerator.report.as_dict()["reasons"]
            errors, noise = relative_errors(ours, references), relative_errors(moved, references)
            error, moves = max(zip(errors, noise), key=lambda pair: pair[0] / max(pair[1], 1e-30))
            yield {
                "model": name, "size": size, "dtype": str(dtype).removeprefix("torch."), "way": way, "step": step,
                "error": error, "noise": moves, "ratio": error / moves if moves else 0.0,
                "alone_ms": alone, "measured_ms": measured,
            }  # fmt: skip
        accelerator.release()


def _module(
    name: str, width: int, height: int, images: int, dtype: torch.dtype, device: str
) -> tuple[nn.Module, Callable[[int], tuple[tuple, dict]]]:
    kind, _, part = name.partition(" ")
    if part:
        module = getattr(vaes.random_vae(kind, dtype=dtype, device=device), part)
        given = vaes.part_input(part, width, height, images, dtype=dtype, device=device)
        return module, lambda step: ((given,), {})
    unet = models.random_unet(name, dtype=dtype, device=device)
    return unet, lambda step: models.unet_inputs(unet, width, height, images, seed=step, timestep=step)


@contextlib.contextmanager
def _surroundings(device: str, dtype: torch.dtype, way: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # as WebUIs set it
        stack.enter_context(exact.tf32(True, True))
        if way == "autocast":
            stack.enter_context(torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16))
        yield


def _timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    result = run()
    wait()
    return 1000 * (time.perf_counter() - started), result


def main(given: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a correct plan would be rejected."""
    options = arguments(given)
    found = []
    kernels = mock.patch.object(environment, "triton_runs_on", lambda device: True)
    with kernels if options.reference_kernels else contextlib.nullcontext():
        for row in rows(options.device, options.model):
            found.append(row)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    head = ("model", "size", "dtype", "way", "step", "error", "noise", "ratio", "alone, ms", "measured, ms")
    cells = [
        (r["model"], r["size"], r["dtype"], r["way"], r["step"], f"{r['error']:.2e}", f"{r['noise']:.2e}",
         f"{r['ratio']:.2f}", f"{r['alone_ms']:.0f}", f"{r['measured_ms']:.0f}")
        for r in found
    ]  # fmt: skip
    print(table(head, cells))
    if options.json is not None:
        records.write(options.json, {**machine.describe(), "rows": found})
    floor = {str(dtype).removeprefix("torch."): value for dtype, value in verify.FLOORS.items()}
    beyond = [r for r in found if r["ratio"] > verify.MAX_NOISE and r["error"] > floor[r["dtype"]]]
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
