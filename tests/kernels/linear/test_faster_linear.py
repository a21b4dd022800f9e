"""A linear layer whose sums may be in half precision: who computes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from sfast_ext.kernels.backend import choices, triton_runtime
from sfast_ext.kernels.backend.choices import Choices, Memory
from sfast_ext.kernels.conv import faster_conv2d
from sfast_ext.kernels.linear import faster_linear, mma_gemm

GPU = torch.device("cuda", 0)
randn = torch.randn


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the kernel was asked for; its results are PyTorch's plus 2**-10."""
    found: list[str] = []

    def linear(x, weight, bias):
        found.append("linear")
        return F.linear(x, weight, bias) + 2**-10

    def conv2d(x, weight, bias, stride=1):
        found.append(f"conv2d, stride {stride}")
        return F.conv2d(x, weight, bias, padding=1, stride=stride) + 2**-10

    monkeypatch.setattr(mma_gemm, "linear", linear)
    monkeypatch.setattr(mma_gemm, "conv2d", conv2d)
    monkeypatch.setattr(mma_gemm, "linear_readable", lambda *operands: True)
    monkeypatch.setattr(mma_gemm, "conv2d_readable", lambda *operands: True)
    yield found


def quick(monkeypatch: pytest.MonkeyPatch, module, faster: bool) -> None:
    def clock(run) -> float:
        return 1.0 if ("mma_gemm" in run.func.__module__ or "test_" in run.func.__module__) == faster else 2.0

    memory = Memory(None, {})
    monkeypatch.setattr(module, "_choices", Choices("sums", clock, lambda: True, lambda device: memory))


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_one_computes_it(monkeypatch, asked, faster):
    quick(monkeypatch, faster_linear, faster)
    x, weight, bias = randn(5, 64), randn(8, 64), randn(8)
    plain = F.linear(x, weight, bias)
    assert torch.equal(faster_linear.launch(x, weight, bias), plain + 2**-10)  # not measured yet
    with choices.measuring(1.0):
        faster_linear.launch(x, weight, bias)
    assert torch.equal(faster_linear.launch(x, weight, bias), plain + 2**-10 if faster else plain)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_of_convolutions_as_well(monkeypatch, asked, faster, stride):
    quick(monkeypatch, faster_conv2d, faster)
    x, weight = randn(1, 32, 6, 5), randn(8, 32, 3, 3)
    plain = F.conv2d(x, weight, padding=1, stride=stride)
    with choices.measuring(1.0):
        faster_conv2d.launch(x, weight, None, stride)
    y = faster_conv2d.launch(x, weight, None, stride)
    assert torch.equal(y, plain + 2**-10 if faster else plain)


def test_the_kernel_is_compiled_ahead(asked):
    x, weight = torch.empty(5, 64, device="meta"), torch.empty(8, 64, device="meta")
    with triton_runtime.dry_run(GPU):
        faster_linear.launch(x, weight)
        faster_conv2d.launch(torch.empty(1, 32, 6, 5, device="meta"), torch.empty(8, 32, 3, 3, device="meta"))
    assert asked == ["linear", "conv2d, stride 1"]


def test_what_the_kernel_does_not_take_is_pytorchs():
    x, weight = randn(5, 64), randn(8, 64)
    assert torch.equal(faster_linear.launch(x, weight), F.linear(x, weight))
    x, weight = randn(1, 32, 6, 5), randn(8, 32, 3, 3)
    assert torch.equal(faster_conv2d.launch(x, weight), F.conv2d(x, weight, padding=1))
