"""xformers' kernels beside PyTorch's: which there are, and that they are asked."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels.support import randn
from sfast_ext.kernels.attention import attention, xformers_backends
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.attention.xformers_backends import candidates
from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.choices import OWN, Choices, Memory

Q, K = (2, 3, 8, 16), (2, 3, 5, 16)


def values(*shape, dtype=torch.float16, device="cpu"):
    return randn(*shape, dtype=dtype, device=torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": (1, 1, 8, 5)}, {"mask": (8, 5)}])
def test_candidates_give_what_pytorch_gives(xformers, dtype, options):
    q, k, v = (values(*shape, dtype=dtype) for shape in (Q, K, K))
    mask = values(*options["mask"], dtype=dtype) if "mask" in options else None
    causal, scale = options.get("is_causal", False), options.get("scale")
    found = candidates(Operands(q, k, v, mask, causal, scale))
    assert list(found) == ["xformers flash", "xformers cutlass"]
    wide = None if mask is None else mask.float()
    expected = attention.reference(q.float(), k.float(), v.float(), wide, causal, scale)
    if "mask" in options:
        with pytest.raises(ValueError, match="attn_bias"):
            found.pop("xformers flash")()
    for run in found.values():
        result = run()
        assert result.shape == expected.shape and result.dtype == dtype
        torch.testing.assert_close(result.float(), expected, atol=0.02, rtol=0.02)


def test_who_is_no_candidate(xformers):
    q, k = values(*Q), values(*K)
    assert candidates(Operands(q, k, k, None, False, None))
    assert not candidates(Operands(q.float(), k.float(), k.float(), None, False, None))
    assert not candidates(Operands(q[0], k[0], k[0], None, False, None))
    assert not candidates(Operands(q, k[:, :1], k[:, :1], None, False, None))
    assert not candidates(Operands(q, k, k, torch.ones(8, 5, dtype=torch.bool), False, None))


@pytest.mark.parametrize("there", [False, None])
def test_without_xformers_nothing_is_looked_for(monkeypatch, there):
    for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    if there is None:
        monkeypatch.setitem(sys.modules, "xformers", None)
    q = values(*Q)
    assert candidates(Operands(q, q, q, None, False, None)) == {}
    assert "xformers.ops" not in sys.modules


def test_the_library_asks_the_candidates(xformers, monkeypatch):
    q, k, v = (values(*shape, dtype=torch.bfloat16) for shape in (Q, K, K))
    timed = []

    def clock(run):
        run()
        timed.append(run)
        return 1.0 / len(timed)

    monkeypatch.setattr(attention, "_PREFERENCE", None)
    monkeypatch.setattr(
        attention, "_choices", Choices("attention", clock, lambda: True, lambda device: Memory(None, {}))
    )
    used = []
    op = xformers.ops.fmha.cutlass.FwOp
    applied = op.apply
    monkeypatch.setattr(op, "apply", lambda *args, **kwargs: used.append(1) or applied(*args, **kwargs))
    for _ in range(2):
        with choices.measuring(None):
            result = attention._fastest(Operands(q, k, v, scale=0.5), False)
        expected = attention.reference(q.float(), k.float(), v.float(), scale=0.5)
        torch.testing.assert_close(result.float(), expected, atol=0.02, rtol=0.02)
    assert len(timed) == 3
    # looked at, timed, and run twice
    assert len(used) == 4
    # on a CPU nobody is asked
    monkeypatch.setattr(xformers_backends, "candidates", None)
    attention.fallback(q, k, v)


def test_a_scaled_dot_product_attention_that_somebody_replaced_is_not_called(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    q = values(*Q, dtype=torch.float32)
    assert attention.fallback(q, q, q).shape == q.shape


@pytest.mark.gpu
def test_on_a_gpu_the_stand_in_is_timed_and_left(xformers, monkeypatch):
    made = Choices("attention", memory=lambda device: Memory(None, {}))
    monkeypatch.setattr(attention, "_choices", made)
    monkeypatch.setattr(attention, "_PREFERENCE", None)
    q = values(2, 8, 1024, 64, device="cuda")
    with choices.measuring(None):
        first, again = attention.fallback(q, q, q), attention.fallback(q, q, q)
    expected = attention.reference(q, q, q)
    for result in (first, again):
        torch.testing.assert_close(result, expected, atol=0.01, rtol=0.01)
    # it writes out all scores in float32
    assert list(made._chosen.values()) == [OWN]
