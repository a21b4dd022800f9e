"""Attention whose products of queries and keys may be in 8 bits: who computes it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.support import heads
from sfast_ext.kernels.attention import attention, mma_attention
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend import choices, triton_runtime
from sfast_ext.kernels.backend.choices import Choices, Memory
from sfast_ext.kernels.eight_bits import mma_attention8

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MANY = (1, 2, 8, 200, 40)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How the kernel in 8 bits was asked for, call by call; its results are PyTorch's, and a little off."""
    found: list[Any] = []

    def reference(q, k, v, scale=None):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scale).to(q.dtype)

    def launch(q, k, v, scale, half_sums=False):
        found.append(half_sums)
        return off[0] * reference(q, k, v, scale=scale)

    off = [1.04]
    launch.off = off  # type: ignore[attr-defined]
    put = monkeypatch.setattr
    put(Operands, "by_torch", lambda o: reference(*o.unmasked[:3], scale=o.scale))
    put(mma_attention8, "launch", launch)
    put(mma_attention8, "accepts", lambda q, k, v, scale: None if k.shape[2] > 160 else "few keys")
    put(mma_attention, "accepts", lambda *operands: "not here")
    put(attention, "_PREFERENCE", None)
    return found


def quick(monkeypatch: pytest.MonkeyPatch, in_8_bits: float) -> None:
    """A clock by which 8 bits take so many milliseconds, and PyTorch one."""

    def clock(run: Any) -> float:
        by_ours = isinstance(run, functools.partial) and run.func is mma_attention8.launch
        return in_8_bits if by_ours else 1.0

    memory = Memory(None, {})
    monkeypatch.setattr(attention, "_choices", Choices("attention", clock, lambda: True, lambda device: memory))


def fastest(*options: bool, shape: Any = MANY, dtype: torch.dtype = torch.float16, mask: Any = None) -> None:
    attention._fastest(Operands(*heads(shape, dtype, CPU), mask), *options)


@pytest.mark.parametrize(("ms", "last"), [(0.5, [False]), (2.0, [])])
def test_the_fastest_computes_it(monkeypatch, asked, ms, last):
    """What is lost by 8 bits is no reason to put it aside."""
    quick(monkeypatch, ms)
    fastest(False, True)
    assert asked == [False]  # what is expected if nothing was measured
    with choices.measuring(1.0):
        fastest(False, True)
    asked.clear()
    fastest(False, True)
    assert asked == last


def test_a_wrong_result_is(monkeypatch, asked):
    quick(monkeypatch, 0.5)
    mma_attention8.launch.off[0] = 1.2
    with choices.measuring(1.0):
        fastest(False, True)
    asked.clear()
    fastest(False, True)
    assert asked == []


def test_with_faster_sums(monkeypatch, asked):
    quick(monkeypatch, 0.5)
    fastest(True, True)
    fastest(True, True, dtype=torch.bfloat16)
    assert asked == [True, False]


def test_who_did_not_ask_for_it_has_none(monkeypatch, asked):
    quick(monkeypatch, 0.5)
    with choices.measuring(1.0):
        fastest(False, True)
        asked.clear()
        fastest(False, False)
        fastest(True)
    fastest(False)
    assert asked == []


def test_where_it_is_not_used(monkeypatch, asked):
    quick(monkeypatch, 0.5)
    fastest(False, True, shape=(1, 2, 8, 77, 40))
    fastest(False, True, mask=torch.zeros(8, 200, dtype=torch.float16))
    monkeypatch.setattr(attention, "hopper", lambda device: True)
    fastest(False, True)
    assert asked == []


def test_the_kernel_is_compiled_ahead(asked, monkeypatch):
    monkeypatch.setattr(attention, "_expected", lambda q, k: "mma")
    monkeypatch.setattr(attention, "_by_mma", lambda operands: True)
    monkeypatch.setattr(attention, "hopper", lambda device: False)
    monkeypatch.setattr(mma_attention, "launch", lambda q, *more: q)
    operands = [x.to("meta") for x in heads(MANY, torch.float16, CPU)]
    with triton_runtime.dry_run(GPU):
        attention.fallback(*operands, eight_bits=True)
        attention.fallback(*operands)
    assert asked == [False]
