"""What is recorded of a real run is what fake tensors give, and the run is the original's to the bit."""

from __future__ import annotations

import pytest
import torch
from passes.networks import NETWORKS, network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack
from torch.utils._pytree import tree_map

from capture.test_block_reuse import described
from sfast_ext import Config, accelerate
from sfast_ext.call_signature import flatten_call, flatten_output, rebuild_call
from sfast_ext.capture import capture, fake_trace, live_trace
from sfast_ext.capture.live_trace import LiveTrace
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not live_trace.SUPPORTED, reason="calls are recorded as they run from torch 2.6 on")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def traced(module, *args, device=CPU, **kwargs):
    trace = LiveTrace(flatten_call(args, kwargs, device), WeightArena(module), device)
    return trace, trace.run(module, args, kwargs)


def on_fakes(module, *args, device=CPU, **kwargs):
    call = flatten_call(args, kwargs, device)

    def flat(*leaves):
        a, k = rebuild_call(call.tree, leaves)
        return flatten_output(module(*a, **k))[1]

    return fake_trace.record(flat, call.tensors(device))


def same(module, *args, device=CPU, **kwargs):
    expected = flatten_output(module(*args, **kwargs))[1]
    trace, result = traced(module, *args, device=device, **kwargs)
    for mine, theirs in zip(flatten_output(result)[1], expected, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    graph_module, tree, strides, _ = trace.recorded()
    assert strides == [x.stride() for x in expected] and tree == flatten_output(result)[0]
    on_fake = on_fakes(module, *args, device=device, **kwargs)
    for mine, theirs in zip(described(graph_module), described(on_fake), strict=True):
        assert mine == theirs
    return graph_module


@pytest.mark.long(but=[1, 4])
@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind != "ldm"])
def test_a_unet_is_recorded_as_on_fake_tensors(kind):
    unet, args, kwargs = network(kind)
    same(unet, *args, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_unet_on_a_gpu_is_recorded_as_on_fake_tensors(kind, layout):
    unet, args, kwargs = network(kind)
    unet = unet.to("cuda", torch.float16).to(memory_format=layout)
    args, kwargs = tree_map(lambda x: on_gpu(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    same(unet, *args, device=args[0].device, **kwargs)


def on_gpu(x):
    return x.to("cuda", torch.float16 if x.is_floating_point() else x.dtype)


@pytest.mark.gpu
def test_a_value_that_goes_to_the_cpu_is_not_recorded():
    module, x = Does(lambda x: x * float(x.cpu().numpy().sum())).cuda(), torch.randn(2, 4, device="cuda")
    trace, _ = traced(module, x, device=x.device)
    assert trace.recorded() is None


def test_autocast_acts_below_what_is_recorded():
    unet, args, kwargs = network("sd15")
    with torch.autocast("cpu", torch.bfloat16):
        same(unet, *args, **kwargs)


class Odd(nn.Module):
    """Literals, writes, several results, buffers, views with an offset."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x):
        a, b = self.layer(x).chunk(2, dim=-1)
        literal = torch.tensor(0.5)
        literal.add_(1)
        y = torch.zeros_like(a).add_(b).mul_(literal)
        return {"sum": y + self.table[3:], "pair": (a.contiguous(), torch.cat([a, b]))}


def test_writes_literals_buffers_and_several_results():
    graph_module = same(Odd(), torch.randn(2, 6))
    literal = [x for name, x in graph_module.named_buffers() if x.dim() == 0]
    assert [float(x) for x in literal] == [0.5]


class Does(nn.Module):
    """Runs a function beside a layer."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x, *rest):
        return self.function(self.layer(x), *rest)


foreign = torch.ones(4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum().item()),
        lambda x: x[x > 0],
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: x + foreign,
        lambda x: (x, 3),
    ],
    ids=["item", "mask", "equal", "foreign tensor", "no tensor"],
)
def test_what_fake_tensors_would_refuse_is_not_recorded(function):
    module, x = Does(function), torch.randn(2, 4)
    trace, result = traced(module, x)
    assert trace.recorded() is None or isinstance(result, tuple)
    expected = module(x)
    assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result[1] == 3


@pytest.mark.parametrize("x", [torch.randn(4, 2).T, torch.randn(2, 4)], ids=["strided", "twice"])
def test_arguments_that_a_plan_would_get_otherwise_are_not_recorded(x):
    module = Does(lambda y, *rest: y + sum(rest))
    args = (x,) if not x.is_contiguous() else (x, x)
    trace, result = traced(module, *args)
    assert trace.recorded() is None and torch.equal(result, module(*args))


def test_under_another_mode_nothing_is_recorded():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    module, x = Does(torch.relu), torch.randn(2, 4)
    with Other():
        trace, result = traced(module, x)
    assert trace.recorded() is None and torch.equal(result, module(x))


def test_an_error_of_the_recording_is_nobodys_concern(monkeypatch):
    module, x = Does(torch.relu), torch.randn(2, 4)

    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(LiveTrace, "_record", broken)
    trace, result = traced(module, x)
    assert trace.recorded() is None and torch.equal(result, module(x))


@pytest.mark.parametrize("method", ["__torch_dispatch__", "__enter__", "__exit__"])
def test_an_error_of_the_mode_costs_no_result(monkeypatch, method):
    module, x = Does(torch.relu), torch.randn(2, 4)
    honest = getattr(live_trace._RecordingMode, method)

    def broken(self, *args):
        if method == "__exit__":
            honest(self, *args)
        raise NotImplementedError("not under this mode")

    monkeypatch.setattr(live_trace._RecordingMode, method, broken)
    trace, result = traced(module, x)
    assert trace.recorded() is None and torch.equal(result, module(x))
    assert not _len_torch_dispatch_stack() and not live_trace._modes_before()


def test_an_error_of_the_forward_leaves_no_mode_behind():
    def broken(x):
        raise KeyError("mine")

    module, x = Does(broken), torch.randn(2, 4)
    trace = LiveTrace(flatten_call((x,), {}, CPU), WeightArena(module), CPU)
    with pytest.raises(KeyError, match="mine"):
        trace.run(module, (x,), {})
    assert trace.recorded() is None
    assert not _len_torch_dispatch_stack() and not live_trace._modes_before()
    assert traced(Does(torch.relu), x)[0].recorded() is not None


@pytest.fixture
def recorded_on_fakes(monkeypatch):
    calls = []
    record = capture.record

    def counted(function, inputs, *rest):
        calls.append([tuple(x.shape) for x in inputs])
        return record(function, inputs, *rest)

    monkeypatch.setattr(capture, "record", counted)
    return calls


def accelerated(module):
    return accelerate(module, Config(allow_cpu=True, drop_slower=False, check="always"))


def test_a_further_size_is_captured_as_it_runs(recorded_on_fakes):
    unet, args, kwargs = network("sd15")
    original = unet.forward
    accelerator = accelerated(unet)
    for width in (16, 24, 8):
        sample = torch.randn(2, 4, 16, width)
        expected = original(sample, *args[1:], **kwargs)[0]
        for _ in range(2):
            assert torch.allclose(unet(sample, *args[1:], **kwargs)[0], expected, atol=1e-4)
    assert len(recorded_on_fakes) == 1
    assert len(accelerator.plans) == 3 and all(plan.error < 1e-5 for plan in accelerator.plans.values())
    # another behaviour begins anew
    unet.mid_block.forward = lambda hidden_states, *_, **__: hidden_states
    unet(*args, **kwargs)
    accelerator.new_generation()
    unet(*args, **kwargs)
    assert len(recorded_on_fakes) <= 2


def test_a_size_that_runs_otherwise_is_captured_on_fake_tensors(recorded_on_fakes):
    module = Does(lambda x: torch.relu(x) if len(x) > 2 else x * 2)
    accelerator = accelerated(module)
    for rows in (4, 2, 1, 3):
        x = torch.randn(rows, 4)
        assert torch.allclose(module(x), module.function(module.layer(x)))
    assert [shapes[0][0] for shapes in recorded_on_fakes] == [4, 2] and len(accelerator.plans) == 4


def test_a_size_that_reads_a_value_goes_to_the_original():
    module = Does(lambda x: x * 2 if len(x) > 2 else x * float(x.sum()))
    accelerator = accelerated(module)
    for rows in (4, 2, 2):
        x = torch.randn(rows, 4)
        assert torch.allclose(module(x), module.function(module.layer(x)))
    assert len(accelerator.plans) == 1
    assert any("reads a value" in reason for reason in accelerator.report.as_dict()["reasons"])
