from __future__ import annotations

import gc
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture import capture as capture_module
from sfast_ext.capture.capture import CaptureRefused, capture
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")


class Holder(nn.Module):
    """A module whose forward is given by a test."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(4))
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def captured(function, *args, **kwargs):
    module = Holder(function).eval()
    call = flatten_call(args, kwargs, CPU)
    with torch.no_grad():
        return module, call, capture(module.forward, call, call.tensors(CPU), WeightArena(module))


def same(function, *args, **kwargs):
    module, call, found = captured(function, *args, **kwargs)
    with torch.no_grad():
        outputs = found.graph_module(*call.tensors(CPU))
        expected = module(*args, **kwargs)
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=0)
    return found


X = torch.randn(2, 4)


def test_weights_are_marked_and_numbers_are_inputs():
    found = same(lambda m, x, t: m.linear(x) * t + m.buffer, X, 7)
    weights = {n.meta["weight"].path for n in found.graph_module.graph.nodes if n.op == "get_attr"}
    assert weights == {"linear.weight", "linear.bias", "buffer"}
    assert torch.equal(found.graph_module(X, torch.tensor(0))[0], torch.ones(2, 4))


def test_literals_of_the_forward_are_kept():
    same(lambda m, x: x * torch.tensor(0.5) + torch.ones(4), X)


DROPOUTS = (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout2d)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("function", DROPOUTS)
def test_a_dropout_that_is_off_draws_nothing(function, inplace):
    image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for off in ({"p": 0.5, "training": False}, {"p": 0.0, "training": True}):
        same(lambda m, x, off=off: function(x.sin(), inplace=inplace, **off).cos() + x, image)
        # what it writes to is read afterwards by its other name
        same(lambda m, x, off=off: [y := x.sin(), function(y, inplace=inplace, **off).mul_(2), y + 1][-1], image)


@pytest.mark.parametrize("function", DROPOUTS)
def test_a_dropout_that_is_on_is_refused_in_place_too(function):
    for inplace in (False, True):
        with pytest.raises(CaptureRefused, match="random"):
            captured(lambda m, x, i=inplace: function(x.sin(), 0.5, training=True, inplace=i), torch.randn(2, 3, 4, 5))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: m.linear(x) * x.sum().item(), "reads a value"),
        (lambda m, x: m.linear(x) if x.sum() > 0 else x, "reads a value"),
        (lambda m, x: x[x > 0], "reads a value|cannot be recorded"),
        (lambda m, x: x + torch.randn_like(x), "random"),
        (lambda m, x: F.dropout(x, 0.5, training=True), "random"),
        (lambda m, x: m.buffer.add_(1) + x, "writes to a weight"),
        (lambda m, x: x.mul_(2), "argument"),
        (lambda m, x: x[:, :2].mul_(2), "argument"),
        (lambda m, x: x + OUTSIDE, "neither an argument nor a weight"),
        (lambda m, x: setattr(m, "cache", x) or x * 2, "keeps state"),
        (lambda m, x: setattr(m, "count", getattr(m, "count", 0) + 1) or x * 2, "keeps state"),
    ],
)
def test_what_cannot_be_a_plan_is_refused_with_the_reason(function, words):
    before = X.clone()
    with pytest.raises(CaptureRefused, match=words):
        captured(function, X)
    assert torch.equal(X, before)


OUTSIDE = torch.ones(4)


def test_what_torch_says_goes_to_the_developer_and_not_into_the_reason():
    class Library:
        def __call__(self, x):
            if isinstance(x, FakeTensor):
                raise RuntimeError(f"{self!r} has no kernel for {list(x.shape)}\nand goes on")
            return x

    library = Library()
    reasons = set()
    for n in (2, 3):
        with pytest.raises(CaptureRefused) as refused:
            captured(lambda m, x: library(x), torch.randn(n, 4))
        assert f"no kernel for [{n}, 4]" in refused.value.details
        reasons.add(str(refused.value))
    (reason,) = reasons
    assert reason.startswith("its forward cannot be recorded: RuntimeError (test_capture.py:")


def test_a_compiled_function_is_named_as_such():
    def compiled(m, x):
        # as torch raises there since 2.0
        raise RuntimeError("Detected that you are using FX to symbolically trace a dynamo-optimized function.")

    with pytest.raises(CaptureRefused, match="calls a function that torch.compile made"):
        captured(compiled, X)


def test_a_compiled_function_is_recorded_as_it_was_written():
    double = torch.compile(lambda x: x.sin() * 2, backend="eager")
    double(X)
    before = torch._dynamo.config.error_on_nested_fx_trace

    def function(m, x):
        return double(x) + 1

    *_, recorded = captured(function, X)
    assert [n.target for n in recorded.graph_module.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor,
    ]  # fmt: skip
    assert torch._dynamo.config.error_on_nested_fx_trace == before


def test_a_refused_capture_leaves_no_state_behind():
    def remember(m, x):
        m.cache = x
        return x * 2

    module = Holder(remember)
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad(), pytest.raises(CaptureRefused):
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert not hasattr(module, "cache")


def test_an_attribute_without_influence_may_change_and_is_taken_back():
    # the shape that ldm's decoder notes on itself
    def note(m, x):
        m.last_shape = x.shape
        return x * 2

    module = Holder(note)
    module.last_shape = (1, 2)
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad():
        capture(module.forward, call, call.tensors(CPU), WeightArena(module), frozenset({"last_shape"}))
        assert module.last_shape == (1, 2)
        with pytest.raises(CaptureRefused, match="keeps state between calls, in the model.last_shape"):
            capture(module.forward, call, call.tensors(CPU), WeightArena(module))


class Notes:
    """What no module is, as an attention processor."""

    def __init__(self):
        self.count = 0


HELD = {
    "list": lambda: [1],
    "deque": lambda: deque([1], maxlen=3),
    "set": lambda: {1},
    "dict": lambda: {"a": 1},
    "ordered": lambda: OrderedDict(a=1, b=2),
    "nested": lambda: {"down": [1], "up": []},
}


def keeping(kind, held, x):
    if kind in ("list", "deque"):
        held.append(x)
    elif kind == "set":
        held.add(x)
    elif kind == "nested":
        held["up"].append(x)
    else:
        held["a"] = x


@pytest.mark.parametrize("kind", HELD)
def test_what_a_forward_keeps_in_a_container_is_noticed_and_taken_back(kind):
    def remember(m, x):
        keeping(kind, m.held, x)
        return x * 2

    module = Holder(remember)
    held = module.held = HELD[kind]()
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad(), pytest.raises(CaptureRefused, match="keeps state between calls, in the model.held"):
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert module.held is held and held == HELD[kind]() and type(held) is type(HELD[kind]())
    assert getattr(held, "maxlen", 3) == 3


def test_what_a_forward_takes_out_of_a_container_is_put_back():
    module = Holder(lambda m, x: x * m.linear.held.pop())
    module.linear.held = [2, 3]
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad(), pytest.raises(CaptureRefused, match="keeps state between calls, in linear.held"):
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert module.linear.held == [2, 3]


def test_a_buffer_that_a_forward_replaces_is_noticed_and_put_back():
    def replace(m, x):
        m.buffer = m.buffer + x
        return m.buffer * 2

    module = Holder(replace)
    buffer = module.buffer
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad(), pytest.raises(CaptureRefused, match="keeps state"):
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert module.buffer is buffer


def test_a_tensor_kept_in_an_object_of_a_module_is_noticed_and_taken_out():
    def remember(m, x):
        m.notes.count += 1
        m.notes.last = [x]
        return x * 2

    module = Holder(remember)
    module.notes = Notes()
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad(), pytest.raises(CaptureRefused, match="keeps state between calls, in the model.notes.count"):
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert not hasattr(module.notes, "last") and module.notes.count == 0


def test_state_is_taken_back_if_the_capture_fails():
    def remember(m, x):
        m.held.append(x)
        raise KeyError("nothing here")

    module = Holder(remember)
    module.held = []
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad(), pytest.raises(CaptureRefused, match="KeyError"):
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert module.held == []


def renewing(m, x):
    m.size, m.held[0], m.table["size"] = (2, "a" * len(m.size)), float(x.shape[0]), tuple(x.shape)
    return x * 2


def test_an_equal_value_is_no_state():
    module = Holder(renewing)
    module.size, module.held, module.table = (2, "aa"), [2.0], {"size": tuple(X.shape)}
    call = flatten_call((X,), {}, CPU)
    with torch.no_grad():
        capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    assert module.held == [2.0] and module.size == (2, "aa")


def test_garbage_is_collected_as_before():
    try:
        gc.disable()
        captured(lambda m, x: x * 2, X)
        assert not gc.isenabled()
        gc.enable()
        captured(lambda m, x: x * 2, X)
        assert gc.isenabled()
        with pytest.raises(CaptureRefused):
            captured(lambda m, x: x.mul_(2), X)
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_refusal_that_reads_a_number_says_so():
    with pytest.raises(CaptureRefused) as refused:
        captured(lambda m, x, t: x * 2 if t > 3 else x, X, 5)
    assert refused.value.reads_value


def test_an_exception_of_the_forward_names_its_place():
    def broken(m, x):
        raise KeyError("nothing here")

    with pytest.raises(CaptureRefused, match="KeyError.*test_capture.py"):
        captured(broken, X)


def in_place(m, x):
    h = m.linear(x)
    h += x
    h.mul_(2)
    return F.silu(h, inplace=True)


def test_in_place_operations_become_out_of_place():
    found = same(in_place, X)
    names = [str(n.target) for n in found.graph_module.graph.nodes]
    assert not any("add_" in n or "mul_" in n or "silu_" in n for n in names)
    assert not any("mutated" in n.meta for n in found.graph_module.graph.nodes)


def into_a_slice(m, x):
    h = m.linear(x)
    k = h * 3
    h[:, :2] = h[:, :2] * 0.5
    return h + k


def test_a_write_into_a_view_stays_and_is_marked():
    found = same(into_a_slice, X)
    marked = {n.name for n in found.graph_module.graph.nodes if n.meta.get("mutated")}
    assert "linear" in marked and "mul" not in marked


def view_then_write(m, x):
    h = m.linear(x)
    v = h.view(8)
    h.add_(1)
    return v * 2 + h.view(8)


def test_a_write_that_a_view_sees_stays():
    same(view_then_write, X)


def mixed(m, x):
    h = m.linear(x)
    n = F.layer_norm(h, (4,))
    return torch.cat([h, n.to(h.dtype)], 1), (h @ n.t()).exp(), torch.einsum("ij,kj->ik", x, h)


def test_autocast_becomes_casts():
    module = Holder(mixed).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(X)
        call = flatten_call((X,), {}, CPU)
        found = capture(module.forward, call, call.tensors(CPU), WeightArena(module))
    with torch.no_grad():
        outputs = found.graph_module(X)
    for ours, theirs in zip(outputs, expected):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_results_keep_their_strides():
    _, _, found = captured(lambda m, x: m.linear(x).t(), X)
    assert found.output_strides == [(1, 4)]


def own_region(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.linear(x)
        with torch.autocast("cpu", enabled=False):
            k = m.linear(h.float())
    return k + h


def test_an_autocast_region_of_the_forwards_own_becomes_casts():
    found = same(own_region, X)
    assert not any("autocast" in str(n.target) for n in found.graph_module.graph.nodes)


def test_a_norm_with_weights_in_float_keeps_them():
    same(lambda m, x: F.layer_norm(x.bfloat16(), (4,), m.linear.bias.bfloat16(), None) + m.linear(x).bfloat16(), X)


def test_a_reason_names_the_host_s_code_however_the_path_to_ours_is_written():
    # Windows' have either separator
    home = Path(capture_module.__file__).parents[1]
    ours = compile("def fail():\n    raise ValueError\n", f"{home.parent}//{home.name}/capture/x.py", "exec")
    exec(ours, scope := {})
    with pytest.raises(ValueError) as raised:
        scope["fail"]()
    assert capture_module._where(raised.value).startswith(" (test_capture.py:")
