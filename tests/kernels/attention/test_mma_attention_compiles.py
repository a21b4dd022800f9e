"""csrc/mma_attention.cu, compiled for the oldest card that it runs on and for a common one."""

from __future__ import annotations

import pytest
import torch

from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import needs_nvrtc
from sfast_ext.kernels.attention import mma_attention

SHAPES = {
    (size, mma_attention.shape(size, keys, rows, 28))
    for size in (40, 64, 80, 160)
    for keys in (77, 4096)
    for rows in (1, 10**6)
}


@pytest.mark.parametrize(("size", "shape"), sorted(SHAPES), ids=str)
def test_mma_attention_compiles(monkeypatch, tmp_path, size, shape):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    cases = [(75, torch.float16, shape, False), (86, torch.float16, shape, False)]
    cases += [(86, torch.bfloat16, shape, False)] * (size == 64)
    if not shape.once and size <= 96:
        in_half = ((n, mma_attention.half_sums_shape(shape, size, divmod(n, 10))) for n in (75, 86))
        cases += [(capability, torch.float16, given, True) for capability, given in in_half]
    for capability, dtype, of, half_sums in cases:
        given = mma_attention.constants(size, of, dtype, half_sums)
        registers, _ = built("mma_attention", given, architecture=f"sm_{capability}")
        assert registers * 32 * of.warps * of.blocks <= REGISTERS
