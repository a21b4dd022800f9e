from __future__ import annotations

from collections.abc import Callable
from typing import Any

import eight_bit_kernels
import pytest
import torch
from quantised_layer import BF16, K, Layer, N
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.capture.functionalize import functionalize
from sfast_ext.kernels.eight_bits import geglu8, linear8
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.cse import cse
from sfast_ext.passes.geglu import geglu
from sfast_ext.passes.layer_norm import add_layer_norm, layer_norm
from sfast_ext.passes.quantised_linear import quantised_geglu, quantised_linear, quantised_norm

from .support import HALF_ON_THE_CPU, Traced, randn


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bit_kernels.available(monkeypatch, by_triton=True)


def recorded(module: nn.Module, *inputs: Tensor) -> Traced:
    """As a capture gives it to the passes: without operations in place."""
    traced = Traced(module, *inputs)
    functionalize(traced.gm)
    return traced


def tokens(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return randn(*size).to(dtype)


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(40, K), (2, 20, K), (2, 3, 7, K), (1, 17, K)])
@pytest.mark.parametrize("least", [-128, -127])
def test_a_layer(operator: bool, bias: bool, size: tuple[int, ...], least: int) -> None:
    traced = recorded(Layer(bias=bias, operator=operator, least=least), tokens(*size))
    assert traced.rewrite(cleanup, cse, quantised_linear) == 1
    ops = traced.ops()
    assert ops["linear8"] == ops["quantise_rows"] == 1 and not ops["_int_mm"] + ops["amax"] + ops["scaled_mm"]
    # to the bit but for the last rounding of the result
    assert traced.error() < 2e-3


@pytest.mark.skipif(not HALF_ON_THE_CPU, reason="this torch multiplies no halves on a CPU")
def test_a_layer_in_float16() -> None:
    traced = recorded(Layer(dtype=torch.float16), tokens(2, 20, K, dtype=torch.float16))
    assert traced.rewrite(cleanup, cse, quantised_linear) == 1
    assert traced.error() < 3e-4


def test_rows_of_zeros_and_of_values_that_are_not_finite() -> None:
    x = tokens(40, K)
    x[3], x[5, 7], x[9, 2] = 0, float("nan"), float("inf")
    layer = Layer()
    traced = recorded(layer, x)
    assert traced.rewrite(cleanup, cse, quantised_linear) == 1
    (y,) = traced.outputs()
    assert torch.equal(y[3], layer.bias) and y[5].isnan().all() and y[9].isnan().all()
    assert y.isnan().sum() == 2 * N


OTHERS: list[dict[str, Any]] = [
    {"levels": 128}, {"levels": 126.0}, {"least": -120}, {"dim": (0, 1)}, {"contiguous": True}, {"zero_point": True},
    {"more": {"value": 2}}, {"result": torch.float32}, {"n": 40}, {"k": 72}, {"bias": True, "dtype": torch.float32},
]  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_other_formats_stay(change: dict[str, Any]) -> None:
    layer = Layer(**change)
    traced = recorded(layer, tokens(40, layer.weight.shape[0]))
    assert traced.rewrite(cleanup, cse, quantised_linear) == 0
    assert traced.ops()["_int_mm"] == 1
    assert traced.error() == 0


@pytest.mark.parametrize("change", [c for c in OTHERS if not {"zero_point", "more", "result"} & set(c)])
def test_other_formats_of_the_operator_stay(change: dict[str, Any]) -> None:
    layer = Layer(operator=True, **change)
    traced = recorded(layer, tokens(40, layer.weight.shape[0]))
    assert traced.rewrite(cleanup, cse, quantised_linear) == 0
    assert traced.ops()["scaled_mm"] == 1


class Net(nn.Module):
    def __init__(self, body: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.body = nn.ModuleList(layers), body
        self.norm = nn.LayerNorm(K).to(BF16)

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def test_layers_of_one_input_quantise_it_once_and_the_norm_does_it() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        y = net.norm(x)
        return net.layers[0](y) * net.layers[1](y) + net.layers[2](y)

    traced = recorded(Net(body, *(Layer() for _ in range(3))), tokens(2, 20, K))
    traced.rewrite(cleanup, cse, quantised_linear, layer_norm)
    assert traced.ops()["quantise_rows"] == 1 and traced.ops()["linear8"] == 3
    assert traced.rewrite(quantised_norm) == 1
    ops = traced.ops()
    assert ops["layer_norm8"] == 1 and not ops["layer_norm"] + ops["quantise_rows"]
    # the norm quantises what it has not rounded to half precision: some codes are the next
    assert traced.error() < 1.2e-2


def test_a_sum_and_its_norm() -> None:
    def body(net: Net, x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual
        return net.layers[0](net.norm(total)) + total[..., :1]

    traced = recorded(Net(body, Layer()), tokens(2, 20, K), tokens(2, 20, K) * 2)
    traced.rewrite(cleanup, cse, quantised_linear, add_layer_norm, quantised_norm)
    assert traced.ops()["add_layer_norm8"] == 1 and not traced.ops()["quantise_rows"]
    assert traced.error() < 6e-3


def test_a_norm_that_others_read_stays() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        y = net.norm(x)
        return net.layers[0](y) + y.sum()

    traced = recorded(Net(body, Layer()), tokens(2, 20, K))
    assert traced.rewrite(cleanup, cse, quantised_linear, layer_norm, quantised_norm) == 0
    assert traced.ops()["layer_norm"] == traced.ops()["quantise_rows"] == 1


@pytest.mark.parametrize("used_again", [False, True])
def test_geglu(used_again: bool) -> None:
    def body(net: Net, x: Tensor) -> Any:
        y = net.layers[0](x)
        value, gate = y.chunk(2, -1)
        z = value * F.gelu(gate)
        return (z, y) if used_again else z

    traced = recorded(Net(body, Layer(n=128)), tokens(2, 20, K))
    assert traced.rewrite(cleanup, cse, quantised_linear, cleanup, geglu, quantised_geglu) == (not used_again)
    assert len(traced.launches(geglu8)) == (not used_again) and len(traced.launches(linear8)) == used_again
    assert traced.error() < 6e-3


def test_an_input_that_is_written_later_stays() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        x = x.sin()
        y = net.layers[0](x)
        x.add_(1)
        return y + x.sum()

    traced = recorded(Net(body, Layer()), tokens(40, K))
    assert traced.rewrite(cleanup, cse, quantised_linear) == 0
