"""Times Hopper's linear layers on 8-bit operands (`wgmma_gemm8`), int8 and float8 e4m3, at the sizes of SDXL, with each
tile, next to cuBLAS and this extension's kernels in float16, `torch._scaled_mm` and `torch._int_mm`.

    python -m benchmarks.hopper8 --json benchmarks/results/hopper8-h200.json
    python -m benchmarks.hopper8 --fit benchmarks/results/hopper8-h200.json    # the constants of wgmma_gemm8.TILES

Operands are quantised already. All run in CUDA graphs, by turns, in one process. Kernels of this extension begin early,
as they do in a plan (`pdl`). Each result is compared with the product in float32 first. The ratio is the time of
`F.linear` in float16 divided by that of the fastest tile with what follows it, bias and residual or GEGLU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ampere.turns import Call, in_turns
from benchmarks.kernels.run import write as write_json
from sfast_ext.kernels.backend import nvrtc, pdl
from sfast_ext.kernels.backend.triton_runtime import cdiv
from sfast_ext.kernels.eight_bits import wgmma_gemm8
from sfast_ext.kernels.eight_bits.wgmma_gemm8 import GEGLU, KINDS, PLAIN, RESIDUAL, TILES, Tile
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu
from sfast_ext.kernels.pointwise import geglu
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import machine

ROWS = (2048, 4096, 8192)
SHAPES = [
    (PLAIN, 3840, 1280),
    (RESIDUAL, 1280, 1280),
    (GEGLU, 5120, 1280),
    (RESIDUAL, 1280, 5120),
    (PLAIN, 1920, 640),
    (RESIDUAL, 640, 640),
    (GEGLU, 2560, 640),
    (RESIDUAL, 640, 2560),
]
"""What follows, columns of the result, depth."""
NAMES = {PLAIN: "linear", RESIDUAL: "linear, bias, residual", GEGLU: "linear, bias, GEGLU"}
KIND_NAMES = {dtype: str(dtype).removeprefix("torch.").partition("_")[0] for dtype in KINDS}
CUBLAS = "F.linear, float16"
OURS = "this extension, float16"
WANTED = 1.6
"""Times as fast as cuBLAS in float16."""
_TOLERANCE = {torch.int8: 2e-3}
_FLOAT8_TOLERANCE = 0.03  # sums have about 14 bits


def label(tile: Tile) -> str:
    """Such as "160 team 1 pair 2"."""
    return f"{tile.width} team {tile.team} pair {tile.pair}"


def compile_all(device: torch.device) -> None:
    """Compile every variant at once; NVRTC leaves the GIL."""
    wanted = [
        wgmma_gemm8.constants(tile, kind, torch.float16, epilogue)
        for tile in TILES
        for kind in KINDS
        for epilogue in NAMES
        if wgmma_gemm8.fits(tile, epilogue)
    ]
    build = functools.partial(wgmma_gemm8._SOURCE.compiled, nvrtc.architecture(device.index))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(build, wanted))


def quantised(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Symmetric, with a scale for each row."""
    most = 127.0 if kind == torch.int8 else 448.0
    scale = x.float().abs().amax(-1) / most
    scaled = x.float() / scale[:, None]
    return (scaled.round() if kind == torch.int8 else scaled).to(kind), scale


def theirs(x: Tensor, weight: Tensor, eight: dict[torch.dtype, tuple[Tensor, ...]]) -> Iterator[tuple[str, Call]]:
    """What torch has for the product alone; what this torch does not take is named on stderr."""
    yield CUBLAS, functools.partial(F.linear, x, weight)
    candidates: dict[str, Call] = {}
    if len(KINDS) > 1:
        q, x_scale, w, weight_scale = eight[torch.float8_e4m3fn]
        one = torch.ones((), device=x.device)
        more: dict[str, Any] = {"use_fast_accum": True}
        candidates["_scaled_mm, one scale, float16"] = functools.partial(
            torch._scaled_mm, q, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float16, **more
        )
        candidates["_scaled_mm, scales of rows, bfloat16"] = functools.partial(
            torch._scaled_mm, q, w.t(), scale_a=x_scale[:, None], scale_b=weight_scale[None], out_dtype=torch.bfloat16,
            **more,
        )  # fmt: skip
    q, _, w, _ = eight[torch.int8]
    candidates["_int_mm"] = functools.partial(torch._int_mm, q, w.t())
    for name, call in candidates.items():
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, ValueError) as exc:
            print(f"{name}: {str(exc).splitlines()[0]}", file=sys.stderr)
            continue
        yield name, call


