from __future__ import annotations

import contextlib
import functools
import itertools
import threading

import pytest
import torch
from passes.networks import network
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.call_signature import flatten_call, flatten_output, rebuild_call
from sfast_ext.capture import fake_trace, quick_record
from sfast_ext.environment import TORCH

CPU = torch.device("cpu")
aten = torch.ops.aten


def plain(function, inputs):
    """What make_fx alone records."""

    def flat(*leaves):
        return function(*leaves)

    return make_fx(flat, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)


def metadata(value):
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
    return [metadata(v) for v in value] if isinstance(value, (list, tuple)) else value


def described(graph_module):
    """All that a pass may look at, node for node."""
    nodes = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            # torch before 2.5 gives weights no metadata
            val = FakeTensor, *metadata(getattr(graph_module, node.target))[1:]
        else:
            val = metadata(node.meta.get("val"))
        keys = sorted(set(node.meta) - {"val"})
        nodes.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs), val, keys))
    return nodes


def same(function, *inputs):
    with torch.no_grad():
        # of the second one all is remembered that can be
        ours, theirs = [fake_trace.record(function, inputs) for _ in range(2)], plain(function, inputs)
    for each in ours:
        for mine, expected in zip(described(each), described(theirs), strict=True):
            assert mine == expected
        for name, value in theirs.named_parameters():
            assert getattr(each, name) is value
    return ours[0]


def flattened(kind):
    unet, args, kwargs = network(kind)
    call = flatten_call(args, kwargs, CPU)

    def forward(*leaves):
        a, k = rebuild_call(call.tree, leaves)
        return flatten_output(unet(*a, **k))[1]

    return forward, call.tensors(CPU)


def test_this_torch_remembers_metadata():
    mode = fake_trace.fake_mode()
    assert mode is not None and mode.known is not None


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("kind", ["sdxl", "ldm"])
def test_the_graph_is_that_of_make_fx_node_for_node(kind):
    forward, inputs = flattened(kind)
    same(forward, *inputs)


@pytest.mark.long
def test_the_graph_is_the_same_under_autocast():
    forward, inputs = flattened("sd15")
    with torch.autocast("cpu", torch.bfloat16):
        same(forward, *inputs)


@pytest.fixture
def worked_out(monkeypatch):
    """The operations whose results torch computed."""
    found = []
    original = FakeTensorMode.__torch_dispatch__

    def counting(self, func, *args, **kwargs):
        found.append(func)
        return original(self, func, *args, **kwargs)

    monkeypatch.setattr(fake_trace, "_memos", {})
    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counting)
    return found


def test_shapes_met_before_are_not_worked_out_again(worked_out):
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)) for _ in range(8)])
    found = same(lambda x: [layers(x)], X)
    assert sum(node.target is aten.softmax.int for node in found.graph.nodes) == 8
    # once by ours, eight times by make_fx alone
    assert worked_out.count(aten._softmax.default) == 1 + 8
    same(lambda x: [layers(x)], X)
    # the second time by make_fx alone
    assert worked_out.count(aten._softmax.default) == 1 + 8 + 8


def test_under_other_settings_shapes_are_worked_out_anew(worked_out, monkeypatch):
    layer = nn.Softmax(-1)
    record = functools.partial(fake_trace.record, lambda x: [layer(x)], [X])
    with torch.no_grad():
        record()
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic)
        record()
        monkeypatch.undo()
    assert worked_out.count(aten._softmax.default) == 2


def test_what_is_remembered_has_an_end(worked_out, monkeypatch):
    monkeypatch.setattr(fake_trace, "MAX_REMEMBERED", 3)
    layer = nn.Softmax(-1)
    for _ in range(2):
        with torch.no_grad():
            fake_trace.record(lambda x: [layer(x), x + 1, x + 2, x + 3], [X])
    assert worked_out.count(aten._softmax.default) == 2


X = torch.randn(2, 4)
W = nn.Parameter(torch.randn(4, 4))


@pytest.fixture
def left_to_make_fx(monkeypatch):
    """The operations that make_fx recorded itself; none is known at first."""
    found = []
    original = ProxyTorchDispatchMode.__torch_dispatch__

    def noting(self, func, *args, **kwargs):
        found.append(func)
        return original(self, func, *args, **kwargs)

    monkeypatch.setattr(fake_trace, "_memos", {})
    monkeypatch.setattr(ProxyTorchDispatchMode, "__torch_dispatch__", noting)
    return found


def several_kinds(x):
    h = F.dropout(torch.mm(x, W), 0.5, training=False).view(8)[2:]
    return [torch.cat([h, h]).to(torch.float64), h]


@pytest.mark.skipif(not quick_record.SUPPORTED, reason="before torch 2.6 make_fx records everything")
def test_what_is_known_is_recorded_without_make_fx(left_to_make_fx):
    for met in (True, False):
        left_to_make_fx.clear()
        with torch.no_grad():
            fake_trace.record(several_kinds, [X])
        # dropout that drops nothing returns its argument
        for op in (aten.mm.default, aten.dropout.default, aten.cat.default, aten.to.dtype, aten.view.default):
            assert (op in left_to_make_fx) is met
    same(several_kinds, X)


