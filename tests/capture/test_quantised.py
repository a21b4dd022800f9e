"""Reasons of models whose layers a library quantised."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfast_ext import Config, accelerate

OUTSIDE = torch.ones(8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(self.conv(x).flatten(2).transpose(1, 2))


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def integers(weight):
    return (weight * 100).round().to(torch.int8)


SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Packed(nn.Parameter):
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)

class Linear(nn.Linear):
    pass

class Data(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.data.float() * 0.01, self.bias)

class AsTensor(nn.Linear):
    def forward(self, x):
        return F.linear(x, torch.Tensor._make_subclass(torch.Tensor, self.weight, False).float() * 0.01, self.bias)

class Raises(Data):
    def forward(self, x):
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            raise RuntimeError("no kernel for this tensor")
        return super().forward(x)
"""


@pytest.fixture
def library():
    """Code like that of bitsandbytes, and of layers of GGUF files, in a package of this name."""
    made = []

    def named(name):
        module = ModuleType(name)
        module.__file__ = f"{name}.py"
        for part in {name, name.partition(".")[0]}:
            sys.modules[part] = module
            made.append(part)
        exec(compile(SOURCE, f"<{name}>", "exec"), vars(module))
        return module

    yield named
    for name in made:
        sys.modules.pop(name, None)


NAMES = ["bitsandbytes", "gguf_layers", "my_quant", "hqq", "some_library", "nunchaku", "awq.kernels", "eetq.modules"]


def reasons(net, x=None):
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    x = torch.randn(2, 4, 4, 4) if x is None else x
    with torch.no_grad():
        results = [net(x) for _ in range(3)]
    accelerator.release()
    with torch.no_grad():
        assert all(torch.allclose(r, net(x), atol=1e-5) for r in results)
    return list(accelerator.report.as_dict()["reasons"]), accelerator.report.counter("captures")


@pytest.mark.long(but=[0, 1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize(
    ("name", "layer"), list(zip(NAMES, itertools.cycle(["Data", "AsTensor", "Raises"])))
)
def test_the_library_and_the_layer_are_named(library, name, layer):
    net, code = made(), library(name)
    net.inner[2].weight = code.Packed(integers(net.inner[2].weight))
    net.inner[2].__class__ = getattr(code, layer)
    (reason,), captures = reasons(net)
    package = name.partition(".")[0]
    assert reason == f"the model is quantised: its layer inner.2 by {package}; such layers are not accelerated"
    assert captures == 0


@pytest.mark.parametrize("of_layer, of_weight, said", [
    ("int8_tensorwise", "TensorWiseINT8Layout", " (int8_tensorwise)"),
    (None, "TensorCoreFP8Layout", " (TensorCoreFP8Layout)"), ("mxfp8", None, " (mxfp8)"),
    (None, None, ""), (7, object(), ""),
])  # fmt: skip
def test_the_format_is_named(library, of_layer, of_weight, said):
    net, code = made(), library("some_library")
    layer = net.inner[2]
    layer.weight = code.Packed(integers(layer.weight))
    layer.__class__ = code.Data
    layer.quant_format, layer.weight._layout_cls = of_layer, of_weight
    named = f"the model is quantised: its layer inner.2 by some_library{said}"
    assert reasons(net)[0] == [f"{named}; such layers are not accelerated"]


def test_torch_ao_is_named():
    quantize_dynamic = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    if torch.backends.quantized.engine == "none":
        pytest.skip("torch has no engine for it here")
    net = quantize_dynamic(made(), {nn.Linear}, dtype=torch.qint8)
    (reason,), _ = reasons(net)
    assert reason == "the model is quantised: its layer inner.0 by torch.ao; such layers are not accelerated"


class Integers(nn.Module):
    """Plain tensors that the forward turns into floats: a plan can be made."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.register_buffer("qweight", integers(layer.weight))
        self.bias = layer.bias

    def forward(self, x):
        return F.linear(x, self.qweight.to(x.dtype) * 0.01, self.bias)


def test_layers_that_can_be_recorded_are_accelerated():
    net = made()
    net.inner[2] = Integers(net.inner[2])
    assert reasons(net) == ([], 1)


def test_a_model_that_reads_another_tensor_is_not_called_quantised(library):
    class Outside(Net):
        def forward(self, x):
            # under a name that is put together: nobody knows where it is from
            return super().forward(x) + globals()["EDISTUO"[::-1]]

    net = Outside().eval().requires_grad_(False)
    net.inner[0].__class__ = library("bitsandbytes").Linear
    found, _ = reasons(net)
    assert found == ["its forward reads a tensor [8] that is neither an argument nor a weight"]


def test_a_layer_that_cannot_be_recorded_is_not_called_quantised(library):
    net = made()
    net.inner[2].__class__ = library("some_library").Raises
    (reason,), _ = reasons(net)
    assert reason.startswith("its forward cannot be recorded: RuntimeError")


OFF = ["__init__", "__repr__", "__str__", "extra_repr", "__setstate__", "__deepcopy__", "reset_parameters",
       "_load_from_state_dict", "_save_to_state_dict", "__del__", "__dir__", "__reduce_ex__"]  # fmt: skip
ON = ["forward", "__call__", "_call_impl", "helper"]


class Patched(Net):
    def helper(self, x):
        return x

    def forward(self, x):
        return super().forward(self.helper(x))


def foreign_wrapper(original):
    space = {"__name__": "an_extension.patches", "original": original}
    exec("def patched(*args, **kwargs):\n    return original(*args, **kwargs)", space)
    return space["patched"]


@pytest.mark.parametrize("name", [*OFF, *ON])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_patched_method_that_no_forward_runs_bypasses_nothing(name, when):
    own = {each: vars(Patched)[each] for each in ("forward", "helper", "__module__")}
    kind = type("Patched", (Patched,), own)
    net = kind().eval().requires_grad_(False)
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    x = torch.randn(2, 4, 4, 4)

    def patch():
        setattr(kind, name, foreign_wrapper(getattr(kind, name, None) or (lambda self: None)))

    with torch.no_grad():
        if when == "before":
            patch()
        for _ in range(3):
            net(x)
        if when == "after":
            patch()
        for _ in range(2):
            net(x)
    found = list(accelerator.report.as_dict()["reasons"])
    assert bool(found) == (name in ON), found
    if name in OFF:
        assert accelerator.report.counter("captures") == 1 and accelerator.report.counter("eager_runs") == 4
    accelerator.release()