def row(epilogue: int, rows: int, columns: int, depth: int) -> dict[str, Any]:
    """The times of a size, in microseconds by name."""
    device = torch.device("cuda", torch.cuda.current_device())
    of_weight = 2 * columns if epilogue == GEGLU else columns
    x = torch.randn(rows, depth, device=device).half()
    weight = (torch.randn(of_weight, depth, device=device) * depth**-0.5).half()
    bias = None if epilogue == PLAIN else torch.randn(of_weight, device=device).half()
    residual = torch.randn(rows, columns, device=device).half()
    eight = {kind: (*quantised(x, kind), *quantised(weight, kind)) for kind in KINDS}

    def early(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with pdl.pdl_capture([weight]):
            return call(*args, **more)

    def ours(kind: torch.dtype, tile: Tile, onto: Tensor) -> Call:
        if epilogue == GEGLU:
            return functools.partial(early, wgmma_gemm8.geglu, *eight[kind], bias, tile=tile)
        added = onto if epilogue == RESIDUAL else None
        return functools.partial(early, wgmma_gemm8.linear, *eight[kind], bias, added, tile=tile)

    calls: dict[str, Call] = dict(theirs(x, weight, eight))
    if epilogue == GEGLU:
        calls[f"{CUBLAS}, and GEGLU"] = lambda: early(geglu.launch, F.linear(x, weight, bias))
        calls[OURS] = functools.partial(early, linear_geglu.launch, x, weight, bias)
    elif epilogue == RESIDUAL:
        calls[f"{CUBLAS}, and residual"] = lambda: F.linear(x, weight, bias) + residual
        calls[OURS] = functools.partial(early, linear_accumulate.launch, x, weight, torch.zeros_like(residual))
    tiles = [tile for tile in TILES if wgmma_gemm8.fits(tile, epilogue)]
    errors: dict[str, float] = {}
    for kind, name in KIND_NAMES.items():
        q, x_scale, w, weight_scale = eight[kind]
        wanted = (q.float() @ w.float().t()) * x_scale[:, None] * weight_scale
        wanted = wanted if bias is None else wanted + bias.float()
        wanted = geglu.reference(wanted) if epilogue == GEGLU else wanted
        wanted = wanted + residual.float() if epilogue == RESIDUAL else wanted
        for tile in tiles:
            got = ours(kind, tile, residual.clone())()
            errors[f"{name}, {label(tile)}"] = relative_error([got.float()], [wanted])
            # onto the same memory again and again: of zeros, so that it stays finite
            calls[f"{name}, {label(tile)}"] = ours(kind, tile, torch.zeros_like(residual))
    bounds = {name: _TOLERANCE.get(kind, _FLOAT8_TOLERANCE) for kind, name in KIND_NAMES.items()}
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name.partition(",")[0]]}
    calls = {name: call for name, call in calls.items() if name not in wrong}
    first = wgmma_gemm8.tiles(x, weight, residual=epilogue == RESIDUAL, geglu=epilogue == GEGLU)[0]
    return {
        "what": NAMES[epilogue],
        "shape": [rows, columns, depth],
        "us": in_turns(calls),
        "chosen": label(first),
        "errors": {name: max([0.0, *(errors[n] for n in errors if n.startswith(name))]) for name in bounds},
        "wrong": wrong,
    }


