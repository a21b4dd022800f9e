"""Compilers and exporters of a program see the original forward of an accelerated module, and nothing of ours."""

from __future__ import annotations

import inspect
import io
import time

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from sfast_ext import Config, accelerate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.out = nn.Linear(8, 8)

    def forward(self, x, scale=1.0, *, also=None):
        out = self.out(F.silu(self.conv(x)).flatten(2).transpose(1, 2)) * scale
        return out if also is None else out + also


class Whole(nn.Module):
    def __init__(self, net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x, 0.5) + self.net(x, also=torch.ones(()))


class Patched(nn.Module):
    """A module whose forward was replaced on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.forward = self.other

    def other(self, x):
        return self.layer(x) + 1

    def forward(self, x):
        raise AssertionError("not this one")


def latent(seed=0):
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def pair(cls=Net, plans=True, x=None):
    torch.manual_seed(0)
    ours, twin = cls().eval().requires_grad_(False), cls().eval().requires_grad_(False)
    twin.load_state_dict(ours.state_dict())
    accelerator = accelerate(ours, Config(allow_cpu=True, drop_slower=False))
    for seed in range(2 if plans else 0):
        ours(latent(seed) if x is None else x)
    return ours, accelerator, twin


def compiled(callable_, **options):
    return torch.compile(callable_, backend="eager", fullgraph=True, **options)


def through_method(net):
    net.compile(backend="eager", fullgraph=True)
    return net


def exported(strict):
    def use(net):
        if "strict" not in inspect.signature(torch.export.export).parameters:
            pytest.skip("this torch has no such option")
        return torch.export.export(net, (latent(9),), strict=strict).module()

    return use


def saved(net):
    if "strict" not in inspect.signature(torch.export.export).parameters:
        pytest.skip("this torch saves no exported program")
    file = io.BytesIO()
    torch.export.save(torch.export.export(net, (latent(9),)), file)
    file.seek(0)
    return torch.export.load(file).module()


USES = {
    "module": compiled,
    "method": through_method,
    "forward": lambda net: compiled(net.forward),
    "function": lambda net: compiled(lambda x: net(x) * 2),
    "a call of forward": lambda net: compiled(lambda x: net.forward(x) * 2),
    "whole": lambda net: compiled(Whole(net)),
    "block": lambda net: Whole(compiled(net)),
    "dynamic": lambda net: compiled(net, dynamic=True),
    "sequential": lambda net: compiled(nn.Sequential(net, nn.Identity())),
    "export": exported(True),
    "export, not strict": exported(False),
    "export, saved": saved,
}


@pytest.mark.parametrize(
    ("use", "plans"),
    [*((use, True) for use in USES), *((use, False) for use in ("module", "whole", "export", "export, not strict"))],
)
def test_a_compiler_gets_the_original_in_one_graph(use, plans):
    ours, accelerator, twin = pair(plans=plans)
    before = accelerator.report.as_dict()["counters"]
    theirs, mine = USES[use](twin), USES[use](ours)
    for seed in (3, 4):
        torch.testing.assert_close(mine(latent(seed)), theirs(latent(seed)), rtol=1e-5, atol=1e-5)
    status = accelerator.report.as_dict()
    assert status["last_error"] is None
    assert status["counters"].get("captures", 0) == before.get("captures", 0)
    assert status["counters"].get("eager_runs", 0) == before.get("eager_runs", 0)


def test_one_graph_is_compiled_and_no_line_of_ours():
    from torch._dynamo.testing import CompileCounterWithBackend

    ours, accelerator, twin = pair()
    graphs = []
    for net in (twin, ours):
        counter = CompileCounterWithBackend("eager")
        began = time.perf_counter()
        for seed in range(3):
            torch.compile(net, backend=counter)(latent(seed))
        graphs.append((counter.frame_count, counter.op_count))
        assert time.perf_counter() - began < 20
    assert graphs[0] == graphs[1] and graphs[0][0] == 1


@pytest.mark.skipif(not hasattr(torch.compiler, "is_dynamo_compiling"), reason="Dynamo calls no method in a slot")
def test_a_forward_on_the_instance_is_what_is_compiled():
    x = torch.randn(3, 6)
    ours, accelerator, twin = pair(Patched, x=x)
    assert len(accelerator.plans) == 1
    torch.testing.assert_close(compiled(ours)(x), twin.layer(x) + 1)


def test_the_accelerator_itself_may_be_compiled():
    ours, accelerator, twin = pair()
    torch.testing.assert_close(compiled(lambda x: accelerator(x) + 1)(latent()), twin(latent()) + 1)


def test_parts_are_compiled_as_their_originals():
    torch.manual_seed(0)
    whole = Whole(Net()).eval().requires_grad_(False)
    accelerator = accelerate(whole, Config(allow_cpu=True, drop_slower=False))
    accelerator.accelerate_parts([("net", whole.net)])
    expected = Whole.forward(whole, latent())
    for _ in range(2):
        whole.net(latent())
    function = compiled(lambda x: whole.net(x, 0.5) + whole.net(x, also=torch.ones(())))
    torch.testing.assert_close(function(latent()), expected)
    assert accelerator.report.as_dict()["last_error"] is None


def test_plain_calls_are_served_between_compiled_ones():
    ours, accelerator, twin = pair()
    function = compiled(lambda x: ours(x) * 2)
    before = accelerator.report.counter("eager_runs")
    for seed in range(4):
        torch.testing.assert_close(function(latent(seed)), twin(latent(seed)) * 2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert accelerator.report.counter("eager_runs") == before + 4 and len(accelerator.plans) == 1


def test_what_was_compiled_follows_weights_and_release():
    ours, accelerator, twin = pair()
    function = compiled(lambda x: ours(x) * 2)
    function(latent())
    for net in (ours, twin):
        net.out.weight.mul_(1.5)
    ours(latent())
    torch.testing.assert_close(function(latent()), twin(latent()) * 2, rtol=1e-5, atol=1e-5)
    accelerator.release()
    torch.testing.assert_close(function(latent()), twin(latent()) * 2, rtol=1e-5, atol=1e-5)


def test_the_forward_looks_like_a_method_to_exporters():
    ours, _, twin = pair(plans=False)
    assert ours.forward.__code__ is twin.forward.__code__
    assert ours.forward.__kwdefaults__ == {"also": None} and ours.forward.__defaults__ == (1.0,)
    assert not hasattr(ours.forward, "__self__") and not hasattr(ours.forward, "no_such_mark")


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx(dynamo):
    pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    if dynamo:
        pytest.importorskip("onnxscript")
    import onnx

    ours, accelerator, twin = pair()
    file = io.BytesIO()
    torch.onnx.export(nn.Sequential(ours), (latent(9),), file, **({"dynamo": True} if dynamo else {"dynamo": False}))
    session = reference.ReferenceEvaluator(onnx.load_from_string(file.getvalue()))
    (name,) = session.input_names
    (found,) = session.run(None, {name: latent(3).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), twin(latent(3)), rtol=1e-4, atol=1e-4)
    assert accelerator.report.as_dict()["last_error"] is None
