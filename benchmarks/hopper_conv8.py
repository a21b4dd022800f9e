"""Times Hopper's 3x3 convolutions in 8 bits (`wgmma_conv8`) at the sizes of SDXL's and SD 1.5's residual blocks, with
each tile, next to cuDNN and `conv2d` in float16 and to `mma_conv8`, and the group norms that write their input.

    python -m benchmarks.hopper_conv8 --json benchmarks/results/hopper-conv8-h200.json
    python -m benchmarks.hopper_conv8 --fit benchmarks/results/hopper-conv8-h200.json    # constants of TILES

Convolutions in 8 bits add a bias and a residual, as `conv2d` with the statistics of the next norm does; cuDNN and
`conv2d` alone add nothing. All run in CUDA graphs, by turns, in one process; kernels of this extension begin early, as
in a plan (`pdl`). Each result is compared with the convolution in float32 first.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ampere.turns import Call, in_turns
from benchmarks.kernels.run import write as write_json
from sfast_ext.kernels.backend import pdl
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.eight_bits import conv2d8, group_norm8, mma_conv8, quantise_rows, quantise_weights, wgmma_conv8
from sfast_ext.kernels.eight_bits.wgmma_conv8 import TILES, Tile
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import machine

SHAPES = (
    (320, 128, 320), (640, 128, 320), (960, 128, 320), (320, 64, 640), (640, 64, 640), (960, 64, 640), (1280, 64, 640),
    (1920, 64, 640), (640, 32, 1280), (1280, 32, 1280), (1920, 32, 1280), (2560, 32, 1280), (320, 64, 320),
    (640, 64, 320), (640, 32, 640), (1280, 32, 640), (1280, 16, 1280), (2560, 16, 1280),
)  # fmt: skip
"""Channels, height and width, and channels of the result; two images."""
CUDNN, HALF, WITH_STATISTICS = "cuDNN, float16", "conv2d, float16", "conv2d, float16, and statistics"
ANY_CARD, NORM, NORM8 = "mma_conv8", "norm, float16", "norm, int8"
_TOLERANCE = 1e-3


def label(tile: Tile) -> str:
    """Such as "160 pingpong, pair"."""
    more = (" pingpong" * tile.pingpong, ", pair" * (tile.pair > 1), f", split {tile.split}" * (tile.split > 1))
    return f"tile {tile.width}{''.join(more)}"


def row(channels: int, size: int, columns: int) -> dict[str, Any]:
    """The times of a size, in microseconds by name."""
    torch.manual_seed(0)
    x, residual = (_image(n, size) for n in (channels, columns))
    weight = (torch.randn(columns, channels, 3, 3, device="cuda") * (9 * channels) ** -0.5).half()
    weight = weight.contiguous(memory_format=torch.channels_last)
    gamma, beta, bias = (torch.randn(n, device="cuda").half() for n in (channels, channels, columns))
    of_norm = x, 32, gamma, beta, 1e-5, None, True
    y, (q, scale) = group_norm.launch(*of_norm), group_norm8.launch(*of_norm)
    rows, row_scales = quantise_rows.launch(quantise_weights.matrix(weight))
    given = q, scale, rows, torch.stack([row_scales, *quantise_weights.sums_of_codes(rows)]), bias, residual

    def early(call: Callable[..., Any], *args: Any, **more: Any) -> Call:
        def run() -> Any:
            with pdl.pdl_capture([weight]):
                return call(*args, **more)

        return run

    calls: dict[str, Call] = {CUDNN: functools.partial(F.conv2d, y, weight, None, padding=1)}
    calls[HALF] = early(conv2d._launch, y, weight, conv2d.best(y, columns))
    if conv2d.accepts_statistics(y, weight, 32) is None:
        calls[WITH_STATISTICS] = early(conv2d.with_statistics, y, weight, 32, bias, residual)
    first = mma_conv8.tiles(2 * size * size, columns, channels, x.device)[0]
    calls[ANY_CARD] = early(mma_conv8.conv2d, *given, 1, torch.float16, tile=first)
    calls[NORM], calls[NORM8] = early(group_norm.launch, *of_norm), early(group_norm8.launch, *of_norm)
    wanted = conv2d8.reference(*given, 1, torch.float32)
    wrong: dict[str, float] = {}
    for tile in filter(functools.partial(wgmma_conv8.fits, q, columns), TILES):
        call = early(wgmma_conv8.conv2d, *given, torch.float16, tile=tile)
        error = relative_error([call().float()], [wanted])
        if error <= _TOLERANCE:
            calls[label(tile)] = call
        else:
            wrong[label(tile)] = error
    chosen = label(wgmma_conv8.tiles(q, columns)[0])
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        calls[CUDNN]()
        return {"shape": [channels, size, columns], "us": in_turns(calls), "chosen": chosen, "wrong": wrong}


def _image(channels: int, size: int) -> Tensor:
    image = torch.randn(2, channels, size, size, device="cuda").half()
    return image.contiguous(memory_format=torch.channels_last)


def tiles_of(each: dict[str, Any]) -> dict[str, float]:
    """Microseconds by tile."""
    return {name: us for name, us in each["us"].items() if name.startswith("tile ")}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    others = (CUDNN, HALF, WITH_STATISTICS, ANY_CARD, NORM, NORM8)
    lines = [["Shape", *others, "wgmma_conv8", "tile", "conv2d / ours", "chosen / fastest"]]
    lines.append(["---"] * len(lines[0]))
    for each in rows:
        us, (channels, size, columns) = each["us"], each["shape"]
        tile, least = min(tiles_of(each).items(), key=lambda item: item[1], default=("none", float("nan")))
        cells = [f"{channels}→{columns}, {size}²", *(f"{us[name]:.1f}" if name in us else "" for name in others)]
        chosen = us.get(each["chosen"], float("nan")) / least
        lines.append([*cells, f"{least:.1f}", tile.removeprefix("tile "), f"{us[HALF] / least:.2f}", f"{chosen:.2f}"])
    return [f"| {' | '.join(line)} |" for line in lines]


def fitted(rows: list[dict[str, Any]], multiprocessors: int) -> list[tuple[Tile, float]]:
    """The tiles with constants of the model that fit best, and the largest relative error of each."""
    found = []
    for tile in TILES:
        terms, times = [], []
        for each in rows:
            channels, size, columns = each["shape"]
            if label(tile) in each["us"]:
                x = torch.empty((2, channels, size, size), device="meta")
                waves = wgmma_conv8.waves(x, columns, tile, multiprocessors)
                terms.append([1.0, float(waves), waves * wgmma_conv8.steps(x, tile)])
                times.append(each["us"][label(tile)])
        if len(times) < 3:
            continue
        us, matrix = torch.tensor(times, dtype=torch.float64), torch.tensor(terms, dtype=torch.float64)
        # where all are one wave, the first two are one
        constants = torch.linalg.pinv(matrix / us[:, None]) @ torch.ones(len(times), dtype=torch.float64)
        error = float((matrix @ constants / us - 1).abs().max())
        found.append((tile._replace(**dict(zip(("begin", "start", "step"), constants.tolist()))), error))
    return found


def report(found: dict[str, Any]) -> None:
    """Print the table and the fit."""
    head = ", ".join(str(found.get(key)) for key in ("gpu", "driver", "torch", "cuda", "cudnn", "commit"))
    print("\n".join([head, "", *table(found["rows"]), "", "Fit of the model (begin, start, step; the largest error):"]))
    for tile, error in fitted(found["rows"], found["multiprocessors"]):
        model = f"{tile.begin:.2f}, {tile.start:.2f}, {tile.step:.3f}"
        print(f"    Tile({tile.width}, {tile.pingpong}, {tile.split}, {tile.pair}, {model}),  # {100 * error:.0f} %")
    for each in found["rows"]:
        if each["wrong"]:
            print(f"WRONG, not timed: {each['shape']}: {each['wrong']}")


def main(given: list[str] | None = None) -> int:
    """Measure, write JSON and print tables; 1 without Hopper, or if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go, after each of them")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="print the tables of such a file, and measure nothing")
    args = parser.parse_args(given)
    if args.fit:
        report(json.loads(args.fit.read_text(encoding="utf-8")))
        return 0
    device = machine.device()
    if device.type != "cuda" or not wgmma_conv8.supported(torch.device("cuda", torch.cuda.current_device())):
        print("this needs a Hopper GPU and NVRTC", file=sys.stderr)
        return 1
    count = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[str, Any] = {**machine.describe(), "multiprocessors": count, "rows": []}
    with torch.no_grad():
        for shape in SHAPES:
            found["rows"].append(row(*shape))
            print(json.dumps(found["rows"][-1]), flush=True)
            write_json(args.json, found)
    report(found)
    return int(any(each["wrong"] for each in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
