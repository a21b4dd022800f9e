"""What 8-bit integers cost and give in a UNet: `python -m benchmarks.eight_bits --model sdxl`.

The same model of random weights runs without and with `Config.eight_bits`, in one process: the first call, whose layers
are selected in the second case; a replay; the memory; how far a result is from the original's; and a replay after all
weights of the transformer blocks were written in place, which has all of them quantised again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import records
from sfast_ext import Accelerator, Config, accelerate
from sfast_ext.call_signature import flatten_output
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import models
from sfast_ext.tools.lib.machine import describe

REPLAYS = 20
WAYS = {"exact": Config(), "8 bits": Config(eight_bits=True)}
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def milliseconds(run: Any, device: torch.device, times: int) -> float:
    """The median time of a call that is waited for."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        taken.append(1000 * (time.perf_counter() - began))
    return sorted(taken)[times // 2]


def way(unet: nn.Module, config: Config, size: int, images: int) -> dict[str, Any]:
    """What one setting takes and gives. The accelerator is released again."""
    device = next(unet.parameters()).device
    args, kwargs = models.unet_inputs(unet, size, size, images)
    with torch.no_grad():
        wanted = flatten_output(unet(*args, **kwargs))[1]
        torch.cuda.synchronize(device)
        free = torch.cuda.mem_get_info(device)[0]
        accelerator = accelerate(unet, config)
        try:
            began = time.perf_counter()
            unet(*args, **kwargs)
            torch.cuda.synchronize(device)
            first = time.perf_counter() - began
            replay = milliseconds(lambda: unet(*args, **kwargs), device, REPLAYS)
            error = relative_error(flatten_output(unet(*args, **kwargs))[1], wanted)
            return {
                "first_call_s": round(first, 2),
                "replay_ms": round(replay, 2),
                "after_a_change_ms": round(_after_a_change(unet, lambda: unet(*args, **kwargs), device), 2),
                "error": error,
                "memory_mb": (free - torch.cuda.mem_get_info(device)[0]) >> 20,
                **_told(accelerator),
            }
        finally:
            accelerator.release()


def _after_a_change(unet: nn.Module, run: Any, device: torch.device) -> float:
    taken = []
    for factor in (1.25, 0.8, 1.25, 0.8):
        for name, parameter in unet.named_parameters():
            if "transformer_blocks" in name and parameter.dim() == 2:
                parameter.mul_(factor)
        taken.append(milliseconds(run, device, 1))
    return sorted(taken)[len(taken) // 2]


def _told(accelerator: Accelerator) -> dict[str, Any]:
    status = accelerator.status()
    return {"eight_bits": status["eight_bits"], "plans": [plan["state"] for plan in status["plans"]]}


def main(given: Sequence[str] | None = None) -> int:
    """Print what both ways take."""
    parser = argparse.ArgumentParser(prog="benchmarks.eight_bits", description=__doc__)
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--size", type=int, default=1024, help="of the image, in pixels")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="float16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    device = torch.device("cuda", torch.cuda.current_device())
    unet = models.random_unet(options.model, dtype=_DTYPES[options.dtype], device=device)
    found: dict[str, Any] = {**describe(), "model": options.model, "size": options.size, "images": options.images}
    # the second time everything is compiled
    for name in ("exact", "8 bits", "exact", "8 bits"):
        found[name] = way(unet, WAYS[name], options.size, options.images)
    if options.json is not None:
        records.write(options.json, found)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
