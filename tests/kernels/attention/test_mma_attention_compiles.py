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


# each for one of both cards
@pytest.mark.parametrize(
    ("size", "shape", "card"), [(*case, (75, 86)[i % 2]) for i, case in enumerate(sorted(SHAPES))], ids=str
)
def test_mma_attention_compiles(monkeypatch, tmp_path, size, shape, card):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    cases = [(card, torch.float16, shape, False)]
    cases += [(86, torch.bfloat16, shape, False)] * (size == 64)
    if not shape.once and size <= 96:
        cases.append((card, torch.float16, mma_attention.half_sums_shape(shape, size, divmod(card, 10)), True))
    for capability, dtype, of, half_sums in cases:
        given = mma_attention.constants(size, of, dtype, half_sums)
        registers, _ = built("mma_attention", given, architecture=f"sm_{capability}")
        assert registers * 32 * of.warps * of.blocks <= REGISTERS
