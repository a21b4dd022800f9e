"""Tests for what benchmarks.transformers puts in place of PyTorch's operations with `--as`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks import transformers as bench
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.linear import mma_gemm, mma_linear


@pytest.mark.parametrize("taken", [False, True])
def test_linear_layers_for_ampere_never_call_themselves(monkeypatch, taken):
    if taken:
        monkeypatch.setattr(mma_gemm, "accepts_linear", lambda *given: None)
    monkeypatch.setattr(mma_linear, "launch", lambda x, weight, bias=None: F.linear(x, weight, bias) + 1)
    linear, x, weight = F.linear, torch.randn(1, 2 * mma_gemm.MIN_ROWS, 68), torch.randn(24, 68)
    for _ in range(2):
        with bench.eager_for_ampere():
            for _ in range(2):
                found = torch.nn.functional.linear(x, weight)
        torch.testing.assert_close(found, linear(x, weight) + taken)
    assert F.linear is linear


def test_attentions_for_ampere_take_a_mask_and_are_never_cudnns():
    before = attention._PREFERENCE
    q = torch.randn(2, 9, 16)  # not taken by the fused kernel on a CPU
    want = F.scaled_dot_product_attention(q, q, q, torch.ones(9, 9, dtype=torch.bool).tril())
    with bench.for_ampere(), bench.eager_for_ampere():
        found = F.scaled_dot_product_attention(q, q, q, torch.ones(9, 9, dtype=torch.bool).tril())
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert "cudnn" not in attention._PREFERENCE[1]
        for order in attention._PREFERENCE[1].values():
            assert bench.SDPBackend.CUDNN_ATTENTION not in order and bench.SDPBackend.EFFICIENT_ATTENTION in order
    torch.testing.assert_close(found, want)
    assert attention._PREFERENCE is before and torch.backends.cuda.cudnn_sdp_enabled()
