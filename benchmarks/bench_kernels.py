"""Times each kernel against the PyTorch operations it stands for, at the shapes of SD 1.5 and SDXL.

    python benchmarks/bench_kernels.py --out benchmarks/results/kernels.json
    python benchmarks/bench_kernels.py --sweep --only group_norm,layer_norm

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sfast_ext import native
from sfast_ext.environment import version
from sfast_ext.kernels import (
    _group_norm,
    add_layer_norm,
    attention,
    bias_add,
    geglu,
    group_norm,
    layer_norm,
    linear_add,
)

MODULES: dict[str, Any] = {
    "layer_norm": layer_norm,
    "add_layer_norm": add_layer_norm,
    "group_norm": group_norm,
    "geglu": geglu,
    "bias_add": bias_add,
    "attention": attention,
    "linear_add": linear_add,
}
NORM_ROWS = [(8192, 320), (2048, 640), (512, 1280), (2048, 1280), (8192, 640)]
# (channels, height): batch 2; the last three are SDXL's
IMAGES = [
    (320, 64),
    (640, 64),
    (960, 64),
    (640, 32),
    (1920, 32),
    (1280, 16),
    (2560, 16),
    (1280, 8),
    (2560, 8),
]
IMAGES += [(320, 128), (960, 128), (1280, 32)]
GATED = [(8192, 2560), (2048, 5120), (512, 10240), (2048, 10240), (8192, 5120)]
# heads, queries, keys, head dimension: batch 2
HEADS = [(8, 4096, 4096, 40), (8, 1024, 1024, 80), (8, 256, 256, 160), (8, 4096, 77, 40), (8, 1024, 77, 80)]
HEADS += [(10, 4096, 4096, 64), (20, 1024, 1024, 64), (10, 4096, 77, 64), (20, 1024, 77, 64)]
# rows, columns, inner dimension: the projections out of attention and feed-forward; the last four are SDXL's
LINEARS = [
    (8192, 320, 320),
    (8192, 320, 1280),
    (2048, 640, 640),
    (2048, 640, 2560),
    (512, 1280, 1280),
    (512, 1280, 5120),
]
LINEARS += [(2048, 1280, 1280), (2048, 1280, 5120), (8192, 640, 640), (8192, 640, 2560)]

# Other values of the tile constants, tried by --sweep: (module that has the constants, kernels, values).
# elements, warps, most parts
PARTS = [(4096, 4, 256), (8192, 4, 128), (8192, 8, 128), (16384, 8, 128), (16384, 16, 128)]
SWEEP: list[tuple[Any, tuple[str, ...], list[dict[str, int]]]] = [
    (
        layer_norm,
        ("layer_norm", "add_layer_norm"),
        [{"_ELEMENTS": n, "_WARPS": w} for n in (1024, 2048, 4096, 8192) for w in (1, 2, 4, 8)],
    ),
    (_group_norm, ("group_norm.whole",), [{"_PER_THREAD": n, "_MOST_WARPS": w} for n in (16, 32) for w in (16, 32)]),
    (_group_norm, ("group_norm.parts",), [{"_PART": n, "_PART_WARPS": w, "_PARTS": most} for n, w, most in PARTS]),
    (
        group_norm,
        ("group_norm.loop",),
        [{"_PROGRAMS": p, "_BLOCK": b, "_TILE": t} for p in (2, 4, 8) for b in (128, 256) for t in (2048, 4096, 8192)],
    ),
    (geglu, ("geglu",), [{"_ROWS": r, "_BLOCK": b} for r in (2, 4, 8, 16) for b in (128, 256, 512)]),
    (bias_add, ("bias_add",), [{"_ROWS": r, "_BLOCK": b} for r in (8, 16, 32) for b in (64, 128, 256)]),
]


@dataclass
class Case:
    """One kernel at one shape; both calls return a tensor or a tuple of them."""

    kernel: str
    shape: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]
    target: Callable[[], Any]
    """The reference, on the same operands in float64."""
    bytes: int
    """What must be read and written once."""


def _case(kernel: str, shape: str, composition: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Case:
    module = MODULES[kernel]
    tensors = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)]
    out = module.reference(*args, **kwargs)
    outputs = out if isinstance(out, tuple) else (out,)

    def target() -> Any:
        return module.reference(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})

    return Case(
        kernel,
        shape,
        lambda: module.launch(*args, **kwargs),
        lambda: composition(*args, **kwargs),
        target,
        sum(t.numel() * t.element_size() for t in (*tensors, *outputs)),
    )


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def _torch_group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shift: Tensor, silu: bool
) -> Tensor:
    return F.silu(F.group_norm(x + shift[:, :, None, None], groups, weight, bias, eps))


def _by_path(case: Case, path: str) -> Case:
    """A group norm by the path of that name alone."""

    def ours() -> Any:
        before = group_norm._PATHS
        try:
            group_norm._PATHS = () if path == "loop" else (path,)
            return case.ours()
        finally:
            group_norm._PATHS = before

    return replace(case, kernel=f"group_norm.{path}", ours=ours)


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _torch_layer_norm(total, weight, bias, eps)


def _torch_geglu(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def _torch_bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return x + bias[None, :, None, None] + residual


def _torch_linear_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + residual


def _before_norm(shape: str, affine: list[Any], x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Case:
    """A residual that is normed next: in the product, with the norm alone ("ours"); or in the norm ("torch")."""

    def ours() -> tuple[Tensor, Tensor]:
        total = linear_add.launch(x, weight, bias, residual)
        return total, layer_norm.launch(total, *affine)

    def target() -> Any:
        product = F.linear(x.double(), weight.double(), bias.double())
        return add_layer_norm.reference(product, residual.double(), *map(_wide, affine))

    operands, out = (x, weight, bias, residual, *affine[:2]), residual
    return Case(
        "linear_add_norm",
        shape,
        ours,
        lambda: add_layer_norm.launch(F.linear(x, weight, bias), residual, *affine),
        target,
        sum(t.numel() * t.element_size() for t in operands) + 2 * out.numel() * out.element_size(),
    )


def cases(dtype: torch.dtype, only: set[str]) -> Iterator[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    def image(channels: int, size: int) -> Tensor:
        return randn(2, channels, size, size).to(memory_format=torch.channels_last)

    for rows, columns in NORM_ROWS:
        shape, affine = f"{rows}x{columns}", [randn(columns), randn(columns), 1e-5]
        if "layer_norm" in only:
            yield _case("layer_norm", shape, _torch_layer_norm, [randn(rows, columns), *affine], {})
        if "add_layer_norm" in only:
            operands = [randn(rows, columns), randn(rows, columns), *affine]
            yield _case("add_layer_norm", shape, _torch_add_layer_norm, operands, {})
    for channels, size in IMAGES:
        shape = f"2x{channels}x{size}x{size}"
        if "group_norm" in only:
            operands = [image(channels, size), 32, randn(channels), randn(channels), 1e-5]
            options = {"shift": randn(2, channels), "silu": True}
            case = _case("group_norm", shape, _torch_group_norm, operands, options)
            yield case
            fitting = [path for path, fits in group_norm._FITS.items() if fits(size * size, 32, channels // 32)]
            yield from (_by_path(case, path) for path in [*fitting, "loop"])
        if "bias_add" in only:
            operands = [image(channels, size), randn(channels), image(channels, size)]
            yield _case("bias_add", shape, _torch_bias_add, operands, {})
    for rows, columns, inner in LINEARS if "linear_add" in only else ():
        shape = f"{rows}x{columns}x{inner}"
        tensors = [randn(rows, inner), randn(columns, inner) * inner**-0.5, randn(columns), randn(rows, columns)]
        yield _case("linear_add", shape, _torch_linear_add, tensors, {})
        yield _before_norm(shape, [randn(columns), randn(columns), 1e-5], *tensors)
    if "geglu" in only:
        for rows, columns in GATED:
            yield _case("geglu", f"{rows}x{columns}", _torch_geglu, [randn(rows, columns)], {})
    if "attention" in only:
        for heads, queries, keys, size in HEADS:
            q, k, v = (
                randn(2, length, heads * size).unflatten(-1, (heads, size)).transpose(1, 2)
                for length in (queries, keys, keys)
            )
            yield _case("attention", f"2x{heads}x{queries}x{keys}x{size}", attention.reference, [q, k, v], {})


def error(case: Case) -> float:
    """Relative L2 error of the kernel against float64, the worst of its outputs; NaN stays NaN."""
    actual, target = case.ours(), case.target()
    pairs = zip(actual, target) if isinstance(actual, tuple) else [(actual, target)]
    return max(((a.double() - t).norm() / t.norm()).item() for a, t in pairs)


def measure(call: Callable[[], Any], repeats: int = 20, replays: int = 50) -> dict[str, float]:
    """Microseconds a call, over replays of a graph that holds `repeats` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
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


