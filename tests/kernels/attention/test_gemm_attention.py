from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.support import heads, randn
from sfast_ext.kernels.attention import attention, gemm_attention
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend import choices, triton_runtime
from sfast_ext.kernels.backend.choices import Choices, Memory
from sfast_ext.tools.lib.exact import tf32

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# (batch, heads, queries, keys, head dimension); only the first is a VAE's
SHAPES = [(1, 1, 64, 64, 512), (2, 1, 63, 17, 264), (3, 2, 1, 5, 300), (1, 2, 37, 1, 257)]
VAE = (1, 1, 33, 33, 512)


def close(y: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, limit: float = 3e-6) -> None:
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    assert y.shape == wanted.shape and y.dtype == torch.float32
    assert float((y - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("slice_bytes", [1 << 30, 4 * 64 * 5, 1], ids=["at once", "in slices", "row by row"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], slice_bytes: int) -> None:
    monkeypatch.setattr(gemm_attention, "SLICE_BYTES", slice_bytes)
    q, k, v = heads(shape, torch.float32, CPU)
    for scale in (None, 0.3):
        close(gemm_attention.launch(q, k, v, scale), q, k, v, scale)
    # values of another width, operands of three dimensions that are no view of four
    q, k, v = (x[:, 0].transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    close(gemm_attention.launch(q, k, v[..., :9]), q, k, v[..., :9])


def test_scores_beyond_what_an_exponential_holds() -> None:
    q, k, v = (1e3 * x for x in heads(VAE, torch.float32, CPU))
    close(gemm_attention.launch(q, k, v), q, k, v)


def test_what_it_accepts() -> None:
    q, k, v = heads(VAE, torch.float32, CPU)
    with tf32(False, True):
        assert gemm_attention.accepts(q, k, v)
    with tf32(True, True):
        assert gemm_attention.accepts(q, k, v) is None is gemm_attention.accepts(q[0], k[0], v[0])
        assert gemm_attention.accepts(q[0, 0], k[0, 0], v[0, 0])
        assert gemm_attention.accepts(q.half(), k.half(), v.half())
        assert gemm_attention.accepts(q, k, v.half())
        assert gemm_attention.accepts(q[..., :256], k[..., :256], v)
        assert gemm_attention.accepts(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
        assert gemm_attention.accepts(q[:, :, :0], k, v)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Its calls, of a card as new as RTX 30."""
    found: list[Any] = []

    def launch(*operands: Any) -> Tensor:
        found.append(operands)
        return F.scaled_dot_product_attention(*operands[:3], scale=operands[3])

    monkeypatch.setattr(gemm_attention, "launch", launch)
    monkeypatch.setattr(attention, "capability", lambda device: (8, 6))
    monkeypatch.setattr(attention, "hopper", lambda device: False)
    memory = Memory(None, {})
    monkeypatch.setattr(attention, "_choices", Choices("attention", lambda run: 1.0, lambda: True, lambda _: memory))
    return found


def attend(shape: tuple[int, ...] = VAE, mask: Tensor | None = None, is_causal: bool = False) -> None:
    attention._fastest(Operands(*heads(shape, torch.float32, CPU), mask, is_causal, 0.1), False)


def test_it_is_expected_to_be_the_fastest(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with tf32(True, True):
        attend()
        assert len(launches) == 1 and launches[0][3] == 0.1
        attend(mask=torch.zeros(33, 33))
        attend(is_causal=True)
        attend((1, 8, 33, 33, 160))
        monkeypatch.setattr(attention, "capability", lambda device: (7, 5))
        attend()
    with tf32(False, True):
        attend()
    assert len(launches) == 1


def test_what_was_measured_is_chosen(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(run: Any) -> float:
        return 2.0 if isinstance(run, functools.partial) and run.func is gemm_attention.launch else 1.0

    monkeypatch.setattr(attention._choices, "_clock", clock)
    with tf32(True, True), choices.measuring(1.0):
        attend()
        launches.clear()
        attend()
    assert not launches


def test_torchs_backends_are_not_measured_if_all_but_one_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_PREFERENCE", (None, dict.fromkeys(["cudnn", "flash", "efficient"], [])))
    q, k, v = heads(VAE, torch.float32, CPU)
    assert not attention._backends(Operands(q, k, v))
    assert len(attention._backends(Operands(q[..., :256], k[..., :256], v))) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64 * 64, 128 * 128, 90 * 110])
def test_of_a_vae(tokens: int) -> None:
    if triton_runtime.capability(GPU) < gemm_attention.TF32_SINCE:
        pytest.skip("these tensor cores take no float32")
    q, k, v = (randn(1, 1, tokens, 512, dtype=torch.float32, device=GPU) for _ in range(3))
    with tf32(True, True):
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        y = attention.launch(q, k, v)
        more = torch.cuda.max_memory_allocated() - held
        wanted = F.scaled_dot_product_attention(q[:, :, :999].double(), k.double(), v.double())
        assert float((y[:, :, :999] - wanted).norm() / wanted.norm()) < 2e-3
    assert more < 2.2 * gemm_attention.SLICE_BYTES + 2 * q.nbytes
