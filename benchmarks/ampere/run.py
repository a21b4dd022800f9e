"""Times `mma_gemm` next to every kernel for Ampere that cuBLASLt and cuDNN have for the same product or convolution,
`mma_gemm8` and `mma_conv8` next to `mma_gemm`, and `mma_attention` next to PyTorch's attentions.

    python -m benchmarks.ampere --json benchmarks/results/ampere-h200.json
    python -m benchmarks.ampere --page benchmarks/results/ampere-h200.json    # writes the tables of docs/kernels.md
    python -m benchmarks.ampere --only int8 --json benchmarks/results/ampere-int8-h200.json
    python -m benchmarks.ampere --only int8-convolution --json benchmarks/results/ampere-int8-convolution-h200.json

On Hopper both libraries choose kernels with Hopper's instructions, which no GeForce has. Their kernels for Ampere run
there too: algorithms are launched under the profiler, which tells the kernel's name, and those for Ampere are timed.
The convolution needs nvidia-cudnn-frontend. All run in CUDA graphs, the fastest of each side by turns. Our kernels have
the tiles of compute capability 8.0. Of the attentions only cuDNN's has instructions of Hopper.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import marks
from benchmarks.ampere import attention, convolutions8, cublaslt, eight_bits
from benchmarks.ampere.cudnn_plans import Convolution
from benchmarks.ampere.turns import SLEEP, Call, in_turns
from benchmarks.kernels.cases import GATED_LINEARS, LINEARS
from benchmarks.kernels.run import write as write_json
from sfast_ext.kernels.backend import gpu_clock
from sfast_ext.kernels.linear import mma_gemm
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import machine, trace, ways

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- ampere: begin -->", "<!-- ampere: end -->"
CONVOLUTIONS = ((320, 64, 320), (640, 32, 640), (1280, 16, 1280), (2560, 16, 1280), (640, 64, 320),
                (320, 128, 320), (640, 64, 640), (1280, 32, 1280), (640, 128, 320), (2560, 32, 1280))  # fmt: skip
"""Channels, height and width, and channels of the result of the ten commonest 3x3 convolutions, two images."""
_HOPPER = re.compile(r"sm90|sm_90|nvjet|gmma", re.I)
_AMPERE = re.compile(r"ampere|sm8\d|_80_|16816|cutlass", re.I)
_FINALISTS = 3
_OTHERS = (attention, eight_bits, convolutions8)
"""Parts that have a table each."""


def is_for_ampere(name: str) -> bool:
    """Whether a kernel's name says that it uses no instruction of Hopper."""
    return bool(_AMPERE.search(name)) and not _HOPPER.search(name)


def for_ampere(candidates: Iterable[Any], run: Callable[[Any], Any], device: torch.device) -> dict[Any, str]:
    """Those of which all kernels are for Ampere, with the longest one's name.

    Raises:
        RuntimeError: the profiler saw no kernel at all.
    """
    calls = {str(i): functools.partial(run, candidate) for i, candidate in enumerate(candidates)}
    events, found, seen = trace.record(calls, device), {}, 0
    for name, call in calls.items():
        kernels = [event for event in trace.of_call(events, name) if event.category == trace.KERNEL]
        seen += len(kernels)
        if kernels and not any(_HOPPER.search(event.name) for event in kernels):
            longest = max(kernels, key=lambda event: event.duration)
            if is_for_ampere(longest.name):
                found[call.args[0]] = longest.name
    if calls and not seen:
        raise RuntimeError("the profiler saw no kernel: whether one is for Ampere is not known")
    return found


