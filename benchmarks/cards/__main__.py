"""python -m benchmarks.cards: what cards can reach at best, into docs/generated/cards.md and results/cards.json.

Needs no GPU: plans are captured without memory, and kernels compiled by NVRTC.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.cards import least, loops, page
from benchmarks.cards.published import CARDS
from sfast_ext.kernels.attention import mma_attention
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.eight_bits import mma8_tiles, mma_attention8, mma_conv8, mma_gemm8
from sfast_ext.kernels.linear import mma_gemm, mma_tiles

CASES = ("sd15:512x512", "sdxl:1024x1024", "anima:1024x1024", "lumina2:1024x1024", "z-image:1024x1024")
# rows of all heads and keys, as in SD 1.5 at 512x512 and SDXL at 1024x1024
ATTENTION = {40: (65536, 4096), 64: (81920, 4096), 80: (16384, 1024), 160: (4096, 256)}
RESULTS = Path(__file__).parents[1] / "results" / "cards.json"


def times(case: str) -> dict[str, Any]:
    """FLOPs and bytes by kind, and the least times on each card, of one UNet call."""
    work = least.of_plan(case)
    kinds = sorted({each.kind for each in work})
    by_kind = {
        kind: {
            "nodes": sum(each.kind == kind for each in work),
            "gflop": round(sum(each.flops for each in work if each.kind == kind) / 1e9, 1),
            "gb": round(sum(each.bytes for each in work if each.kind == kind) / 1e9, 3),
        }
        for kind in kinds
    }
    cards = {
        name: {
            "exact": {k: round(ms, 3) for k, ms in least.milliseconds(work, card).items()},
            "faster": {k: round(ms, 3) for k, ms in least.milliseconds(work, card, faster_sums=True).items()},
            "eight_bits": {k: round(ms, 3) for k, ms in least.milliseconds(work, card, eight_bits=True).items()},
            "both": {
                k: round(ms, 3)
                for k, ms in least.milliseconds(work, card, faster_sums=True, eight_bits=True).items()
            },
        }
        for name, card in CARDS.items()
    }
    return {"case": case, "kinds": by_kind, "cards": cards}


def kernels(capability: int) -> list[dict[str, Any]]:
    """The main loops of the kernels on tensor cores, as a card with 28 multiprocessors gets them."""
    found = []
    for size, (rows, keys) in ATTENTION.items():
        shape = mma_attention.shape(size, keys, rows, 28)
        # products of q and k are padded to 16, those of the probabilities and v to 8
        useful = 2 * size / (-(-size // 16) * 16 + -(-size // 8) * 8)
        for half_sums in (False, True) if size <= mma_attention.MAX_SIZE_IN_HALF else (False,):
            given = mma_attention.constants(size, shape, torch.float16, half_sums)
            what = f"heads of {size}{', faster sums' * half_sums}"
            found.append(_loop("mma_attention", what, capability, given, useful))
        # products of q and k are padded to 32, and take a quarter of the time
        given = mma_attention8.constants(size, shape, torch.float16)
        useful = 5 * size / (mma_attention8.depth(size) + 4 * size)
        found.append(_loop("mma_attention8", f"heads of {size}, 8 bits", capability, given, useful))
    for name, convolution in (("linear", False), ("3×3 convolution", True)):
        for half_sums in (False, True):
            largest = mma_tiles.shapes(divmod(capability, 10), half_sums)[0]
            given = mma_gemm.constants(largest, torch.float16, convolution, half_sums)
            found.append(_loop("mma_gemm", f"{name}{', faster sums' * half_sums}", capability, given, 1.0))
    given = mma_gemm8.constants(mma8_tiles.shapes(divmod(capability, 10))[0], torch.float16)
    found.append(_loop("mma_gemm8", "linear, 8 bits", capability, given, 1.0))
    given = mma_conv8.constants(mma8_tiles.shapes(divmod(capability, 10))[0], torch.float16)
    found.append(_loop("mma_conv8", "3×3 convolution, 8 bits", capability, given, 1.0))
    return found


def _loop(kernel: str, what: str, capability: int, given: dict[str, int], useful: float) -> dict[str, Any]:
    code, _ = nvrtc.build((nvrtc.SOURCES / f"{kernel}.cu").read_bytes(), f"sm_{capability}", given)
    loop = loops.main_loop(loops.disassembled(code))
    return {
        "kernel": kernel,
        "what": what,
        "capability": capability,
        **loop._asdict(),
        "clocks": loop.clocks,
        "useful": round(useful, 3),
        "at_most": round(useful * loop.of_the_tensor_cores, 3),
    }


def main() -> int:
    """Write both files."""
    # of Turing, whose instructions are others, there are no loops
    with_loops = sorted({card.capability for card in CARDS.values() if card.capability >= 80})
    result = {
        "cases": [times(case) for case in CASES],
        "kernels": [row for capability in with_loops for row in kernels(capability)],
    }
    records.write(RESULTS, result)
    page.write(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
