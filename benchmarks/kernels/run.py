"""Times each kernel against the PyTorch operations it stands for, and against what torch.compile makes of them.

    python -m benchmarks.kernels --out benchmarks/results/kernels.json
    python -m benchmarks.kernels --sweep --no-compile --only group_norm,layer_norm

Each call runs many times inside one CUDA graph, so launches cost what they cost in a plan; inputs stay in the
L2 cache where they fit, as they do behind the operation that made them. Microseconds a call: median, 20th and
80th percentile over replays. A kernel that is wrong is not timed. --sweep tries other tile sizes. Group norms
appear as they run, then by each path that takes them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.kernels.cases import CASES, Case, cases
from sfast_ext.kernels.group_norm import group_norm, one_pass
from sfast_ext.kernels.pointwise import bias_add, geglu, layer_norm
from sfast_ext.tools.bench import CACHES
from sfast_ext.tools.lib import machine

# Other values of the tile constants, tried by --sweep: (module that has the constants, kernels, values).
PARTS = [(4096, 4), (8192, 4), (8192, 8), (16384, 8), (16384, 16)]  # elements, warps
SWEEP: list[tuple[Any, tuple[str, ...], list[dict[str, int]]]] = [
    (
        layer_norm,
        ("layer_norm", "add_layer_norm"),
        [{"_ROWS": r, "_PER_WARP": n} for r in (1, 2, 4, 8) for n in (256, 512, 1024, 2048)],
    ),
    (one_pass, ("group_norm.whole",), [{"_PER_THREAD": n, "_MAX_WARPS": w} for n in (16, 32) for w in (16, 32)]),
    (one_pass, ("group_norm.parts",), [{"_PART": n, "_PART_WARPS": w} for n, w in PARTS]),
    (
        group_norm,
        ("group_norm.loop",),
        [{"_PROGRAMS": p, "_BLOCK": b, "_TILE": t} for p in (2, 4, 8) for b in (128, 256) for t in (2048, 4096, 8192)],
    ),
    (geglu, ("geglu",), [{"_ROWS": r, "_BLOCK": b} for r in (2, 4, 8, 16) for b in (128, 256, 512)]),
    (bias_add, ("bias_add",), [{"_ROWS": r, "_BLOCK": b} for r in (8, 16, 32) for b in (64, 128, 256)]),
]


def error(case: Case) -> float:
    """Relative L2 error of the kernel against float64, the worst of its outputs; NaN stays NaN."""
    actual, target = case.ours(), case.target()
    pairs = zip(actual, target) if isinstance(actual, tuple) else [(actual, target)]
    return max(((a.double() - t.double()).norm() / t.double().norm()).item() for a, t in pairs)


def graph_of(call: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls in a row."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    return graph


def measure(call: Callable[[], Any], repeats: int = 20, replays: int = 50) -> dict[str, float]:
    """Microseconds a call, over replays of a graph that holds `repeats` of them."""
    graph = graph_of(call, repeats)
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats)
    p20, *_, p80 = statistics.quantiles(times, n=5)
    return {"median": round(statistics.median(times), 2), "p20": round(p20, 2), "p80": round(p80, 2)}


def compiled(case: Case) -> Callable[[], Any] | None:
    """The composition as torch.compile makes it, compiled already; None where another case has the same."""
    if case.composition is None:
        return None
    function, args, kwargs = case.composition
    # each shape is compiled for itself, as it is in a model
    torch._dynamo.reset()
    made = torch.compile(function, fullgraph=True, dynamic=False)
    made(*args, **kwargs)
    return lambda: made(*args, **kwargs)


def run(case: Case, tolerance: float, compile_too: bool) -> dict[str, Any]:
    """The row of a case."""
    begin = time.perf_counter()
    case.ours()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape}
    row["first_call_s"] = round(time.perf_counter() - begin, 3)
    row["error"] = error(case)
    row["ok"] = row["error"] <= tolerance
    if row["ok"]:
        row["ours_us"], row["torch_us"] = measure(case.ours), measure(case.torch)
        row["ratio"] = round(row["torch_us"]["median"] / row["ours_us"]["median"], 2)
        row["gb_per_s"] = round(case.bytes / row["ours_us"]["median"] / 1e3)
    if row["ok"] and compile_too:
        try:
            theirs = compiled(case)
            if theirs is not None:
                row["compile_us"] = measure(theirs)
                row["compile_ratio"] = round(row["compile_us"]["median"] / row["ours_us"]["median"], 2)
        except Exception as exc:
            # no compiler, or a composition that it refuses: no reason to lose the rest
            row["compile_failed"] = f"{type(exc).__name__}: {next(iter(str(exc).splitlines()), '')}"
    return row


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    if not row["ok"]:
        print(f"{row['kernel']:16} {row['shape']:22} WRONG: relative error {row['error']:.2e}", flush=True)
        return
    ours, theirs = row["ours_us"], row["torch_us"]
    compiled_us = (
        f"{row['compile_us']['median']:9.2f} {row['compile_ratio']:6.2f}x" if "compile_us" in row else " " * 17
    )
    print(
        f"{row['kernel']:16} {row['shape']:22} {ours['median']:8.2f} [{ours['p20']:.2f}, {ours['p80']:.2f}]"
        f" {theirs['median']:8.2f} {row['ratio']:6.2f}x {compiled_us} {row['gb_per_s']:6} GB/s"
        f"  error {row['error']:.1e}  first {row['first_call_s']:.2f} s {row.get('compile_failed', '')}",
        flush=True,
    )


def sweep(all_cases: list[Case]) -> list[dict[str, Any]]:
    """Median of each case under each setting of SWEEP; prints the best five of a case."""
    rows = []
    for module, names, settings in SWEEP:
        for case in (case for case in all_cases if case.kernel in names):
            found: list[dict[str, Any]] = []
            for values in settings:
                before = {name: getattr(module, name) for name in values}
                try:
                    for name, value in values.items():
                        setattr(module, name, value)
                    found.append(
                        {
                            "kernel": case.kernel,
                            "shape": case.shape,
                            **values,
                            **measure(case.ours, replays=20),
                        }
                    )
                finally:
                    for name, value in before.items():
                        setattr(module, name, value)
            rows += found
            best = sorted(found, key=lambda row: row["median"])[:5]
            text = "  ".join(f"{row['median']}:" + "/".join(str(row[name]) for name in settings[0]) for row in best)
            print(f"{case.kernel:16} {case.shape:22} {'/'.join(settings[0])}  {text}", flush=True)
    return rows


def write(out: Path | None, result: dict[str, Any]) -> None:
    """Put the rows where they are wanted; after each, as a run may not come to its end."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        records.write(out, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    parser.add_argument("--only", default=",".join(CASES), help="kernels, with commas between them")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--sweep", action="store_true", help="try other tile sizes too")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    parser.add_argument("--warm", action="store_true", help="keep the caches of compiled kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels needs an NVIDIA GPU", file=sys.stderr)
        return 1
    if not options.warm:
        for name in CACHES:
            os.environ[name] = tempfile.mkdtemp(prefix="sfast-")
    torch.manual_seed(0)
    head = machine.describe()
    print(json.dumps(head))
    # one rounding of the result, and in attention one of the probabilities; float32 attention may run as tf32
    tolerance = {"float16": 1.5e-3, "bfloat16": 1e-2, "float32": 1e-3}[options.dtype]
    print(f"{'kernel':16} {'shape':22} {'ours us':>8} [p20, p80] {'torch us':>8}  ratio {'compile us':>10}  ratio")
    all_cases = list(cases(getattr(torch, options.dtype), set(options.only.split(","))))
    rows = []
    for case in all_cases:
        rows.append({**run(case, tolerance, not options.no_compile), "dtype": options.dtype})
        show(rows[-1])
        write(options.out, {**head, "rows": rows})
    print(f"first calls together: {sum(row['first_call_s'] for row in rows):.1f} s")
    swept = sweep([c for c, row in zip(all_cases, rows) if row["ok"]]) if options.sweep else []
    write(options.out, {**head, "rows": rows, "sweep": swept})
    return 0 if all(row["ok"] for row in rows) else 1
