"""Bandwidth of the kernels that write 8 bits, next to copies: `python -m benchmarks.kernels.bandwidth`.

Bytes are what must be read and written once; of `quantise_weights` what is read, and what is written if all rows
changed. Each call runs in a CUDA graph, as in benchmarks.kernels. The last shape and the weights, those of SDXL, are
larger than the L2 cache. Codes and scales are compared with the reference before they are timed.
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

from benchmarks import records
from benchmarks.kernels import quantisers
from benchmarks.kernels.run import measure
from sfast_ext.kernels.eight_bits import add_layer_norm8, layer_norm8, quantise_rows, quantise_weights
from sfast_ext.kernels.pointwise import add_layer_norm, layer_norm
from sfast_ext.tools.lib import machine

SHAPES = [(8192, 320), (8192, 640), (2048, 1280), (8192, 2560), (2048, 5120), (131072, 1280)]
# warps of a block, blocks of a multiprocessor, loads
SWEEP = [(8, blocks, loads) for blocks in (3, 4, 5, 6) for loads in (3, 5)] + [(4, 8, 5), (4, 10, 5), (16, 2, 5)]
_LARGE = 1 << 27  # bytes, of which a graph has few calls


def timed(name: str, shape: str, size: int, call: Callable[[], Any], copied: float = 0.0) -> dict[str, Any]:
    """A row: microseconds and GB/s of a call that moves so many bytes; prints it.

    Args:
        copied: GB/s of a copy, which it is compared with.
    """
    calls = {"repeats": 2, "replays": 10} if size > _LARGE else {"repeats": 20, "replays": 20}
    microseconds = measure(call, **calls)["median"]
    rate = size / microseconds / 1e3
    row = {"kernel": name, "shape": shape, "us": microseconds, "gb_per_s": round(rate)}
    if copied:
        row["of_copy"] = round(rate / copied, 3)
    print(f"{name:28} {shape:14} {microseconds:9.2f} us {rate:6.0f} GB/s {row.get('of_copy', '')}", flush=True)
    return row


def copy_of(size: int, shape: str) -> dict[str, Any]:
    """A copy that reads and writes so many bytes together."""
    source, to = (torch.ones(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return timed("copy", shape, size, lambda: to.copy_(source))


def check(codes: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Codes differ by rounding in one of a thousand, and by no more than 1; scales in their last places."""
    difference = (codes[0].int() - wanted[0].int()).abs()
    if difference.max() > 1 or (difference > 0).float().mean() > 1e-3:
        raise SystemExit(f"wrong codes, by {difference.max()}")
    torch.testing.assert_close(codes[1], wanted[1], rtol=1e-5, atol=0)


def activations(rows: int, columns: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The rows of the kernels that write activations of one shape."""
    x, residual = (torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(columns, device="cuda", dtype=dtype) for _ in range(2))
    shape, count = f"{rows}x{columns}", rows * columns
    some = x[:999]
    check(layer_norm8.launch(some, weight, bias, 1e-5), layer_norm8.reference(some, weight, bias, 1e-5))
    ways: list[tuple[str, int, Callable[[], Any]]] = []
    for group in quantise_rows.GROUPS:
        if not group or columns % group == 0:
            check(quantise_rows.launch(some, group), quantise_rows.reference(some, group))
            ways.append((f"quantise_rows by {group}", 3, functools.partial(quantise_rows.launch, x, group)))
    ways += [
        ("layer_norm", 4, lambda: layer_norm.launch(x, weight, bias, 1e-5)),
        ("layer_norm8", 3, lambda: layer_norm8.launch(x, weight, bias, 1e-5)),
        ("add_layer_norm", 8, lambda: add_layer_norm.launch(x, residual, weight, bias, 1e-5)),
        ("add_layer_norm8", 7, lambda: add_layer_norm8.launch(x, residual, weight, bias, 1e-5)),
    ]
    copy = copy_of(3 * count, shape)
    return [copy, *(timed(name, shape, size * count, call, copy["gb_per_s"]) for name, size, call in ways)]


def weights(dtype: torch.dtype) -> list[dict[str, Any]]:
    """The rows of all weights of SDXL's transformer blocks: unchanged, and all changed."""
    given = quantisers.bank(quantisers.BLOCKS, dtype, "cuda")
    tensors, rows, scales, digests, groups = given
    count, shape = sum(weight.numel() for weight in tensors), f"{len(tensors)} weights"
    quantise_weights.launch(*given)
    for i in range(0, len(tensors), 61):
        check((rows[i], scales[i]), quantise_rows.reference(tensors[i], groups[i]))
        if not torch.equal(digests[i], quantise_weights.digest_of_rows(tensors[i], groups[i])):
            raise SystemExit("wrong digests")
    all_digests = torch.empty(0, dtype=torch.int64, device="cuda").set_(digests[0].untyped_storage())

    def changed() -> None:
        all_digests.zero_()
        quantise_weights.launch(*given)

    row = copy_of(2 * count, shape)
    found = [row, timed("unchanged", shape, 2 * count, lambda: quantise_weights.launch(*given), row["gb_per_s"])]
    found.append(timed("all changed", shape, 3 * count, changed, row["gb_per_s"]))
    return found


def sweep(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Other blocks of a multiprocessor, and other loads at a time, for the weights of SDXL."""
    found = []
    given = quantisers.bank(quantisers.BLOCKS, dtype, "cuda")
    size = 2 * sum(weight.numel() for weight in given[0])
    for warps, blocks, loads in SWEEP:
        values = {"_WARPS": warps, "_BLOCKS": blocks, "_LOADS": loads}
        before = {name: getattr(quantise_weights, name) for name in values}
        try:
            for name, value in values.items():
                setattr(quantise_weights, name, value)
            quantise_weights.launch(*given)
            name = f"{warps} warps, {blocks} blocks"
            found.append(timed(name, f"{loads} loads", size, lambda: quantise_weights.launch(*given)))
        finally:
            for name, value in before.items():
                setattr(quantise_weights, name, value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--sweep", action="store_true", help="try other launches of quantise_weights too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs an NVIDIA GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    head = machine.describe()
    print(json.dumps(head))
    dtype = getattr(torch, options.dtype)
    rows = [row for shape in SHAPES for row in activations(*shape, dtype)] + weights(dtype)
    rows += sweep(dtype) if options.sweep else []
    if options.out is not None:
        records.write(options.out, {**head, "dtype": options.dtype, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
