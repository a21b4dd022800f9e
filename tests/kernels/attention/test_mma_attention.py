"""Attention on tensor cores of any card: on the CPU, where csrc/mma_cpu.h stands for them, and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels import cuda_on_cpu
from kernels.support import attended, close_rows, heads, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.attention import mma_attention
from sfast_ext.kernels.attention.mma_attention import Shape
from sfast_ext.kernels.backend import triton_runtime

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cpu":
        cuda_on_cpu.stand_in(monkeypatch, mma_attention)
    yield torch.device(request.param)


# batch, heads, queries, keys, head dimension
FEW_KEYS = [(2, 3, 70, 77, 40), (1, 2, 130, 80, 64), (2, 1, 65, 154, 80), (1, 1, 33, 77, 160), (2, 2, 1, 1, 8)]
FEW_KEYS += [(1, 2, 129, 4, 24), (1, 1, 500, 16, 40), (1, 1, 64, 81, 160), (1, 1, 40, 129, 88)]
MANY_KEYS = [(1, 2, 70, 300, 40), (1, 1, 300, 256, 64), (1, 1, 33, 161, 80), (1, 1, 65, 192, 128), (1, 1, 20, 200, 160)]


@pytest.mark.long(but=range(15))
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float16) for shape in FEW_KEYS + MANY_KEYS]
    + [(shape, torch.bfloat16) for shape in FEW_KEYS[::3] + MANY_KEYS[::2]],
    ids=str,
)
def test_shapes(device, dtype, shape):
    q, k, v = heads(shape, dtype, device)
    assert mma_attention.accepts(q, k, v, None) is None
    for scale in (None, 0.5):
        y = mma_attention.launch(q, k, v, scale)
        assert y.shape == q.shape and y.dtype == dtype
        assert y.transpose(1, 2).is_contiguous()  # heads side by side, for the product that follows
        close_rows(y, attended(q, k, v, scale))


@pytest.mark.parametrize("shape", [shape for shape in MANY_KEYS if shape[-1] <= 96], ids=str)
def test_sums_in_half_precision(device, shape):
    q, k, v = heads(shape, torch.float16, device)
    assert mma_attention.sums_in_half(k)
    wanted = attended(q, k, v, 0.5)
    close_rows(mma_attention.launch(q, k, v, 0.5, half_sums=True), wanted, scale=1.5)


def test_errors_of_sums_in_half_precision(device):
    """At most 1.5 times those of exact sums, or of a rounding; with large values as well, as nothing overflows."""
    q, k, v = heads((1, 1, 64, 512, 40), torch.float16, device)
    for keys in (k, 0 * k, 8 * k):
        for values in (v, (v.float() * (30000 / v.abs().amax().item())).half(), v + 4):
            wanted = attended(q, keys, values)
            exact, half = (mma_attention.launch(q, keys, values, None, half_sums=sums) for sums in (False, True))
            error, allowed = ((wide(y) - wanted).norm() / wanted.norm() for y in (half, exact))
            assert half.isfinite().all() and error <= 1.5 * max(allowed, 2**-11)


def test_sums_in_half_precision_of_scores_that_rise_a_little(device):
    """By less than what exact sums let exponentials rise to: 2**7, and as many times the largest value."""
    q, k, v = (
        torch.zeros(shape, dtype=torch.float16, device=device) for shape in ((1, 1, 64, 40), *[(1, 1, 256, 40)] * 2)
    )
    q[..., 0], v[:] = 1, 30000
    k[:, :, 64:, 0] = 7 * math.log(2)
    close_rows(mma_attention.launch(q, k, v, 1.0, half_sums=True), attended(q, k, v, 1.0))


def test_where_sums_in_half_precision_pay():
    _, few, _ = heads((1, 1, 64, mma_attention.MAX_KEYS_AT_ONCE, 40), torch.float16, torch.device("cpu"))
    _, many, _ = heads((1, 1, 64, mma_attention.MAX_KEYS_AT_ONCE + 1, 40), torch.float16, torch.device("cpu"))
    assert mma_attention.sums_in_half(many)
    assert not mma_attention.sums_in_half(few) and not mma_attention.sums_in_half(many.bfloat16())
    _, wide_heads, _ = heads((1, 1, 64, 256, 160), torch.float16, torch.device("cpu"))
    assert not mma_attention.sums_in_half(wide_heads)


@pytest.mark.parametrize(
    ("size", "capability", "tiles"),
    [(64, (7, 5), 1), (64, (8, 6), 2), (64, (12, 0), 1), (40, (7, 5), 2), (80, (12, 0), 1)],
)
def test_sums_in_half_precision_have_registers_on_every_card(size, capability, tiles):
    given = mma_attention.half_sums_shape(mma_attention.shape(size, 4096, 10**6, 28), size, capability)
    assert given.tiles == tiles and given.rows <= 2 * given.keys
    assert mma_attention.shared_bytes(size, given) <= 64 << 10


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("size", [40, 64])
def test_tiles_of_a_warp(device, monkeypatch, size, tiles):
    monkeypatch.setattr(mma_attention, "shape", lambda *given: Shape(64, tiles, 4, 2))
    q, k, v = heads((1, 1, 150, 90, size), torch.float16, device)
    close_rows(mma_attention.launch(q, k, v, None), attended(q, k, v))


@pytest.mark.parametrize(("keys", "half_sums"), [(77, False), (200, False), (200, True)])
def test_large_scores(device, keys, half_sums):
    """Maxima that rise from block to block: sums are scaled down, and not up."""
    q, k, v = heads((1, 2, 70, keys, 40), torch.float16, device)
    k = k * torch.linspace(0, 60, keys, device=device).half()[:, None]
    for some in (k, k.flip(2)):
        close_rows(mma_attention.launch(q, some, v, None, half_sums), attended(q, some, v), scale=4)


@pytest.mark.parametrize("keys", [77, 200])
def test_values_are_read_from_no_other_row_or_head(device, keys):
    """What lies beside the operands in memory is not finite."""
    size = 40
    wide = torch.full((3, 3, 80 + keys, 3, size), torch.inf, dtype=torch.float16, device=device)
    shapes = {0: 70, 1: keys, 2: keys}
    q, k, v = (wide[i, 1, 8 : 8 + rows, 1:2].transpose(0, 1)[None] for i, rows in shapes.items())
    for x in (q, k, v):
        x.copy_(randn(*x.shape, dtype=x.dtype, device=device))
    close_rows(mma_attention.launch(q, k, v, None), attended(q, k, v))


def test_strides(device):
    q, k, v = heads((2, 3, 70, 90, 40), torch.float16, device)
    for some in (q.contiguous(), q[:, :, ::2], q.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:]):
        keys = [x[:, : some.shape[1]] for x in (k.contiguous(), v)]
        close_rows(mma_attention.launch(some, *keys, None), attended(some, *keys))
    assert mma_attention.launch(q.contiguous(), k, v, None).is_contiguous()


@pytest.mark.parametrize(("keys", "half_sums"), [(77, False), (200, False), (200, True)])
def test_nan_stays_in_its_row(device, keys, half_sums):
    q, k, v = heads((1, 1, 70, keys, 64), torch.float16, device)
    first = mma_attention.launch(q, k, v, None, half_sums)
    q[0, 0, 3, 5] = float("nan")
    y = mma_attention.launch(q, k, v, None, half_sums)
    assert y[0, 0, 3].isnan().all()
    y[0, 0, 3] = first[0, 0, 3]
    assert torch.equal(y, first)


def test_what_it_does_not_take(device, monkeypatch):
    q, k, v = heads((2, 2, 70, 77, 40), torch.float16, device)

    def refused(*operands: Any, scale: float | None = None) -> bool:
        return mma_attention.accepts(*operands, scale) is not None

    assert not refused(q, k, v)
    assert refused(q, k, v, scale=0.0) and refused(q, k, v, scale=-1.0)
    assert refused(q[0], k[0], v[0])
    assert refused(q[:1], k, v)
    assert refused(q, k, v[:, :, 1:])
    assert refused(q.float(), k.float(), v.float())
    assert refused(q, k.to(torch.bfloat16), v)
    assert refused(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)))
    assert refused(q[:, :, :0], k, v)
    assert refused(*heads((1, 1, 70, 77, 20), torch.float16, device))
    assert refused(*heads((1, 1, 70, 77, 168), torch.float16, device))
    odd = randn(2, 70, 2, 48, dtype=torch.float16, device=device)[..., 4:44].transpose(1, 2)
    assert refused(odd, k, v)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (7, 5))
    assert not refused(q, k, v) and refused(*(x.bfloat16() for x in (q, k, v)))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (7, 0))
    assert refused(q, k, v)


def test_each_shape_fits_every_card():
    for size in range(8, 161, 8):
        for keys in (1, 4, 16, 77, 80, 81, 154, 160, 161, 231, 4096):
            for rows in (64, 10**6):
                given = mma_attention.shape(size, keys, rows, 28)
                assert mma_attention.shared_bytes(size, given) <= 64 << 10
                assert given.keys >= keys if given.once else given.rows <= 2 * given.keys
