"""Milliseconds in which a UNet's weights come to the GPU and leave it: by the WebUI's own `to`, and by ours.

    python -m benchmarks.moves --model sdxl --threads 2 --threads 6

Weights are random, in half precision and in pageable memory. For each number of torch's threads: each weight by the
driver (`copy_`) and through pinned buffers (sfast_ext/weights/staging.py); the module there and back by `to` alone, and
with copies that are kept (sfast_ext/weights/host_copies.py). The best of `--times`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import records
from sfast_ext.tools import bench
from sfast_ext.tools.lib import machine
from sfast_ext.weights.host_copies import HostCopies, move_to_gpu, sources_of
from sfast_ext.weights.staging import Staging

DEVICE = torch.device("cuda", 0)


def best_ms(action: Callable[[], object], times: int, before: Callable[[], object] = lambda: None) -> float:
    """The least time of `times` runs, after one that is not timed; `before` each runs untimed."""
    found = []
    for _ in range(times + 1):
        before()
        torch.cuda.synchronize(DEVICE)
        began = time.perf_counter()
        action()
        torch.cuda.synchronize(DEVICE)
        found.append(1e3 * (time.perf_counter() - began))
    return round(min(found[1:]), 1)


def measure(module: nn.Module, threads: int, times: int) -> dict[str, Any]:
    """One row. The module is in system memory, then and now."""
    torch.set_num_threads(threads)
    row: dict[str, Any] = {"threads": threads, **_copies(module, times)}
    there, back = (lambda: module.to(DEVICE)), (lambda: module.to("cpu"))
    row |= {"to_gpu_ms": best_ms(there, times, back), "to_cpu_ms": best_ms(back, times, there)}
    copies = HostCopies()

    def arrive() -> None:
        held = sources_of(module.parameters())
        move_to_gpu(module.parameters(), DEVICE)
        copies.keep(module, held)

    def leave() -> None:
        copies.put_back(module)
        module.to("cpu")

    return {**row, "arrive_ms": best_ms(arrive, times, leave), "leave_ms": best_ms(leave, times, arrive)}


def _copies(module: nn.Module, times: int) -> dict[str, float]:
    sources = [parameter.data for parameter in module.parameters()]
    there = [torch.empty_like(source, device=DEVICE) for source in sources]

    def staged() -> None:
        with Staging() as copy:
            for to, source in zip(there, sources):
                copy(to, source)

    driver = best_ms(lambda: [to.copy_(source) for to, source in zip(there, sources)], times)
    gb = sum(source.nbytes for source in sources) / 1e9
    return {"gb": round(gb, 3), "copy_ms": driver, "staged_ms": best_ms(staged, times)}


def main() -> int:
    """Print a line for each row, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", help="of the demo's models (%(default)s)")
    parser.add_argument("--threads", type=int, action="append", help="of torch (as many as it takes)")
    parser.add_argument("--times", type=int, default=5, help="each is measured (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.moves needs a GPU", file=sys.stderr)
        return 1
    unet = bench.make_unet(options.model, dtype=torch.float16, device=torch.device("cpu"))
    rows = []
    for threads in options.threads or [torch.get_num_threads()]:
        rows.append({"model": options.model, **measure(unet, threads, options.times)})
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        records.write(options.json, {**machine.describe(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
