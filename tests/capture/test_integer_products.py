"""SDNQ's products by Triton, as a graph records them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from foreign import ops
from quantised_layer import BF16, K, Layer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import Config, accelerate
from sfast_ext.capture import integer_products
from sfast_ext.capture.fake_trace import record

INT_MM = torch.ops.aten._int_mm.default
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.detach.default)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def launched(a: Tensor, b: Tensor, *scales: Tensor, bias: Any = None, out_dtype: Any = torch.int32) -> Tensor:
    """What a Triton kernel computes; tensors without memory make it fail."""
    assert not isinstance(a, FakeTensor), "launched on a fake tensor"
    y = a.double() @ b.double()
    for scale in scales:
        y = y * scale
    return (y if bias is None else y + bias).to(out_dtype)


def library(monkeypatch: pytest.MonkeyPatch, home: str, name: str) -> Callable[..., Any]:
    """A module with a function that launches a Triton kernel."""
    module: Any = ModuleType(home)
    # a function for each test: its code is replaced in a capture
    exec(f"def {name}(*args, **kwargs):\n    return launched(*args, **kwargs)", {"launched": launched}, vars(module))
    vars(module)[name].__globals__["launched"] = launched
    monkeypatch.setitem(sys.modules, home, module)
    return vars(module)[name]  # type: ignore[no-any-return]


class ByTriton(Layer):
    """The layer with a product that a function of the library computes."""

    def __init__(self, product: Callable[..., Tensor], scaled: bool, **change: Any) -> None:
        super().__init__(**change)
        self.product, self.scaled = product, scaled

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2).float()
        scale = flat.abs().amax(-1, keepdim=True).div_(127)
        codes = torch.div(flat, scale).round_().clamp_(-128, 127).to(torch.int8)
        if self.scaled:
            y = self.product(codes, self.weight, scale, self.scale, bias=self.bias, out_dtype=x.dtype)
        else:
            y = self.product(codes, self.weight, out_dtype=torch.float32).mul_(scale).mul_(self.scale).to(x.dtype)
        return y.view(*x.shape[:-1], -1)


HOMES = {
    "sdnq.kernel_wrappers": ("int_scaled_mm_func", "int_mm_func"),
    "modules.sdnq.kernel_wrappers": ("int_scaled_mm_func", "int_mm_func"),
    "sdnq.kernels.triton_scaled_mm": ("sdnq_scaled_mm",),
    "modules.sdnq.kernels.triton_scaled_mm": ("sdnq_scaled_mm",),
    "some.host.sdnq.kernels.triton_mm": ("sdnq_triton_mm",),
}
FUNCTIONS = [(home, name) for home, names in HOMES.items() for name in names]


@pytest.mark.parametrize("home, name", FUNCTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_recorded_as_without_triton(monkeypatch: pytest.MonkeyPatch, home: str, name: str, bias: bool) -> None:
    scaled = "scaled" in name
    torch.manual_seed(0)
    theirs, x = Layer(bias=bias and scaled), torch.randn(2, 20, K).to(BF16)
    torch.manual_seed(0)
    ours = ByTriton(library(monkeypatch, home, name), scaled, bias=bias and scaled)
    graphs = [record(lambda t, m=m: [m(t)], [x], m) for m in (ours, theirs)]  # type: ignore[misc]
    assert INT_MM in ops(graphs[0].graph) and torch.equal(graphs[0](x)[0], graphs[1](x)[0])
    if scaled:
        # so that the pass knows it
        kinds = [[op for op in ops(graph.graph) if op not in VIEWS] for graph in graphs]
        assert kinds[0] == kinds[1]
    torch.testing.assert_close(graphs[0](x)[0], ours(x))


OTHERS = ["mysdnq.kernel_wrappers", "sdnq.other", "sdnq_tools.kernel_wrappers", "sdnq.kernels.kernel_wrappers"]


@pytest.mark.parametrize("home", OTHERS)
def test_functions_of_other_modules_are_left(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    function = library(monkeypatch, home, "int_scaled_mm_func")
    assert function not in integer_products.recorders()


def test_operands_that_are_no_integers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    function = library(monkeypatch, "sdnq.kernels.triton_scaled_mm", "sdnq_scaled_mm")
    recorder = integer_products.recorders()[function]  # type: ignore[index]
    a, b, one = torch.randn(4, 8), torch.randn(8, 6), torch.ones(1)
    torch.testing.assert_close(recorder(function, a, b, one, one, None, torch.float32), a @ b)
    plain = library(monkeypatch, "sdnq.kernels.triton_mm", "sdnq_triton_mm")
    codes = torch.ones(20, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)
    recorder = integer_products.recorders()[plain]  # type: ignore[index]
    assert recorder(plain, *codes).dtype == torch.int32
    assert recorder(plain, *codes, bias=torch.ones(8), out_dtype=torch.float32)[0, 0] == 9


def test_a_model_is_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    function = library(monkeypatch, "sdnq.kernel_wrappers", "int_scaled_mm_func")
    model = nn.Sequential(ByTriton(function, True), nn.GELU(), ByTriton(function, True, k=96, n=64))
    x = torch.randn(2, 20, K).to(BF16)
    expected = model(x)
    accelerator = accelerate(model, Config(allow_cpu=True))
    for _ in range(2):
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    assert accelerator.report.as_dict()["counters"]["captures"] == 1 and accelerator.status()["plans"]
    # what a LoRA does: other codes and scales
    model[0].scale.mul_(2)
    model[2].weight = nn.Parameter(model[2].weight.t().roll(1, 1).t(), requires_grad=False)
    changed = model(x)
    accelerator.release()
    torch.testing.assert_close(changed, model(x), rtol=2e-2, atol=2e-2)
    assert (changed - expected).abs().max() > 0.1
