"""Hopper's products of 8 bits, compiled, which needs no card."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.backend.test_nvrtc import REGISTERS, SHARED, built, compiler  # noqa: F401
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.eight_bits import wgmma_gemm8
from sfast_ext.kernels.eight_bits.wgmma_gemm8 import GEGLU, KINDS, PLAIN, RESIDUAL, TILES

FIRST = TILES[0]
BY_EPILOGUE = {
    epilogue: [tile for tile in TILES if wgmma_gemm8.fits(tile, epilogue)] for epilogue in (PLAIN, RESIDUAL, GEGLU)
}
# those without a pair differ in the loads alone
EACH = [
    wgmma_gemm8.constants(tile, torch.int8, torch.float16, epilogue)
    for epilogue, tiles in BY_EPILOGUE.items()
    for tile in tiles
    if tile.pair > 1 or epilogue == RESIDUAL
]
EACH += [
    wgmma_gemm8.constants(TILES[tile], kind, torch.bfloat16, GEGLU, gate_first, approximate)
    for kind in KINDS
    for tile, gate_first, approximate in ((0, True, "none"), (0, False, "tanh"), (1, True, "tanh"))
]
if len(KINDS) > 1:
    widest = {tile.width: tile for tile in TILES}.values()
    EACH += [wgmma_gemm8.constants(tile, torch.float8_e4m3fn, torch.float16, RESIDUAL) for tile in widest]


# `make cuda-table` compiles all
@pytest.mark.long(but=range(0, 13, 2))
@pytest.mark.parametrize("given", EACH[::2], ids=lambda given: "-".join(map(str, given.values())))
def test_it_compiles(given):
    # with 192 sums of a thread, or GEGLU on 160, an address is laid aside once a tile
    registers, fixed = built("wgmma_gemm8", given, 8 if given["TEAM"] == 1 and given["WIDTH"] > 128 else 0)
    assert wgmma_gemm8.shared_bytes(given) + fixed <= SHARED
    # those that multiply take what the others give
    source = (nvrtc.SOURCES / "wgmma_gemm8.cu").read_text()
    less, more = map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", source))
    assert less * 128 + more * 256 <= registers * 384 <= REGISTERS
