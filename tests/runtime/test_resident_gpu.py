"""Weights of which the GPU has the 8-bit integers alone, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sfast_ext.runtime import eight_bits

from .test_eight_bits_gpu import CONFIG, Pair

pytestmark = pytest.mark.gpu
RESIDENT = replace(CONFIG, resident=True)


@pytest.fixture
def pair() -> Iterator[Pair]:
    device = torch.device("cuda", torch.cuda.current_device())
    if eight_bits.unsupported(device, {torch.float16}) is not None:
        pytest.skip("this GPU has no products of 8-bit integers")
    with torch.no_grad():
        found = Pair(RESIDENT)
        yield found
        found.acc.release()
        assert all(p.is_cuda for p in found.ours.parameters())


def away(pair: Pair) -> int:
    return sum(p.nbytes for p in pair.ours.parameters() if not p.is_cuda)


def test_half_precision_weights_leave_the_gpu_and_are_followed(pair: Pair) -> None:
    pair.error()
    before = max(pair.error() for _ in range(3))
    size = sum(p.nbytes for p in pair.twin.parameters())
    assert before < 0.04 and away(pair) > 0.3 * size
    told = pair.acc.status()["eight_bits"]
    assert told["layers"] > 40 and told["reason"] is None
    held = size - away(pair) + told["bytes"]
    print(f"{held / size:.3f} of half precision")
    for step in range(4):
        for unet in (pair.ours, pair.twin):
            for name, parameter in unet.named_parameters():
                if "transformer_blocks" in name and parameter.dim() == 2:
                    (parameter.data if step == 3 else parameter)[step::3] *= -0.5
        if step == 3:
            # torch does not count that write, and more than `AUDITED_BYTES` may have changed
            pair.acc.new_generation()
        assert pair.error() < 2 * before
    for _ in range(12):
        assert pair.error() < 2 * before
    assert pair.acc.report.counter("captures") == 1 and pair.acc.report.counter("errors") == 0


def test_off_and_on(pair: Pair) -> None:
    for _ in range(2):
        pair.acc.configure(RESIDENT)
        pair.error()
        assert pair.error() < 0.04 and away(pair)
        pair.acc.configure(replace(RESIDENT, eight_bits=False))
        assert not away(pair)
        pair.error()
        assert pair.error() < 0.01
    assert pair.acc.report.counter("errors") == 0
