"""A forward that reads a number from a weight, or from another real tensor, is refused. Literals may be read."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture import leftovers, real_tensors
from sfast_ext.capture.capture import CaptureRefused, capture
from sfast_ext.capture.live_trace import SUPPORTED, LiveTrace
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")
X = torch.randn(2, 4)
OUTSIDE = torch.tensor(3.0)


class Gated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("row", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("mask", torch.tensor([True, False, True, False]))
        self.held = torch.tensor(3.0)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def swallowed(m, x):
    try:
        factor = m.gate.item()
    except Exception:
        factor = 1.0
    return x * factor


def printed(m, x):
    return x * len(f"{m.gate}")


READ = {
    "item": lambda m, x: x * m.gate.item(),
    "float": lambda m, x: x * float(m.gate),
    "int": lambda m, x: x * int(m.gate),
    "complex": lambda m, x: x * complex(m.gate).real,
    "bool": lambda m, x: x * 2 if m.gate else x,
    "if not": lambda m, x: x if not m.gate else x + 1,
    "comparison": lambda m, x: x * 2 if m.gate > 1 else x,
    "any": lambda m, x: x * 2 if m.mask.any() else x,
    "chained": lambda m, x: x * 2 if 1 < m.gate < 4 else x,
    "tolist": lambda m, x: x * m.row.tolist()[1],
    "tolist of a scalar": lambda m, x: x * m.gate.tolist(),
    "numpy": lambda m, x: x * float(m.gate.numpy()),
    "detach and numpy": lambda m, x: x * float(m.gate.detach().numpy()),
    "asarray": lambda m, x: x * float(np.asarray(m.row)[1]),
    "np.array of a list": lambda m, x: x * float(np.array([m.gate, m.gate])[1]),
    "np.float32": lambda m, x: x * float(np.float32(m.gate)),
    "dlpack": lambda m, x: x * float(np.from_dlpack(m.row)[1]),
    "math": lambda m, x: x * math.exp(m.gate),
    "range": lambda m, x: sum((x for _ in range(m.count)), x),
    "index": lambda m, x: x[:, : m.count],
    "list index": lambda m, x: x * [1.0, 2.0, 3.0][m.count],
    "select": lambda m, x: x[:, m.count],
    "view": lambda m, x: x.view(m.count, -1),
    "equal": lambda m, x: x * 2 if torch.equal(m.row, m.row + 0) else x,
    "equal of weights": lambda m, x: x * 2 if torch.equal(m.row, m.row) else x,
    "allclose": lambda m, x: x * 2 if torch.allclose(m.row, m.row) else x,
    "is_nonzero": lambda m, x: x * 2 if torch.is_nonzero(m.gate) else x,
    "in": lambda m, x: x * 2 if 2.0 in m.row else x,
    "torch.tensor of a list": lambda m, x: x * torch.tensor([m.gate, 1.0, 1.0, 1.0]),
    "torch.tensor of nested lists": lambda m, x: x * torch.tensor([[m.gate, 1.0, 1.0, 1.0]]),
    "torch.tensor by keyword": lambda m, x: x * torch.tensor(data=[m.gate, 1.0, 1.0, 1.0]),
    "new_tensor of a list": lambda m, x: x * x.new_tensor([m.gate, 1.0, 1.0, 1.0]),
    "as_tensor of a list": lambda m, x: x * torch.as_tensor([m.gate, 1.0, 1.0, 1.0]),
    "full": lambda m, x: x * torch.full((4,), m.gate),
    "a scalar of an operation": lambda m, x: x.clamp(max=float(m.gate)),
    "alpha": lambda m, x: torch.add(x, x, alpha=m.gate.item()),
    "format": printed,
    "repr": lambda m, x: x * len(repr(m.gate)),
    "pickle": lambda m, x: x * pickle.loads(pickle.dumps(m.gate)),
    "storage": lambda m, x: x * m.gate.untyped_storage()[3],
    "unpacked": lambda m, x: x * [float(g) for g in m.row][1],
    "sections": lambda m, x: torch.tensor_split(x, m.count.reshape(1), dim=1)[0],
    "times a number": lambda m, x: x * (m.gate * 2).item(),
    "times a literal": lambda m, x: x * (m.gate * torch.tensor(2.0)).item(),
    "a literal times it": lambda m, x: x * float(torch.tensor(2.0) * m.gate),
    "sum with a literal": lambda m, x: x * (torch.tensor(1.0) + m.row.sum()).item(),
    "a literal that it was added to": lambda m, x: x * torch.tensor(1.0).add_(m.gate).item(),
    "to a dtype": lambda m, x: x * m.gate.to(torch.float32).item(),
    "to another dtype": lambda m, x: x * m.gate.double().item(),
    "cpu": lambda m, x: x * m.gate.cpu().item(),
    "detached": lambda m, x: x * m.gate.detach().item(),
    "data": lambda m, x: x * m.gate.data.item(),
    "clone": lambda m, x: x * m.gate.clone().item(),
    "deep copy": lambda m, x: x * copy.deepcopy(m.gate).item(),
    "view of it": lambda m, x: x * m.row[1].item(),
    "max": lambda m, x: x * max(m.row).item(),
    "sorted": lambda m, x: x * float(sorted([m.gate, m.row[0]])[0]),
    "an attribute": lambda m, x: x * m.held.item(),
    "a global": lambda m, x: x * OUTSIDE.item(),
    "a global's list": lambda m, x: x * OUTSIDE.tolist(),
    "a buffer": lambda m, x: x * m.count.item(),
    "swallowed": swallowed,
    "state_dict": lambda m, x: x * m.state_dict()["gate"].item(),
}


def make(function):
    module = Gated(function).eval()
    call = flatten_call((X,), {}, CPU)
    return module, call, WeightArena(module)


@pytest.mark.parametrize("name", READ)
def test_a_number_of_a_real_tensor_is_no_part_of_a_plan(name):
    module, call, arena = make(READ[name])
    values = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad(), pytest.raises(CaptureRefused) as refused:
        capture(module.forward, call, call.tensors(CPU), arena)
    print(refused.value)
    assert all(torch.equal(value, values[key]) for key, value in module.state_dict().items())
    assert OUTSIDE == 3.0 and module.held == 3.0


@pytest.mark.parametrize("name", ["equal", "sum with a literal"])
def test_what_a_refusal_leaves_is_not_searched_for(name, monkeypatch):
    monkeypatch.setattr(leftovers, "_take_out", lambda tensor: pytest.fail("objects were looked at"))
    module, call, arena = make(READ[name])
    with torch.no_grad(), pytest.raises(CaptureRefused):
        capture(module.forward, call, call.tensors(CPU), arena)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("item", r"reads the value of a weight \(gate\) as a number"),
        ("tolist", r"reads the value of a weight \(row\) as a number"),
        ("a buffer", r"reads the value of a weight \(count\) as a number"),
        ("a global", r"reads a number from a tensor \[\] that is neither an argument nor a weight"),
        ("swallowed", r"reads the value of a weight \(gate\) as a number"),
    ],
)
def test_the_reason_names_the_tensor(name, words):
    module, call, arena = make(READ[name])
    with torch.no_grad(), pytest.raises(CaptureRefused, match=words) as refused:
        capture(module.forward, call, call.tensors(CPU), arena)
    assert not refused.value.reads_value


NOT_READ = {
    "a literal": lambda m, x: x * torch.tensor(0.5).item(),
    "what follows from literals": lambda m, x: x * float(torch.tensor(0.5) * torch.tensor(3.0)),
    "a literal of a list": lambda m, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "a tensor as a weight": lambda m, x: x * m.gate + m.row * m.count,
    "torch.as_tensor of a weight": lambda m, x: x * torch.as_tensor(m.gate),
    "metadata": lambda m, x: x * m.row.numel() * m.row.shape[0] * m.row.dim() * len(m.row) * m.row.stride(0),
    "flags": lambda m, x: x * 2 if m.gate.is_floating_point() and not m.gate.is_cuda and m.gate.dtype.is_signed else x,
    "identity": lambda m, x: x * 2 if m.gate is not None and any(p is m.gate for p in m.parameters()) else x,
    "an index": lambda m, x: x * m.row[torch.tensor([3, 2, 1, 0])],
    "a weight as an index": lambda m, x: x * m.row[m.mask.long()],
    "where": lambda m, x: torch.where(m.mask, x, m.gate),
    "a learned mix": lambda m, x: m.gate.sigmoid() * x + (1 - m.gate.sigmoid()) * m.row,
    "stack": lambda m, x: x * torch.stack([m.gate, m.gate]).sum(),
    "sizes of a weight": lambda m, x: x.view(-1, m.row.shape[0]),
    "isinstance": lambda m, x: x * 2 if isinstance(m.gate, nn.Parameter) and not isinstance(x, nn.Parameter) else x,
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_reads_no_number_of_a_real_tensor_is_recorded(name):
    module, call, arena = make(NOT_READ[name])
    with torch.no_grad():
        found = capture(module.forward, call, call.tensors(CPU), arena)
        for value in (5.0, 0.25):
            module.gate.fill_(value)
            torch.testing.assert_close(found.graph_module(X)[0], module(X), rtol=0, atol=0)


def write(m, x):
    m.held += torch.tensor(1.0)
    return x


WRITES = {
    "a parameter": lambda m, x: m.gate.mul_(2) * x,
    "a parameter by a literal": lambda m, x: m.gate.add_(torch.tensor(2.0)) * x,
    "a buffer": lambda m, x: m.count.add_(1) * x,
    "a buffer by a literal": lambda m, x: m.count.add_(torch.tensor(1)) * x,
    "copy_": lambda m, x: m.row.copy_(x[0]) * x,
    "fill_": lambda m, x: m.row.fill_(2) * x,
    "an item": lambda m, x: m.row.__setitem__(0, 7.0) or x * m.row,
    "zero_": lambda m, x: m.row.zero_() + x,
    "an attribute": write,
    "a global": lambda m, x: OUTSIDE.add_(torch.tensor(1.0)) * x,
    "a global by a number": lambda m, x: OUTSIDE.mul_(2.0) * x,
    "a view": lambda m, x: m.row[:2].mul_(2).sum() * x,
    "out": lambda m, x: torch.mul(m.row, 2, out=m.row) * x,
    "foreach": lambda m, x: torch._foreach_add_([m.row, m.gate], 1.0) or x * m.row,
    "data": lambda m, x: m.gate.data.mul_(2) * x,
}


def replace_data(of):
    def forward(m, x):
        tensor = of(m)
        tensor.data = x.mean(0)[: tensor.numel()].reshape(tensor.shape).to(tensor.dtype)
        return x * tensor

    return forward


REPLACED_DATA = {
    "a parameter": lambda m: m.gate,
    "a buffer": lambda m: m.row,
    "a buffer of integers": lambda m: m.count,
    "an attribute": lambda m: m.held,
    "a global": lambda m: OUTSIDE,
}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_to_a_real_tensor(name):
    module, call, arena = make(WRITES[name])
    values = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad(), pytest.raises(CaptureRefused, match="writes to|neither an argument nor a weight|keeps state"):
        capture(module.forward, call, call.tensors(CPU), arena)
    assert all(torch.equal(value, values[key]) for key, value in module.state_dict().items())
    assert OUTSIDE == 3.0 and module.held == 3.0 and type(module.held) is torch.Tensor
    assert not isinstance(module.gate, FakeTensor)


@pytest.mark.parametrize("name", list(WRITES)[::3])
def test_nothing_is_written_to_one_on_a_torch_that_hides_its_recording_mode(name, monkeypatch):
    monkeypatch.setattr(real_tensors, "_get_dispatch_mode_pre_dispatch", None)
    test_nothing_is_written_to_a_real_tensor(name)


@pytest.mark.parametrize("name", REPLACED_DATA)
def test_the_data_of_a_real_tensor_is_not_replaced(name):
    of = REPLACED_DATA[name]
    module, call, arena = make(replace_data(of))
    value = of(module).clone()
    with torch.no_grad(), pytest.raises(CaptureRefused, match="replaces the data of a"):
        capture(module.forward, call, call.tensors(CPU), arena)
    assert of(module).device.type == "cpu" and torch.equal(of(module), value)


def test_the_data_of_an_own_tensor_may_be_replaced():
    def forward(m, x):
        made = torch.zeros_like(x)
        made.data = x * 2
        return made

    module, call, arena = make(forward)
    with torch.no_grad():
        capture(module.forward, call, call.tensors(CPU), arena)


@pytest.mark.skipif(not SUPPORTED, reason="this torch records no run on real tensors")
@pytest.mark.parametrize("name", sorted(READ.keys() - {"sections"}))
def test_a_run_on_real_tensors_that_reads_a_number_is_not_recorded(name):
    module, call, arena = make(READ[name])
    trace = LiveTrace(call, arena, CPU)
    with torch.no_grad():
        result = trace.run(module, (X,), {})
        torch.testing.assert_close(result, module(X))
    assert trace.recorded() is None