def fastest(candidates: Iterable[Any], run: Callable[[Any], Any]) -> list[Any]:
    """The few that seem fastest, launched one by one."""
    taken = {}
    for each in candidates:
        call = functools.partial(run, each)
        call()
        taken[each] = min(gpu_clock.milliseconds(call, 3, SLEEP // 4) for _ in range(2))
    return sorted(taken, key=lambda each: taken[each])[:_FINALISTS]


def beside(ours: dict[str, Call], candidates: list[Any], run: Callable[[Any], Any], exact: Call) -> dict[str, Any]:
    """The row of a shape: ours, and the library's fastest kernel for Ampere.

    Args:
        candidates: those for Ampere.
        exact: compares what `run` wrote last with what it should be, and returns the relative error.
    """
    few = fastest(candidates, run)
    names = for_ampere(few, run, torch.device("cuda", torch.cuda.current_device())) if few else {}
    errors = {}
    for each in names:
        run(each)
        errors[each] = exact()
    times = in_turns({**ours, **{str(each): functools.partial(run, each) for each in names}})
    theirs = min(names, key=lambda each: times[str(each)], default=None)
    row: dict[str, Any] = {"ours_us": {name: times[name] for name in ours}, "candidates": len(candidates)}
    if theirs is not None:
        row |= {"theirs_us": times[str(theirs)], "kernel": names[theirs], "their_error": errors[theirs]}
    return row


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).half()


def linear(rows: int, columns: int, depth: int, geglu: bool) -> dict[str, Any]:
    """A linear layer: with the addition of a residual, or with GEGLU, of so many columns after it."""
    device = torch.device("cuda", torch.cuda.current_device())
    of_product = 2 * columns if geglu else columns
    x, weight = _random(rows, depth), _random(of_product, depth, scale=depth**-0.5)
    bias, out = _random(of_product), torch.empty(rows, of_product, dtype=torch.float16, device=device)
    product = cublaslt.Linear(x, weight, out)
    ours: dict[str, Call] = {}
    if geglu:
        for tile in mma_gemm.tiles(rows, weight, mma_gemm.Epilogue(mma_gemm.GEGLU)):
            ours[f"GEGLU, {tile}"] = functools.partial(mma_gemm.linear_geglu, x, weight, bias, tile=tile)
    residual = _random(rows, of_product)
    for tile in mma_gemm.tiles(rows, weight):
        ours[f"product, {tile}"] = functools.partial(mma_gemm.linear, x, weight, None, tile=tile)
        if not geglu:
            ours[f"residual, {tile}"] = functools.partial(mma_gemm.linear, x, weight, bias, residual, tile=tile)
    wanted = x.float() @ weight.float().t()
    offered = list(product.configurations())
    # all tiles of an algorithm are for one generation
    one_of_each = {each.algorithm: each for each in reversed(offered)}.values()
    old = {each.algorithm for each in for_ampere(one_of_each, product.run, device)}
    candidates = [each for each in offered if each.algorithm in old]
    row = beside(ours, candidates, product.run, lambda: relative_error([out.float()], [wanted]))
    what = "linear and GEGLU" if geglu else "linear and residual"
    return {"what": what, "shape": f"{rows}×{columns}×{depth}", **row}


def convolution(channels: int, size: int, columns: int) -> dict[str, Any]:
    """A 3x3 convolution, without and with a bias."""
    device = torch.device("cuda", torch.cuda.current_device())
    x, weight, out = (
        t.contiguous(memory_format=torch.channels_last)
        for t in (
            _random(2, channels, size, size),
            _random(columns, channels, 3, 3, scale=(9 * channels) ** -0.5),
            _random(2, columns, size, size),
        )
    )
    bias, plans = _random(columns), Convolution(x, weight, out)
    ours: dict[str, Call] = {}
    for tile in mma_gemm.tiles(2 * size * size, weight):
        ours[f"product, {tile}"] = functools.partial(mma_gemm.conv2d, x, weight, None, tile=tile)
        ours[f"bias, {tile}"] = functools.partial(mma_gemm.conv2d, x, weight, bias, tile=tile)
    wanted = torch.nn.functional.conv2d(x.float(), weight.float(), padding=1)
    candidates = list(for_ampere(plans.built, plans.run, device))
    row = beside(ours, candidates, plans.run, lambda: relative_error([out.float()], [wanted]))
    return {"what": "3×3 convolution", "shape": f"{channels}→{columns}, {size}²", **row}


def best(row: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of our fastest tile, without and with the epilogue."""
    plain = {name: us for name, us in row["ours_us"].items() if name.startswith("product")}
    return min(plain.values()), min(us for name, us in row["ours_us"].items() if name not in plain)


def ratios(row: dict[str, Any]) -> tuple[float, float] | None:
    """Their time divided by ours, without and with the epilogue; None where they have no kernel for Ampere."""
    if "theirs_us" not in row:
        return None
    plain, more = best(row)
    return row["theirs_us"] / plain, row["theirs_us"] / more


def products_table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        "| Operation | Shape | `mma_gemm`, µs | with what follows, µs | the library's for Ampere, µs | theirs / ours |"
        " with what follows |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        (plain, more), held = best(row), ratios(row)
        theirs = f"{row['theirs_us']:.1f} | {held[0]:.2f} | {held[1]:.2f}" if held else "none | |"
        lines.append(f"| {row['what']} | {row['shape']} | {plain:.1f} | {more:.1f} | {theirs} |")
    return lines


def write(found: dict[str, Any], page: Path = PAGE) -> None:
    """Put the tables of which there are rows between their marks.

    Raises:
        ValueError: the page lacks them.
    """
    head = f"{found['gpu']}, torch {found['torch']}, CUDA {found['cuda']}, cuDNN {found['cudnn']}, {found['commit']}."
    of_products = [row for row in found["rows"] if row["what"] not in {each.WHAT for each in _OTHERS}]
    text = page.read_text(encoding="utf-8")
    if of_products:
        text = marks.replaced(text, BEGIN, END, "\n".join([head, "", *products_table(of_products)]))
    for each in _OTHERS:
        if of_it := [row for row in found["rows"] if row["what"] == each.WHAT]:
            text = marks.replaced(text, each.BEGIN, each.END, "\n".join([head, "", *each.table(of_it)]))
    page.write_text(text, encoding="utf-8")


def main(given: list[str] | None = None) -> int:
    """Measure and write JSON, or write the table from such a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = "linear", "convolution", *(each.WHAT for each in _OTHERS)
    parser.add_argument("--only", choices=parts, help="a part of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go, after each of them")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables of docs/kernels.md from this")
    args = parser.parse_args(given)
    if args.page:
        write(json.loads(args.page.read_text(encoding="utf-8")))
        return 0
    if machine.device().type != "cuda":
        print("this needs an NVIDIA GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    makers: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "linear": [functools.partial(linear, *shape, geglu=False) for shape in LINEARS]
        + [functools.partial(linear, *shape, geglu=True) for shape in GATED_LINEARS],
        "convolution": [functools.partial(convolution, *shape) for shape in CONVOLUTIONS],
        attention.WHAT: [functools.partial(attention.row, *shape) for shape in attention.SHAPES],
        eight_bits.WHAT: [functools.partial(eight_bits.row, *shape, geglu=False) for shape in LINEARS]
        + [functools.partial(eight_bits.row, *shape, geglu=True) for shape in GATED_LINEARS],
        convolutions8.WHAT: [functools.partial(convolutions8.row, *shape) for shape in convolutions8.SHAPES],
    }
    found: dict[str, Any] = {**machine.describe(), "rows": []}
    with ways.passing_for((8, 0)):
        for make in makers[args.only] if args.only else itertools.chain(*makers.values()):
            found["rows"].append(make())
            print(json.dumps(found["rows"][-1], ensure_ascii=False), flush=True)
            write_json(args.json, found)
    return 0
