"""Weights of 8 bits that are made of other tensors: they are followed, whatever is replaced or written to."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import kitchen_standin
import pytest
import torch
from kitchen_standin import FP8, FP8_WIDE, INT8, BlockParams, Net, QuantizedTensor, quantised
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.weights.inner_tensors import all_within, inner_tensors
from sfast_ext.weights.weight import places_of

FORMATS = [(INT8, {}), (INT8, {"rows": True}), (INT8, {"dtype": torch.bfloat16}), (FP8, {}), (FP8_WIDE, {})]
KEPT: list = []
X = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))


class Run:
    def __init__(self, net, mode=torch.inference_mode):
        self.net, self.mode = net, mode
        self.accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))

    def equal(self, times=2):
        """Calls give what the original forward gives."""
        with self.mode():
            for _ in range(times):
                wanted = type(self.net).forward(self.net, X)
                torch.testing.assert_close(self.net(X), wanted, rtol=1e-5, atol=1e-5)

    @property
    def captures(self):
        return self.accelerator.report.counter("captures")

    @property
    def reasons(self):
        return list(self.accelerator.report.as_dict()["reasons"])


@pytest.fixture
def run():
    runs = []

    def started(layout=INT8, mode=torch.inference_mode, **fields):
        runs.append(Run(Net(layout, **fields), mode))
        runs[0].equal(3)
        return runs[0]

    yield started
    if runs:
        runs[0].accelerator.release()
        runs[0].equal()


def other(layer, scale=1.0):
    values = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(2)) * scale
    return quantised(values, layer.weight._layout_cls)


def params(layer):
    return layer.weight._params


def set_scale(layer):
    layer.weight._params = dataclasses.replace(params(layer), scale=params(layer).scale * 3)


def applied(net):
    """As a host moves such layers: new parameters, on the same codes."""
    for layer in (net.first, net.second):
        weight = layer.weight
        layer.weight = nn.Parameter(weight.like(weight._qdata, scale=params(layer).scale.clone()), requires_grad=False)


def swapped(net):
    first, second = net.first.weight, net.second.weight
    net.first.weight, net.second.weight = (quantised(each.dequantize().t(), INT8) for each in (second, first))
    KEPT[:] = first, second


EVENTS = {
    "replaced": lambda net: setattr(net.first, "weight", other(net.first)),
    "both replaced": lambda net: [setattr(layer, "weight", other(layer)) for layer in (net.first, net.second)],
    "larger": lambda net: setattr(net.second, "weight", other(net.second, 40.0)),
    "codes written": lambda net: net.first.weight._qdata.view(torch.uint8)[3:9].fill_(5),
    "codes of a row": lambda net: net.second.weight._qdata[1].copy_(net.second.weight._qdata[0]),
    "codes by data": lambda net: setattr(net.first.weight._qdata, "data", net.first.weight._qdata.flip(0)),
    "codes are another tensor": lambda net: setattr(net.first.weight, "_qdata", net.first.weight._qdata.flip(1)),
    "scale written": lambda net: params(net.first).scale.mul_(-2),
    "scale filled": lambda net: params(net.second).scale.fill_(0.01),
    "scale of new parameters": lambda net: set_scale(net.first),
    "scale of frozen parameters": lambda net: object.__setattr__(params(net.second), "scale", torch.tensor(0.02)),
    "scale by data": lambda net: setattr(params(net.first).scale, "data", params(net.first).scale * 0.5),
    "copied into": lambda net: net.first.weight.copy_(other(net.first)),
    "exchanged with another": lambda net: torch.utils.swap_tensors(net.first.weight, other(net.first)),
    "attributes are another dictionary": lambda net: setattr(
        net.second.weight, "__dict__", dict(vars(other(net.second)))
    ),
    "kept elsewhere": swapped,
    "moved": applied,
    "moved twice": lambda net: (applied(net), applied(net)),
    "the bias": lambda net: net.first.bias.add_(1),
}  # fmt: skip


@pytest.mark.parametrize("mode, layout, fields", [
    *((torch.inference_mode, *each) for each in FORMATS), (torch.no_grad, INT8, {}), (torch.no_grad, FP8, {}),
])  # fmt: skip
def test_a_weight_of_codes_is_accelerated(run, mode, layout, fields):
    on = run(layout, mode, **fields)
    assert on.captures == 1 and not on.reasons


@pytest.mark.parametrize("event", EVENTS)
def test_what_is_replaced_or_written_to_is_seen(run, event):
    on = run()
    with torch.no_grad():
        EVENTS[event](on.net)
    on.equal()
    assert on.captures == 1 and not on.reasons


def test_a_scale_of_the_same_value_is_another_tensor(run):
    on = run(rows=True)
    object.__setattr__(params(on.net.first), "scale", params(on.net.first).scale.clone())
    on.equal()
    params(on.net.first).scale.mul_(-2)
    on.equal()
    assert on.captures == 1 and not on.reasons and not on.accelerator.report.counter("errors")


@pytest.mark.parametrize("event", ["replaced", "codes written", "scale of new parameters", "moved"])
@pytest.mark.parametrize("layout", [FP8, FP8_WIDE])
def test_the_same_of_float8(run, layout, event):
    on = run(layout)
    with torch.no_grad():
        EVENTS[event](on.net)
    on.equal()
    assert on.captures == 1 and not on.reasons


@pytest.mark.parametrize("layout, name", [(INT8, "__torch_dispatch__"), (FP8, "dequantize")])
def test_a_method_of_the_class_that_is_replaced_is_seen(run, monkeypatch, layout, name):
    on = run(layout)
    before = getattr(QuantizedTensor, name)
    if name == "dequantize":
        monkeypatch.setattr(QuantizedTensor, name, lambda self: before(self) * 2)
    else:

        def doubled(cls, func, types, args=(), kwargs=None):
            result = before(func, types, args, kwargs)
            return result * 2 if type(result) is torch.Tensor else result

        monkeypatch.setattr(QuantizedTensor, name, classmethod(doubled))
    on.equal()
    monkeypatch.undo()
    on.equal()


def test_a_weight_comes_back_as_it_was(run):
    on = run()
    before, codes = on.net.first.weight, on.net.first.weight._qdata.clone()
    with torch.inference_mode():
        wanted = on.net(X)
        on.net.first.weight = other(on.net.first)
    on.equal()
    on.net.first.weight = before
    assert torch.equal(before._qdata, codes)
    on.equal()
    with torch.inference_mode():
        torch.testing.assert_close(on.net(X), wanted)
    assert on.captures == 1


def convrot(net):
    net.second.weight._params = dataclasses.replace(params(net.second), convrot_groupsize=64)


def plain(net):
    net.first.weight = nn.Parameter(net.first.weight.dequantize(), requires_grad=False)


OTHER_FORMS = {
    "no codes": plain,
    "another layout": lambda net: setattr(net.first, "weight", quantised(net.first.weight.dequantize(), FP8)),
    "the layout alone": lambda net: (
        setattr(net.first.weight, "_layout_cls", FP8), setattr(net.first.weight, "_params", kitchen_standin.Params(
            params(net.first).scale, torch.float32, (32, 16)))),
    "a field": convrot,
    "a field of frozen parameters": lambda net: object.__setattr__(params(net.second), "convrot_groupsize", 64),
    "dtype of frozen parameters": lambda net: object.__setattr__(params(net.first), "orig_dtype", torch.bfloat16),
    "a scale for each row": lambda net: setattr(
        net.second, "weight", quantised(net.second.weight.dequantize(), INT8, rows=True)
    ),
    "another dtype": lambda net: setattr(
        net.second, "weight", quantised(net.second.weight.dequantize(), INT8, dtype=torch.float16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("event", OTHER_FORMS)
def test_another_form_is_captured_anew(run, event):
    on = run()
    with torch.no_grad():
        OTHER_FORMS[event](on.net)
    on.equal(3)
    assert on.captures == 2


def test_a_weight_in_two_places(run):
    on = run()
    with torch.inference_mode():
        on.net.spare = kitchen_standin.Layer(16, 32)
        on.net.spare.weight = on.net.first.weight
    on.equal(3)
    on.net.spare.weight = other(on.net.first)
    on.equal(3)
    on.net.first.weight = on.net.spare.weight
    on.equal(3)


def test_nothing_is_copied_or_captured_if_nothing_changed(run):
    on = run()
    on.net.first.weight._param_scale = params(on.net.first).scale
    copied = on.accelerator.report.counter("weights_copied")
    on.equal(4)
    assert on.captures == 1 and on.accelerator.report.counter("weights_copied") == copied


def block_scales(layer):
    weight = layer.weight
    weight._params = BlockParams(params(layer).scale, torch.float32, tuple(weight.shape), torch.ones(2))


def half_scale(layer):
    layer.weight._params = dataclasses.replace(params(layer), scale=params(layer).scale.half())


UNKNOWN = {
    "layout": lambda layer: setattr(layer.weight, "_layout_cls", "TensorCoreNVFP4Layout"),
    "fields": block_scales,
    "half-precision scale": half_scale,
    "codes of another dtype": lambda layer: setattr(layer.weight, "_qdata", layer.weight._qdata.to(torch.int16)),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_format_that_is_not_known_is_bypassed_and_named(what):
    net = Net()
    UNKNOWN[what](net.first)
    on = Run(net)
    on.equal(3)
    assert on.captures == 0
    (reason,) = on.reasons
    layout = net.first.weight._layout_cls
    assert reason.startswith("the model is quantised: its layer first by comfy_kitchen") and f" ({layout})" in reason
    on.accelerator.release()


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_format_that_becomes_unknown_is_bypassed(run, what):
    on = run()
    with torch.no_grad():
        UNKNOWN[what](on.net.second)
    on.equal(3)
    assert any(reason.startswith("the model is quantised: its layer second") for reason in on.reasons)


class Subclass(QuantizedTensor):
    pass


def test_a_class_of_another_name_is_bypassed():
    net = Net()
    weight = net.first.weight
    net.first.weight = nn.Parameter(Subclass(weight._qdata, INT8, weight._params), requires_grad=False)
    on = Run(net)
    on.equal(3)
    # also in inference mode, in which `detach` of such a weight raises
    assert on.captures == 0 and not on.accelerator.report.counter("errors")
    (reason,) = on.reasons
    assert reason.startswith("the model is quantised: its layer first by weights (TensorWiseINT8Layout)")
    on.accelerator.release()


@pytest.mark.parametrize("same", [True, False])
def test_plans_move_to_a_model_of_the_same_form_alone(run, same):
    on = run()
    model, arena = Net(), on.accelerator.arena
    if not same:
        convrot(model)
    # the previous model leaves the memory of the plans
    for container, name in places_of(on.net).values():
        container[name].data = container[name].clone()
    assert arena.move_to(model) is same
    if same:
        arena.sync()
        assert arena.locate(model.first.weight._qdata) is not None


# --- InnerTensors ---


def inner_of(layer):
    found = inner_tensors(layer, layer._parameters, "weight")
    assert found is not None
    return found


def test_a_slot_stays_the_same_for_weights_of_one_form():
    layer = Net().first
    inner = inner_of(layer)
    layer.weight = other(layer)
    assert inner_of(layer) is inner and inner.get("_qdata") is layer.weight._qdata
    assert inner["scale"] is params(layer).scale
    layer.weight = quantised(layer.weight.dequantize(), FP8)
    assert inner.get("_qdata") is None and inner_of(layer) is not inner
    layer.weight = other(layer)
    layer.weight = quantised(layer.weight.dequantize(), INT8)
    assert inner.get("_qdata") is layer.weight._qdata


def test_the_places_of_a_module_are_of_what_weights_are_made_of():
    net = Net()
    paths = {path for path in places_of(net) if path.startswith("first")}
    assert paths == {"first.weight._qdata", "first.weight.scale", "first.bias"}


def test_nothing_is_held_that_is_not_asked_for():
    layer = Net().first
    inner = inner_of(layer)
    was = weakref.ref(layer.weight._qdata)
    layer.weight = other(layer)
    inner.refresh()
    assert was() is None
    now = weakref.ref(layer.weight._qdata)
    inner.let_go()
    layer.weight = None
    assert now() is None
    del inner
    gc.collect()
    assert not list(all_within(layer))


def test_after_a_release_replaced_weights_are_held_by_nobody():
    net = Net()
    on = Run(net)
    on.equal(3)
    on.accelerator.release()
    was = weakref.ref(net.first.weight._qdata)
    net.first.weight = other(net.first)
    gc.collect()
    assert was() is None
