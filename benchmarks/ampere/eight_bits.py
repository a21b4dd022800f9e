"""Times `mma_gemm8` next to `mma_gemm`: products of 8-bit integers next to the same in half precision."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.ampere.turns import Call, in_turns
from sfast_ext.kernels.eight_bits import geglu8, linear8, mma_gemm8
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.runtime.verify import relative_error

WHAT = "int8"
"""What the rows say they are."""
BEGIN, END = "<!-- ampere int8: begin -->", "<!-- ampere int8: end -->"
_GEGLU = mma_gemm.Epilogue(mma_gemm.GEGLU)


def row(rows: int, columns: int, depth: int, geglu: bool) -> dict[str, Any]:
    """A linear layer with the addition of a residual, or with GEGLU, of so many columns after it: microseconds of both
    by each of their tiles, by turns, and the error of both results against float32 on the operands before they were
    rounded to either."""
    torch.manual_seed(0)
    of_product = 2 * columns if geglu else columns
    x, weight = _normal(rows, depth), _normal(of_product, depth) * depth**-0.5
    bias, residual = _normal(of_product).half(), _normal(rows, of_product).half()
    (q, q_scale), (weight8, weight_scale) = quantised(x), quantised(weight)
    given8, given = (q, q_scale, weight8, weight_scale, bias), (x.half(), weight.half(), bias)
    half: dict[str, Call] = {}
    int8: dict[str, Call] = {}
    if geglu:
        tiles, tiles8 = mma_gemm.tiles(rows, given[1], _GEGLU), mma_gemm8.tiles(rows, weight8, _GEGLU)
        half = {str(tile): functools.partial(mma_gemm.linear_geglu, *given, tile=tile) for tile in tiles}
        int8 = {str(tile): functools.partial(mma_gemm8.geglu, *given8, torch.float16, tile=tile) for tile in tiles8}
    else:
        tiles, tiles8 = mma_gemm.tiles(rows, given[1]), mma_gemm8.tiles(rows, weight8)
        half = {str(tile): functools.partial(mma_gemm.linear, *given, residual.clone(), tile=tile) for tile in tiles}
        int8 = {
            str(tile): functools.partial(mma_gemm8.linear, *given8, torch.float16, residual.clone(), tile=tile)
            for tile in tiles8
        }
    unit = torch.ones(rows, device="cuda"), torch.ones(of_product, device="cuda")
    of_floats, of_integers = (x, unit[0], weight, unit[1], bias), given8
    if geglu:
        targets = [geglu8.reference(*each, dtype=torch.float32) for each in (of_floats, of_integers)]
    else:
        targets = [linear8.reference(*each, residual, torch.float32) for each in (of_floats, of_integers)]
    # the first run of each, onto the residual as it was
    calls = {**{f"half {name}": call for name, call in half.items()}, **{f"int8 {n}": call for n, call in int8.items()}}
    made = {name: call().float() for name, call in calls.items()}
    for name, y in made.items():
        error = relative_error([y], [targets[name.startswith("int8")]])
        if not error < 1e-3:
            raise RuntimeError(f"{name}: relative error {error:.1e} for {rows}×{columns}×{depth}")
    errors = {
        kind: max(relative_error([y], [targets[0]]) for name, y in made.items() if name.startswith(kind))
        for kind in ("half", "int8")
    }
    times = in_turns(calls)
    return {
        "what": WHAT,
        "operation": "linear and GEGLU" if geglu else "linear and residual",
        "shape": f"{rows}×{columns}×{depth}",
        "half_us": {name: times[f"half {name}"] for name in half},
        "int8_us": {name: times[f"int8 {name}"] for name in int8},
        "errors": errors,
    }


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit integers, with a scale each."""
    scale = x.abs().amax(-1) / 127
    return (x / scale[:, None]).round().to(torch.int8), scale


def ratio(each: dict[str, Any]) -> float:
    """The time in half precision divided by that in 8 bits, of the fastest tile of both."""
    return min(each["half_us"].values()) / min(each["int8_us"].values())


def table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        "| Operation | Shape | `mma_gemm`, float16, µs | `mma_gemm8`, int8, µs | ratio | the tile |"
        " error in float16 | in int8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        times, errors = each["int8_us"], each["errors"]
        tile = min(times, key=lambda name: times[name])
        lines.append(
            f"| {each['operation']} | {each['shape']} | {min(each['half_us'].values()):.1f} | {times[tile]:.1f} |"
            f" {ratio(each):.2f} | {tile.removeprefix('mma ')} | {errors['half']:.1e} | {errors['int8']:.1e} |"
        )
    return lines
