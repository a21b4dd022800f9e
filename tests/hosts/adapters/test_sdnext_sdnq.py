"""UNets whose layers SDNQ quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quantised_layer import Layer
from torch import nn

from hosts.standins.sdnext import STANDINS, Host, close, hosted, pipeline

SDNQLinear = type("SDNQLinear", (Layer,), {"__module__": "sdnq.layers"})


@pytest.fixture(params=STANDINS)
def host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Host]:
    yield from hosted(monkeypatch, request.param)


def quantised(host: Host, **change: Any) -> Any:
    """The pipeline's UNet, with a layer of a block quantised."""
    host.sd_models.load_model(pipeline(levels=1))
    unet: Any = host.modeldata.model_data.sd_model.unet
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    k, n = attention.to_q.weight.shape[1], attention.to_q.weight.shape[0]
    torch.manual_seed(3)
    attention.to_q = SDNQLinear(k, n, bias=False, dtype=torch.float32, **change)
    unet.quantization_method = "sdnq"
    return attention


def test_int8_with_products_of_integers_is_accelerated(host: Host) -> None:
    attention = quantised(host)
    expected = host.stock()
    close(host.image(), expected)
    assert host.captures() == 1
    # a LoRA is added to the dequantised weight, which is quantised again
    layer = attention.to_q
    layer.weight = nn.Parameter(layer.weight.t().roll(1, 1).t(), requires_grad=False)
    layer.scale.mul_(1.5)
    changed = host.image()
    assert host.captures() == 1 and (changed - expected).abs().max() > 1e-4
    close(changed, host.stock())


OTHERS = [
    ("weights_dtype", "uint4"), ("quantized_matmul_dtype", "float8_e4m3fn"), ("use_quantized_matmul", False),
    ("re_quantize_for_matmul", True), ("use_hadamard", True), ("use_codebook", True), ("is_packed", True),
]  # fmt: skip


@pytest.mark.parametrize("name, value", OTHERS)
def test_another_format_is_named(host: Host, name: str, value: Any) -> None:
    attention = quantised(host)
    setattr(attention.to_q.sdnq_dequantizer, name, value)
    expected = host.stock()
    close(host.image(), expected)
    named = value if isinstance(value, str) else f"{name}: {value}"
    assert f"the model is quantised (SDNQ, {named})" in host.reasons()
    assert host.captures() == 0


@pytest.mark.parametrize("name", ["svd_up", "svd_down", "zero_point"])
def test_what_is_added_is_named(host: Host, name: str) -> None:
    setattr(quantised(host).to_q, name, torch.ones(1))
    host.image()
    assert f"(SDNQ, {name})" in host.reasons()


@pytest.mark.parametrize("name", ["use_codebook", "weights_dtype"])
def test_another_release_is_named(host: Host, name: str) -> None:
    delattr(quantised(host).to_q.sdnq_dequantizer, name)
    host.image()
    assert "(SDNQ, another release)" in host.reasons()
