"""Attention whose products of queries and keys are of 8-bit integers: on the CPU, where csrc/mma_cpu.h stands for
tensor cores, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import cuda_on_cpu
from kernels.backend.test_nvrtc import REGISTERS, built
from kernels.support import attended, close_rows, half_dtype, heads, needs_nvrtc, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.attention import mma_attention
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.backend.triton_runtime import device_of
from sfast_ext.kernels.eight_bits import mma_attention8

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# batch, heads, queries, keys, head dimension
SHAPES = [(1, 2, 70, 300, 40), (2, 1, 150, 256, 64), (1, 1, 33, 161, 80), (1, 1, 65, 192, 128), (1, 1, 20, 200, 160)]
SHAPES += [(1, 1, 1, 163, 8), (1, 1, 40, 200, 24), (1, 2, 130, 162, 96), (1, 1, 20, 199, 88), (1, 1, 30, 255, 136)]

TIES = {"cpu": 1.5, "cuda": 6}
"""Times the error of rounding: on a GPU a code in the middle of two numbers may be the other one."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cpu":
        cuda_on_cpu.stand_in(monkeypatch, mma_attention)
        monkeypatch.setattr(mma_attention8, "multiprocessors", lambda device: 2)
    yield torch.device(request.param)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that kernels get holds NaN, or codes that are not theirs."""
    empty = torch.empty

    def spoilt(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(99)

    monkeypatch.setattr(torch, "empty", spoilt)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows once they are quantised, by a factor as the kernel has it: another rounding would decide ties. On a GPU the
    product is not rounded before the code is, as both are one fused operation there."""
    largest = x.float().abs().amax(-1, keepdim=True)
    factor = torch.tensor(127.0) / largest
    product = x.double() * factor.double() if x.is_cuda else x.float() * factor
    return product.round().double() * (largest / 127).double()


def emulated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """What the kernel computes, in float64 once operands are quantised; codes of keys: `test_codes_of_keys`."""
    codes, factors = mma_attention8.keys_in_8_bits(k)
    keys = codes[..., : k.shape[3]].double() * factors[..., : k.shape[2], None].double()
    return attended(rounded(q), keys, v, scale)


@pytest.mark.thinned("shape", "dtype")
@half_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape, monkeypatch):
    q, k, v = heads(shape, dtype, device)
    assert mma_attention8.accepts(q, k, v, None) is None
    poisoned(monkeypatch)
    for scale in (None, 0.5):
        y = mma_attention8.launch(q, k, v, scale)
        assert y.shape == q.shape and y.dtype == dtype and y.transpose(1, 2).is_contiguous()
        close_rows(y, emulated(q, k, v, scale), scale=TIES[device.type])
    exact = attended(q, k, v)
    assert (wide(mma_attention8.launch(q, k, v, None)) - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.long(but=[0, 3, 4])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] <= 96], ids=str)
def test_sums_in_half_precision(device, shape):
    q, k, v = heads(shape, torch.float16, device)
    close_rows(mma_attention8.launch(q, k, v, 0.5, half_sums=True), emulated(q, k, v, 0.5), scale=2 * TIES[device.type])


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("size", [40, 64])
def test_tiles_of_a_warp(device, monkeypatch, size, tiles):
    monkeypatch.setattr(mma_attention, "shape", lambda *given: mma_attention.Shape(64, tiles, 4, 2))
    q, k, v = heads((1, 1, 150, 290, size), torch.float16, device)
    close_rows(mma_attention8.launch(q, k, v, None), emulated(q, k, v), scale=TIES[device.type])


def test_codes_of_keys(device, monkeypatch):
    """Each is the nearest, of what is left without the mean; none is left out, and zeros follow."""
    for shape in ((2, 3, 1, 300, 40), (1, 1, 1, 161, 64), (1, 2, 1, 1030, 160), (1, 1, 1, 200, 80)):
        _, k, _ = heads(shape, torch.float16, device)
        k = k + 20 * randn(1, shape[1], 1, shape[-1], dtype=torch.float16, device=device)
        poisoned(monkeypatch)
        codes, factors = mma_attention8.keys_in_8_bits(k)
        monkeypatch.undo()
        if device.type == "cpu":
            cuda_on_cpu.stand_in(monkeypatch, mma_attention)
        wanted, scale = mma_attention8.quantised_keys(k)
        size, keys = shape[-1], shape[3]
        assert not codes[..., size:].any() and (factors[..., :keys].view(torch.int32) & 3 == 0).all()
        torch.testing.assert_close(factors[..., :keys], scale, rtol=1e-4, atol=0)
        assert (codes[..., :size].int() - wanted.int()).abs().max() <= 1
        assert (codes[..., :size] != wanted).float().mean() < 0.02 and codes.abs().amax(-1).min() == 127


def test_what_keys_have_in_common_costs_nothing(device):
    """A vector that is added to all keys: the softmax is the same, and so is the error."""
    q, k, v = heads((1, 1, 64, 300, 64), torch.float16, device)
    common = 16 * randn(1, 1, 1, 64, dtype=torch.float16, device=device)
    exact = [attended(q, keys, v) for keys in (k, k + common)]
    found = [mma_attention8.launch(q, keys, v, None) for keys in (k, k + common)]
    errors = [(wide(y) - wanted).norm() / wanted.norm() for y, wanted in zip(found, exact)]
    assert errors[1] < 1.5 * errors[0] < 0.05


