"""A function of another library as one operation."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sfast_ext.capture import opaque
from sfast_ext.kernels.backend.graph_memory import peak_bytes
from sfast_ext.plans.register_machine import Interpreter


def shape(tensors):
    return tensors[0].shape


def test_arguments_are_given_back_as_they_were():
    seen = []

    def function(x, pair, *, scale=None, name="", layout=(1, 2)):
        seen.append((pair[1], scale, name, layout))
        return x * 2 + pair[0]

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    result = opaque.call("test.a", function, shape, (x, [y, 7]), {"scale": 0.5, "name": "a", "layout": (3, None)})
    assert torch.equal(result, x * 2 + y) and seen == [(7, 0.5, "a", (3, None))]


def test_calls_that_differ_in_a_value_are_told_apart():
    def function(x, value):
        return x + value

    x = torch.zeros(2)
    for value in (0.0, -0.0, 1, 1.0, True):
        result = opaque.call("test.b", function, shape, (x, value), {})
        assert torch.equal(result, x + value)
    assert len([key for key in opaque._calls if key.startswith("test.b(")]) == 5


def test_a_wrong_result_is_an_error_that_says_so():
    x = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"test\.c\(#0\) gave tuple, not a tensor \(2,\)"):
        opaque.call("test.c", lambda x: (x, x), shape, (x,), {})
    with pytest.raises(RuntimeError, match=r"gave \(\(3,\), torch\.float32\)"):
        opaque.call("test.d", lambda x: torch.zeros(3), shape, (x,), {})
    with pytest.raises(opaque.NotPlain, match=r"builtins\.object"):
        opaque.call("test.e", lambda x, y: x, shape, (x, object()), {})


@pytest.mark.parametrize("writes", [False, True])
def test_copies_are_made_for_the_first_run_and_for_who_writes(writes):
    given = []

    def function(x, y):
        given.append((x.data_ptr(), y.data_ptr()))
        if writes:
            y -= 1
        return x + y

    x, y = torch.randn(4), torch.randn(4)
    before = y.clone()
    for run in range(3):
        result = opaque.call(f"test.writes {writes}", function, shape, (x, y), {})
        assert torch.equal(result, x + (before - int(writes))) and torch.equal(y, before)
        same = given[run][0] == x.data_ptr(), given[run][1] == y.data_ptr()
        assert same == ((False, False) if run == 0 else (True, not writes))


def test_the_last_dimension_is_contiguous_and_so_is_the_result():
    def function(x):
        assert x.stride(-1) == 1
        return (x + 1).t().contiguous().t()

    x = torch.randn(4, 3).t()
    result = opaque.call("test.f", function, shape, (x,), {})
    assert torch.equal(result, x + 1) and result.is_contiguous()


def test_a_program_runs_it_and_its_memory_is_counted():
    ran = []

    def function(x):
        ran.append(x)
        return x.sin()

    def forward(x):
        return opaque.call("test.g", function, shape, (x * 2,), {}) + 1

    x = torch.randn(2, 8)
    gm = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(x)
    assert not ran
    (node,) = [n for n in gm.graph.nodes if n.target is opaque.OPERATOR]
    assert node.meta["val"].shape == (2, 8) and node.args[0] == "test.g(#0)"
    assert peak_bytes(gm.graph) == 2 * x.numel() * 4
    assert isinstance(gm, fx.GraphModule)
    assert torch.equal(Interpreter(gm)(x), (x * 2).sin() + 1) and len(ran) == 1


def test_a_fake_result_has_the_metadata_of_the_real_one():
    def function(qkv):
        return qkv.unbind(2)[0].sin()

    def packed(tensors):
        return *tensors[0].shape[:2], *tensors[0].shape[3:]

    x = torch.randn(2, 5, 3, 4, 8)
    real = opaque.call("test.h", function, packed, (x,), {})
    with FakeTensorMode() as mode:
        fake = opaque.call("test.h", function, packed, (mode.from_tensor(x),), {})
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)
    assert opaque.call("test.h", function, packed, (x.to("meta"),), {}).shape == real.shape
