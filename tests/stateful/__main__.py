"""A soak: `python -m stateful --events 20000 --seed 0`. A run that fails is played again by its seed."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter

import torch

from stateful.machine import run

EACH = 100
"""Events of one model; every tenth model is a real UNet."""


def main() -> None:
    """Play events and say what came of it."""
    parser = argparse.ArgumentParser(prog="stateful", description=__doc__)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the next has the next")
    parser.add_argument("--model", choices=("both", "small", "unet"), default="both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("sfast_ext").setLevel(logging.CRITICAL)
    print(f"torch {torch.__version__}, {options.events} events from seed {options.seed}", flush=True)
    counts: Counter[str] = Counter()
    started, seed = time.perf_counter(), options.seed
    while counts["events"] < options.events:
        kind = options.model if options.model != "both" else ("unet" if seed % 10 == 9 else "small")
        each = min(EACH, options.events - counts["events"])
        w = run(kind, seed, each)
        counts.update(events=each, calls=w.calls, plan_runs=w.plan_runs)
        seed += 1
    seconds = time.perf_counter() - started
    said = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items())
    print(f"{said}, no difference; {seconds:.0f} s, {counts['events'] / seconds:.0f} events a second; "
          f"next seed {seed}")  # fmt: skip


if __name__ == "__main__":
    main()