@pytest.mark.parametrize("half_sums", [False, True])
def test_scores_that_rise(device, half_sums):
    """Maxima that rise from block to block, and fall."""
    q, k, v = heads((1, 2, 70, 200, 40), torch.float16, device)
    k = k * torch.linspace(0, 20, 200, device=device).half()[:, None]
    for some in (k, k.flip(2)):
        close_rows(mma_attention8.launch(q, some, v, None, half_sums), emulated(q, some, v), scale=6)


def test_the_largest_products(device):
    """160 products of 127 and 127: the sum still fits the bits behind the zero."""
    q = torch.full((1, 1, 64, 160), 2.0, dtype=torch.float16, device=device)
    _, k, v = heads((1, 1, 64, 192, 160), torch.float16, device)
    k = torch.where(torch.arange(192, device=device)[:, None] % 2 == 0, 1.0, -1.0).half().expand_as(k).contiguous()
    for sign in (1, -1):
        close_rows(mma_attention8.launch(sign * q, k, v, 0.01), attended(sign * q, k, v, 0.01))


def test_values_are_read_from_no_other_row_or_head(device):
    """What lies next to the operands in memory is not finite."""
    memory = torch.full((3, 3, 280, 3, 40), torch.inf, dtype=torch.float16, device=device)
    q, k, v = (memory[i, 1, 8 : 8 + rows, 1:2].transpose(0, 1)[None] for i, rows in enumerate((70, 200, 200)))
    for x in (q, k, v):
        x.copy_(randn(*x.shape, dtype=x.dtype, device=device))
    close_rows(mma_attention8.launch(q, k, v, None), emulated(q, k, v), scale=TIES[device.type])


def test_values_that_are_not_finite(device):
    q, k, v = heads((1, 2, 70, 200, 64), torch.float16, device)
    first = mma_attention8.launch(q, k, v, None)
    for spoilt in (float("nan"), float("inf")):
        queries, keys = q.clone(), k.clone()
        queries[0, 0, 3, 5] = spoilt
        y = mma_attention8.launch(queries, k, v, None)
        assert y[0, 0, 3].isnan().all()
        y[0, 0, 3] = first[0, 0, 3]
        assert torch.equal(y, first)
        keys[0, 1, 7, 5] = spoilt
        y = mma_attention8.launch(q, keys, v, None)
        assert y[0, 1].isnan().all() and torch.equal(y[0, 0], first[0, 0])
    zeros = mma_attention8.launch(0 * q, 0 * k, v, None)
    close_rows(zeros, attended(0 * q, 0 * k, v))


def test_what_it_does_not_take(device):
    def refused(*shape: int) -> bool:
        return mma_attention8.accepts(*heads(shape, torch.float16, device), None) is not None

    assert not refused(1, 2, 70, 161, 40)
    assert refused(1, 2, 70, 160, 40) and refused(1, 2, 70, 200, 20) and refused(1, 2, 70, 200, 168)
    q, k, v = heads((1, 2, 70, 200, 40), torch.float16, device)
    assert mma_attention8.accepts(q, k[:, :1], v, None)
    assert mma_attention8.accepts(q.float(), k.float(), v.float(), None)
    health.disable("mma_attention8", device_of(q), "it failed")
    assert mma_attention8.accepts(q, k, v, None) == "it failed" and mma_attention.accepts(q, k, v, None) is None
    health.clear()


def test_each_shape_fits_every_card():
    for size in range(8, 161, 8):
        for rows in (64, 10**6):
            given = mma_attention.shape(size, 4096, rows, 28)
            assert given.rows * (size // 8 | 1) * 16 <= mma_attention8.shared_bytes(size, given) <= 64 << 10
            assert mma_attention8._FACTORS % given.keys == 0


@pytest.mark.long(but=[2, 3])
@pytest.mark.parametrize("size", [40, 64, 80, 128, 160])
def test_it_compiles(monkeypatch, tmp_path, size):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    needs_nvrtc()
    for number, rows in enumerate({40: (1, 10**6), 64: (1, 10**6)}.get(size, (1,))):
        of = mma_attention.shape(size, 4096, rows, 28)
        # exact sums for one of both cards, and those in half precision for the other
        one, other = ((75, 86), (86, 75))[(size // 8 + number) % 2]
        cases = [(one, torch.float16, of, False)]
        cases += [(86, torch.bfloat16, of, False)] * (size == 64 and rows == 1)
        if size <= mma_attention.MAX_SIZE_IN_HALF:
            cases += [(other, torch.float16, mma_attention.half_sums_shape(of, size, divmod(other, 10)), True)]
        for capability, dtype, shape, half_sums in cases:
            given = mma_attention8.constants(size, shape, dtype, half_sums)
            registers, _ = built("mma_attention8", given, architecture=f"sm_{capability}")
            assert registers * 32 * shape.warps * shape.blocks <= REGISTERS
    built("quantise_keys", mma_attention8.keys_constants(size, torch.float16), architecture="sm_75")
