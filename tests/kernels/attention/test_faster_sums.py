"""Attention whose sums may be in half precision: who computes it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

from kernels.support import heads
from sfast_ext.kernels.attention import attention, mma_attention
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend import choices, triton_runtime
from sfast_ext.kernels.backend.choices import Choices, Memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MANY, FEW = (1, 2, 8, 200, 40), (1, 2, 8, 77, 40)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernel was asked for sums in half precision, call by call; its results are PyTorch's."""
    found: list[bool] = []

    def reference(q, k, v, scale=None):
        # PyTorch before 2.2 has none in float16 on a CPU
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scale).to(q.dtype)

    def launch(q, k, v, scale, half_sums=False):
        found.append(half_sums)
        return reference(q, k, v, scale=scale)

    monkeypatch.setattr(Operands, "by_torch", lambda o: reference(*o.unmasked[:3], scale=o.scale))
    monkeypatch.setattr(mma_attention, "launch", launch)
    monkeypatch.setattr(mma_attention, "accepts", lambda *operands: None)
    monkeypatch.setattr(attention, "_PREFERENCE", None)
    return found


def fastest(shape: tuple[int, ...], dtype: torch.dtype = torch.float16, faster_sums: bool = True) -> None:
    attention._fastest(Operands(*heads(shape, dtype, CPU)), faster_sums)


def quick(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whose clock finds this one the fastest."""

    def clock(run) -> float:
        by_ours = isinstance(run, functools.partial) and run.func is mma_attention.launch
        own = "mma, faster sums" if by_ours and run.keywords else "mma" if by_ours else choices.OWN
        return 1.0 if own == name else 2.0

    memory = Memory(None, {})
    monkeypatch.setattr(attention, "_choices", Choices("attention", clock, lambda: True, lambda device: memory))


@pytest.mark.parametrize(("name", "last"), [("mma, faster sums", [True]), ("mma", [False]), (choices.OWN, [])])
def test_the_fastest_computes_it(monkeypatch, asked, name, last):
    quick(monkeypatch, name)
    fastest(MANY)
    assert asked == [True]  # what is expected if nothing was measured
    with choices.measuring(1.0):
        fastest(MANY)
    asked.clear()
    fastest(MANY)
    assert asked == last


@pytest.mark.parametrize(
    ("shape", "dtype", "faster_sums"),
    [(MANY, torch.float16, False), (FEW, torch.float16, True), (MANY, torch.bfloat16, True)],
    ids=["not chosen", "few keys", "bfloat16"],
)
def test_sums_are_exact(monkeypatch, asked, shape, dtype, faster_sums):
    quick(monkeypatch, "mma, faster sums")
    with choices.measuring(1.0):
        fastest(shape, dtype, faster_sums)
    fastest(shape, dtype, faster_sums)
    assert asked and not any(asked)


def test_what_was_measured_without_is_no_answer(monkeypatch, asked):
    quick(monkeypatch, "mma, faster sums")
    with choices.measuring(1.0):
        fastest(MANY, faster_sums=False)
        fastest(MANY)
    asked.clear()
    fastest(MANY)
    fastest(MANY, faster_sums=False)
    assert asked == [True]  # PyTorch's was as fast as the exact one


@pytest.mark.parametrize(("shape", "wanted"), [(MANY, True), (FEW, False)], ids=["many keys", "few keys"])
def test_the_kernel_is_compiled_ahead(asked, monkeypatch, shape, wanted):
    monkeypatch.setattr(attention, "_expected", lambda q, k: "mma")
    operands = [x.to("meta") for x in heads(shape, torch.float16, CPU)]
    with triton_runtime.dry_run(GPU):
        attention.fallback(*operands, faster_sums=True)
        attention.fallback(*operands)
    assert asked == [wanted, False]