def norms(x):
    channels, last = x.shape[1], x.shape[-1:]
    weights = [torch.ones(n, dtype=x.dtype) for n in (channels, channels, last[0], last[0])]
    weights = [nn.Parameter(weight) for weight in weights]
    matrix, bias = (nn.Parameter(torch.ones(*shape, dtype=x.dtype)) for shape in ((3, *last), (3,)))

    def function(x):
        normed = [torch.group_norm(x, groups, *weights[:2]) for groups in (1, channels)] if x.dim() > 2 else []
        layers = [F.layer_norm(x, last, *weights[2:]), F.layer_norm(x, last), F.layer_norm(x, x.shape[1:])]
        products = [F.linear(x, matrix, *given) for given in ([], [bias])]
        return [*normed, *layers, *products, F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh")]

    return function


SHAPES = [
    (2, 6, 8, 4),
    (1, 6, 8, 4),
    (2, 6, 1, 4),
    (2, 1, 8, 4),
    (2, 6, 1, 1),
    (1, 1, 1, 1),
    (2, 77, 6),
    (1, 6, 1),
    (5, 6),
]


@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES, itertools.cycle([torch.float32, torch.float16, torch.bfloat16]))), ids=str
)
def test_what_follows_from_an_argument_is_what_torch_would_say(shape, dtype, monkeypatch):
    monkeypatch.setattr(fake_trace, "_memos", {})
    x = torch.randn(shape).to(dtype)
    same(norms(x), x)
    if len(shape) == 4:
        # in another order in memory, and a part of a larger one
        for other in (x.to(memory_format=torch.channels_last), torch.cat([x, x], -1)[..., : shape[-1]]):
            same(norms(x), other)


@pytest.mark.skipif(not quick_record.SUPPORTED, reason="before torch 2.6 make_fx records everything")
def test_what_follows_from_an_argument_is_recorded_without_make_fx(left_to_make_fx):
    x = torch.randn(2, 6, 8, 4)
    with torch.no_grad():
        fake_trace.record(norms(x), [x])
    assert not left_to_make_fx
    for other in (x.to(memory_format=torch.channels_last), x[:, :1], x.to(torch.complex64)):
        left_to_make_fx.clear()
        with torch.no_grad():
            fake_trace.record(lambda x: [F.silu(x)], [other])
        assert left_to_make_fx == [aten.silu.default]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: F.group_norm(x, 4),
        lambda x: F.group_norm(x, 2, torch.ones(2)),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.layer_norm(x, (4,), torch.ones(8)),
        lambda x: F.linear(x, torch.ones(4, 6)),
        lambda x: F.linear(x, torch.ones(3, 4), torch.ones(4)),
    ],
)
def test_what_torch_refuses_is_refused(wrong):
    x = torch.randn(2, 6, 8, 4)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(Exception, match="group|normalized_shape|weight|shape|size|expand|dim"):
            fake_trace.record(lambda x: [wrong(x)], [x])


def with_gradients(x):
    with torch.enable_grad():
        y = F.linear(x, W)
    assert y.requires_grad
    return [y.detach() + F.linear(x, W)]


def cast_in_turns(x):
    found = [F.linear(x, W)]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(F.linear(x, W))
    return [*found, F.linear(x, W)]


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def seen_by_another_mode(x):
    first = F.linear(x, W)
    with Seeing() as mode:
        again = F.linear(x, W)
    assert mode.seen
    return [first, again]


def mapped(x):
    rows = torch.ones(2, 4)
    return [F.linear(x, W) * rows, torch.func.vmap(lambda row: F.linear(x, W) * row)(rows[:, None].expand(2, 2, 4))]


def recorded_by_make_fx(function):
    try:
        plain(function, (X,))
    except Exception:
        return False
    return True


@pytest.mark.parametrize("function", [with_gradients, cast_in_turns, seen_by_another_mode, mapped])
def test_what_is_known_is_known_of_the_same_circumstances(left_to_make_fx, function):
    with torch.no_grad():
        if TORCH < (2, 8) and not recorded_by_make_fx(function):
            pytest.skip("make_fx of this torch does not record it by itself")
        fake_trace.record(lambda x: [F.linear(x, W)], [X])
    same(function, X)


def numbers(x):
    i = x.int()
    return [i * 1, i * 1.0, i * True, i * 1]


def dtypes(x):
    first = torch.full_like(x.int(), 0.5, dtype=None) + x.int() / 2
    torch.set_default_dtype(torch.float64)
    try:
        return [first, x.int() / 2]
    finally:
        torch.set_default_dtype(torch.float32)