def fastest(found: dict[str, Any], kind: str) -> tuple[str, float]:
    """The tile of a kind that takes the least time, and the time."""
    times = {name.partition(", ")[2]: us for name, us in found["us"].items() if name.startswith(f"{kind}, ")}
    return min(times.items(), key=lambda item: item[1], default=("none", float("nan")))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The fastest tile of each kind next to everything else, in Markdown."""
    others = list(dict.fromkeys(name for each in rows for name in each["us"] if " team " not in name))
    heads = ["Operation", "M×N×K", *others]
    for kind in KIND_NAMES.values():
        heads += [f"{kind}, µs", "tile", "cuBLAS / ours", "chosen / fastest"]
    lines = [heads, ["---"] * len(heads)]
    for each in rows:
        cells = [each["what"], "×".join(map(str, each["shape"]))]
        cells += [f"{each['us'][name]:.1f}" if name in each["us"] else "" for name in others]
        for kind in KIND_NAMES.values():
            tile, us = fastest(each, kind)
            chosen = each["us"].get(f"{kind}, {each['chosen']}", float("nan"))
            cells += [f"{us:.1f}", tile, f"{each['us'][CUBLAS] / us:.2f}", f"{chosen / us:.2f}"]
        lines.append(cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def tile_table(rows: list[dict[str, Any]]) -> list[str]:
    """The time of each tile, int8 / float8, in Markdown."""
    lines = [["Operation", "M×N×K", *map(label, TILES)], ["---"] * (2 + len(TILES))]
    for each in rows:
        cells = [each["what"], "×".join(map(str, each["shape"]))]
        for tile in TILES:
            times = [each["us"].get(f"{kind}, {label(tile)}") for kind in KIND_NAMES.values()]
            cells.append(" / ".join("–" if us is None else f"{us:.1f}" for us in times))
        lines.append(cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def fitted(rows: list[dict[str, Any]], multiprocessors: int) -> list[tuple[Tile, float]]:
    """The tiles with constants of the model that fit the times of int8 best, and the largest relative error of each.

    Errors are relative, so that short products count as much as long ones.
    """
    found = []
    names = {name: epilogue for epilogue, name in NAMES.items()}
    for tile in TILES:
        terms, times = [], []
        for each in rows:
            us = each["us"].get(f"int8, {label(tile)}")
            if us is None:
                continue
            count, columns, depth = each["shape"]
            blocks = wgmma_gemm8._tiles(count, columns, tile, names[each["what"]])
            waves = cdiv(blocks, max(1, multiprocessors // tile.pair))
            terms.append([1.0, float(waves), float(waves * cdiv(depth, wgmma_gemm8.DEPTH))])
            times.append(us)
        if len(times) < 3:
            continue
        us_, terms_ = torch.tensor(times, dtype=torch.float64), torch.tensor(terms, dtype=torch.float64)
        constants = torch.linalg.lstsq(terms_ / us_[:, None], torch.ones(len(times), 1, dtype=torch.float64)).solution
        error = float((terms_ @ constants / us_[:, None] - 1).abs().max())
        found.append((tile._replace(**dict(zip(("begin", "start", "step"), constants.flatten().tolist()))), error))
    return found


def report(found: dict[str, Any]) -> None:
    """Print all tables, the fit, and whether what is wanted is reached."""
    rows = found["rows"]
    head = ", ".join(str(found.get(key)) for key in ("gpu", "driver", "torch", "cuda", "commit"))
    print("\n".join([head, "", *table(rows), "", *tile_table(rows), ""]))
    print("Fit of the model (begin, start, step; the largest error):")
    for tile, error in fitted(rows, found["multiprocessors"]):
        model = f"{tile.begin:.2f}, {tile.start:.2f}, {tile.step:.3f}"
        print(f"    Tile({tile.width}, {tile.team}, {tile.pair}, {model}),  # {100 * error:.0f} %")
    for kind in KIND_NAMES.values():
        held = [each["us"][CUBLAS] / fastest(each, kind)[1] for each in rows]
        reached = sum(ratio >= WANTED for ratio in held)
        print(f"{kind}: cuBLAS / ours from {min(held):.2f} to {max(held):.2f}, {reached} of {len(held)} ≥ {WANTED}")
    for each in rows:
        if each["wrong"]:
            print(f"WRONG, not timed: {each['what']} {each['shape']}: {each['wrong']}")


def main(given: list[str] | None = None) -> int:
    """Measure, write JSON and print tables; 1 without Hopper, or if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go, after each of them")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="M (default: 2048 4096 8192)")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="print the tables of such a file, and measure nothing")
    args = parser.parse_args(given)
    if args.fit:
        report(json.loads(args.fit.read_text(encoding="utf-8")))
        return 0
    device = machine.device()
    if device.type != "cuda" or not wgmma_gemm8.supported(torch.device("cuda", torch.cuda.current_device())):
        print("this needs a Hopper GPU and NVRTC", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    begun = time.perf_counter()
    compile_all(device)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[str, Any] = {**machine.describe(), "multiprocessors": count, "rows": []}
    for rows in args.rows:
        for shape in SHAPES:
            found["rows"].append(row(shape[0], rows, *shape[1:]))
            write_json(args.json, found)
    found["seconds"] = round(time.perf_counter() - begun, 1)
    write_json(args.json, found)
    report(found)
    return int(any(each["wrong"] for each in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
