"""Two processes at once, each with SD 1.5 on its card, as two WebUIs with `--device-id`; they share one cache folder.

    PYTHONPATH=. python -m benchmarks.two_cards [--cards 0 1] [--kept]

The cache is empty; with `--kept` two more processes find what the first two have compiled. As in AUTOMATIC1111 the
first card stays torch's current one in both. Prints for each what is said of its card, its times, and its error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def child(index: int, gate: Path, count: int) -> None:
    """One of the processes."""
    import torch

    from benchmarks.rest_of_image import inputs
    from sfast_ext import Config, accelerate, environment, host_gpu
    from sfast_ext.tools.lib import models

    device = torch.device("cuda", index)
    host_gpu.use(device)
    unet = models.random_unet("sd15", dtype=torch.float16, device=device)
    args, kwargs = inputs("sd15", unet, 64, device)
    total = environment.gpu_memory()

    @torch.inference_mode()
    def call() -> Any:
        return unet(*args, **kwargs)[0]

    expected = call()
    torch.cuda.synchronize(device)
    together(gate, f"{index}-begins", count)
    ours = accelerate(unet, Config())
    began = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    first = time.perf_counter() - began
    for _ in range(5):
        call()
    found = call()
    error = float((found - expected).norm() / expected.norm())
    together(gate, f"{index}-runs", count)
    times = []
    for _ in range(100):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - began))
    replays, current = ours.report.counter("replays"), torch.cuda.current_device()
    print(
        f"card {index} (current {current}), {environment.in_short()}: budget {environment.graph_budget_mb()} MB of"
        f" {(total or 0) >> 20}, first call {first:.2f} s, a step {statistics.median(times):.3f} ms, replays"
        f" {replays}, error {error:.1e}, reasons {ours.report.as_dict()['reasons']}",
        flush=True,
    )
    assert replays >= 100 and error < 0.02, "not accelerated, or wrong"
    ours.release()


def together(gate: Path, name: str, count: int) -> None:
    """Wait until as many processes are here."""
    (gate / name).touch()
    stage, until = name.split("-")[1], time.monotonic() + 60
    while len(list(gate.glob(f"*-{stage}"))) < count and time.monotonic() < until:
        time.sleep(0.002)


def run(cards: list[int], cache: Path) -> bool:
    """Start one process for each card; whether all ended well."""
    with tempfile.TemporaryDirectory() as gate:
        environment = {**os.environ, "SFAST_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        command = [sys.executable, "-m", "benchmarks.two_cards", "--gate", gate, "--of", str(len(cards)), "--child"]
        processes = [subprocess.Popen([*command, str(card)], env=environment) for card in cards]
        ended = [process.wait() for process in processes]
        return ended == [0] * len(cards)


def main() -> int:
    """Start the processes, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--kept", action="store_true", help="once more with what the first two have compiled")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.gate, args.of)
        return 0
    with tempfile.TemporaryDirectory() as cache:
        print("an empty cache, at once:", flush=True)
        good = run(args.cards, Path(cache))
        files = len(list(Path(cache).glob("*.cubin")))
        broken = [each.name for each in Path(cache).iterdir() if each.name.startswith(".") and each.name != ".turn"]
        print(f"kernels in CUDA C++ kept: {files}; half-written files: {broken}", flush=True)
        if args.kept:
            print("the same cache, at once:", flush=True)
            good = run(args.cards, Path(cache)) and good
            more = len(list(Path(cache).glob("*.cubin"))) - files
            print(f"kernels compiled again: {more}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