def views(x):
    h = x + 1
    first, second = h[:1], h[:1]
    # past the end of the view, inside what it is a view of
    return [first * 2, second.as_strided((2, 4), (4, 1)), h.view(8)[2:], h.view(8)[2:].view(2, 3), h.t(), h.t()]


def writes(x):
    h = x * 2
    h.add_(1)
    k = h[:, :2]
    k.mul_(3)
    return [h.add_(1), k, h.t_()]


def several(x):
    a, b = x.chunk(2, 1)
    c, d = x.chunk(2, 1)
    top, where = x.max(1)
    again, there = x.max(1)
    return [a, b, c, d, top, where, again, there, *x.unbind(0), *x.unbind(0), *torch.var_mean(x, 1)]


def literals(x):
    two, half = torch.tensor(2), torch.tensor([0.5, 0.25, 1.0, 2.0])
    return [x * int(two), x * int(two), x + half, x + half, torch.tensor(3.0) + torch.tensor(4.0)]


def wholes(x):
    return [torch.view_as_real(torch.view_as_complex(x.view(2, 2, 2)) * 2), x.contiguous(), x.to(x.dtype), x.double()]


def noise(x):
    return [x + torch.randn_like(x), x + torch.randn_like(x), torch.zeros(2, 4), torch.zeros(2, 4)]


@pytest.mark.parametrize("function", [numbers, dtypes, views, writes, several, literals, wholes, noise])
def test_what_is_remembered_is_what_torch_would_say(function):
    same(function, X)


def test_weights_are_named_as_make_fx_names_them():
    linear, other = nn.Linear(4, 4), nn.Linear(4, 4)
    buffer = torch.ones(4)
    found = same(lambda x: [other(linear(x)) + linear(x) + buffer, x @ linear.weight.t(), buffer + 1], X)
    assert len(list(found.named_parameters())) == 4


def test_a_shape_that_does_not_fit_is_an_error_however_often_its_parts_fitted():
    with torch.no_grad(), pytest.raises(RuntimeError):
        fake_trace.record(lambda x: [x @ x.t() @ x, x @ x.t() @ x, x @ x], [X])


def no_meta(monkeypatch):
    monkeypatch.setattr(fake_trace, "_as_meta", None)


def no_tracer(monkeypatch):
    monkeypatch.setattr(fake_trace, "_tracer", lambda frame: None)


def other_fakes(monkeypatch):
    def unexpected(*args):
        raise AttributeError("fake_device")

    monkeypatch.setattr(fake_trace._MemoFakeMode, "_described", unexpected)


def other_options(monkeypatch):
    def unexpected(self, **options):
        raise TypeError("static_shapes")

    monkeypatch.setattr(fake_trace._MemoFakeMode, "__init__", unexpected)


def no_quick_recording(monkeypatch):
    monkeypatch.setattr(quick_record, "SUPPORTED", False)


def quick_recording_that_fails(monkeypatch):
    def unexpected(*args):
        raise AttributeError("proxy")

    monkeypatch.setattr(quick_record, "_ProxyTensor", unexpected, raising=False)


CHANGES = [no_meta, no_tracer, other_fakes, other_options, no_quick_recording, quick_recording_that_fails]


@pytest.mark.parametrize("change", CHANGES)
def test_where_torch_is_not_as_expected_make_fx_runs_as_it_is(monkeypatch, change):
    change(monkeypatch)
    linear = nn.Linear(4, 4)
    same(lambda x: [linear(x) + linear(x).t().sum()], X)


def test_nothing_of_it_stays_active():
    with torch.no_grad():
        fake_trace.record(lambda x: [x + 1], [X])
    assert type(X + 1) is torch.Tensor
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        fake_trace.record(lambda x: [x / (1 // 0)], [X])
    assert type(X + 1) is torch.Tensor


def test_the_free_memory_cuts_nothing_into_slices(monkeypatch):
    """As AUTOMATIC1111's Doggettx does, which asks the driver."""
    asked = []

    def mem_get_info(device=None):
        asked.append(threading.current_thread())
        return 100, 1000

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)

    def forward(x):
        free, _ = torch.cuda.mem_get_info(0)
        rows = len(x) if free > x.numel() else 1
        return [torch.cat([x[at : at + rows].sin() for at in range(0, len(x), rows)])]

    x = torch.randn(8, 50)
    recorded = fake_trace.record(forward, [x])
    assert [n.target for n in recorded.graph.nodes if n.op == "call_function"].count(torch.ops.aten.sin.default) == 1
    assert not asked and forward(x)[0].shape == x.shape and len(asked) == 1
    assert torch.cuda.mem_get_info(0) == (100, 1000)


def test_what_fails_is_not_tried_again(left_to_make_fx):
    def forward(x):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), contextlib.suppress(RuntimeError):
                x @ x
        return [x + 1]

    with torch.no_grad():
        fake_trace.record(forward, [X])
    assert left_to_make_fx.count(aten.matmul.default) == 2