def hardware() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version("triton") or version("triton-windows"),
        "python": sys.version.split()[0],
    }


def run(case: Case, tolerance: float) -> dict[str, Any]:
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
    return row


def show(row: dict[str, Any], note: str = "") -> None:
    if not row["ok"]:
        print(
            f"{row['kernel']:16} {row['shape']:20} WRONG: relative error {row['error']:.2e} {note}",
            flush=True,
        )
        return
    ours, theirs = row["ours_us"], row["torch_us"]
    print(
        f"{row['kernel']:16} {row['shape']:20} {ours['median']:8.2f} [{ours['p20']:.2f}, {ours['p80']:.2f}]"
        f" {theirs['median']:8.2f} {row['ratio']:6.2f}x {row['gb_per_s']:6} GB/s  error {row['error']:.1e}"
        f"  first {row['first_call_s']:.2f} s {note}",
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
            print(f"{case.kernel:16} {case.shape:20} {'/'.join(settings[0])}  {text}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    parser.add_argument("--only", default=",".join(MODULES), help="kernels, with commas between them")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--sweep", action="store_true", help="try other tile sizes too")
    parser.add_argument("--warm", action="store_true", help="keep Triton's cache (first calls then cost less)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels needs an NVIDIA GPU", file=sys.stderr)
        return 1
    if not options.warm:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="sfast-triton-")
    if "linear_add" in options.only and not native.load():
        print(f"linear_add is left out: the native operations are {native.describe()['error']}")
        options.only = ",".join(name for name in options.only.split(",") if name != "linear_add")
    torch.manual_seed(0)
    machine = hardware()
    print(json.dumps(machine))
    # one rounding of the result, and in attention one of the probabilities; float32 attention may run as tf32
    tolerance = {"float16": 1.5e-3, "bfloat16": 1e-2, "float32": 1e-3}[options.dtype]
    all_cases = list(cases(getattr(torch, options.dtype), set(options.only.split(","))))
    print(f"{'kernel':16} {'shape':20} {'ours us':>8} [p20, p80] {'torch us':>8}   ratio")
    rows = []
    for case in all_cases:
        rows.append({**run(case, tolerance), "dtype": options.dtype, **machine})
        show(rows[-1])
    print(f"first calls together: {sum(row['first_call_s'] for row in rows):.1f} s")
    swept = sweep([c for c, row in zip(all_cases, rows) if row["ok"]]) if options.sweep else []
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"rows": rows, "sweep": swept}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
