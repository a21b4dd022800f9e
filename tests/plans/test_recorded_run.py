"""Runs that are repeated without the functions that decided on their launches, on the CPU: kernels in CUDA C++ compiled
by the host's compiler, behind the table of addresses that the driver is given."""

from __future__ import annotations

import ctypes
import gc
import operator
import weakref
from types import SimpleNamespace

import pytest
import torch
from kernels import cuda_on_cpu
from torch import Tensor, fx, nn

from sfast_ext import kernels
from sfast_ext.kernels.backend import launch_log, nvrtc, triton_runtime
from sfast_ext.kernels.group_norm import add_group_norm, group_norm, portable
from sfast_ext.kernels.pointwise import add_layer_norm, geglu
from sfast_ext.passes.rewrite import aten
from sfast_ext.plans import recorded_run
from sfast_ext.plans.recorded_run import CannotRepeat, RecordedRun
from sfast_ext.plans.register_machine import Interpreter

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)
GROUPS, CHANNELS, SIZE, EPS = 4, 32, 6, 1e-5
SHAPE = 2, CHANNELS, SIZE, SIZE


@pytest.fixture(autouse=True)
def decided(monkeypatch):
    """Names of the kernels whose launches were decided on."""
    found = []

    def launch(source, grid, *args, **constants):
        found.append(source.name)
        own(source, grid, *args, **constants)

    cuda_on_cpu.as_driver(monkeypatch)
    own = nvrtc.Source._launch
    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    with torch.no_grad(), triton_runtime.without_triton():
        yield found


class Graph:
    """Of the inputs `x` and `y`; `add` puts a call into it, `weight` a weight."""

    def __init__(self):
        self.root, self.graph = nn.Module(), fx.Graph()
        self.x, self.y = self.graph.placeholder("x"), self.graph.placeholder("y")

    def add(self, function, *args, **kwargs):
        return self.graph.call_function(function, args, kwargs)

    def weight(self, *shape):
        name = f"weight_{len(self.root._buffers)}"
        self.root.register_buffer(name, torch.randn(shape))
        return self.graph.get_attr(name)

    def program(self, *outputs):
        self.graph.output(list(outputs))
        return Interpreter(fx.GraphModule(self.root, self.graph))


def block():
    """Norm, convolution, residual with a norm, and a feed-forward part: the program, and its weights."""
    g = Graph()
    norm = g.weight(CHANNELS), g.weight(CHANNELS)
    y = g.add(group_norm.launch, g.x, GROUPS, *norm, EPS, silu=True)
    z = g.add(aten.conv2d.default, y, g.weight(CHANNELS, CHANNELS, 3, 3), None, [1, 1], [1, 1])
    both = g.add(add_group_norm.launch, z, g.weight(CHANNELS), g.y, 1.0, GROUPS, *norm, EPS)
    total, normed = g.add(operator.getitem, both, 0), g.add(operator.getitem, both, 1)
    rows = g.add(aten.reshape.default, g.add(aten.permute.default, normed, [0, 2, 3, 1]), [-1, SIZE * SIZE, CHANNELS])
    gated = g.add(geglu.launch, g.add(aten.linear.default, rows, g.weight(2 * CHANNELS, CHANNELS)))
    sums = g.add(add_layer_norm.launch, gated, rows, g.weight(CHANNELS), g.weight(CHANNELS), EPS)
    return g.program(total, g.add(operator.getitem, sums, 1)), g.root


def images():
    return [torch.randn(SHAPE).contiguous(memory_format=torch.channels_last) for _ in range(2)]


def equal(these, those):
    return len(these) == len(those) and all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(these, those, strict=True)
    )


def recorded(function, *inputs, outputs=1):
    """A recorded run of a graph of one call."""
    g = Graph()
    out = g.add(function, g.x, g.y)
    outs = [out] if outputs == 1 else [g.add(operator.getitem, out, i) for i in range(outputs)]
    program = g.program(*outs)
    program(*inputs)
    return RecordedRun(program, inputs), program


def repeats(function, decided, x=None, y=None, outputs=1):
    """Asserts that a function of two tensors is repeated for other values."""
    x, y = torch.randn(4, 6) if x is None else x, torch.randn(4, 6) if y is None else y
    run, program = recorded(function, x, y, outputs=outputs)
    run._program = Forbidden(program)
    for _ in range(2):
        x, y = torch.randn_like(x), torch.randn_like(y)
        assert equal(run(x, y), program(x, y))
    return run


class Forbidden:
    """In the place of a program that is not to run."""

    def __init__(self, program):
        self.tensors = program.tensors

    def __call__(self, *inputs):
        raise AssertionError("it was not repeated")


def test_a_block_is_repeated_and_nothing_is_decided_again(decided):
    program, _ = block()
    inputs = images()
    wanted = program(*inputs)
    run = RecordedRun(program, inputs)
    del decided[:]
    assert equal(run(*inputs), wanted)
    others = images()
    given = run(*others)
    assert not decided
    assert equal(given, program(*others)) and len(decided) == 4
    assert not equal(given, wanted)


def test_weights_are_those_of_now():
    program, root = block()
    inputs = images()
    program(*inputs)
    run = RecordedRun(program, inputs)
    before = run(*inputs)
    for weight in root.buffers():
        weight.mul_(1.5)
    assert equal(run(*inputs), program(*inputs)) and not equal(run(*inputs), before)
    for weight in root.buffers():
        weight.data = (2 * weight).clone()  # at another address
    assert equal(run(*inputs), program(*inputs))


@pytest.mark.parametrize("what", ["strides", "alignment", "shape"])
def test_other_tensors_are_decided_on_anew(what, decided):
    program, _ = block()
    x, y = images()
    program(x, y)
    run = RecordedRun(program, (x, y))
    if what == "strides":
        x = x.contiguous()
    elif what == "alignment":
        x = torch.randn(x.numel() + 1)[1:].view(2, SIZE, SIZE, CHANNELS).permute(0, 3, 1, 2)
        assert x.stride() == y.stride() and x.data_ptr() % 16
    else:
        strides = x.stride()
        x, y = x[:1], y[:1]
        assert x.stride() == strides
    del decided[:]
    given = run(x, y)
    assert len(decided) == 4 and equal(given, program(x, y))


def test_a_launch_is_a_kernel_s_with_the_tensors_of_that_run(decided):
    def function(x: Tensor, y: Tensor) -> Tensor:
        return geglu.launch(x[1:]) + geglu.launch(y)[1:]

    run = repeats(function, decided)
    del decided[:]
    run(torch.randn(4, 6), torch.randn(4, 6))
    assert not decided


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x.t().contiguous(), torch.cat([x, y], 1)),
        lambda x, y: (x.view(24)[3:15].view(3, 4), y.unflatten(1, (2, 3)).transpose(1, 2).flatten(1)),
        lambda x, y: (torch.stack(x.chunk(2, 1)), y.split([2, 4], 1)[1]),
        lambda x, y: ((x + y).view(torch.int32).bitwise_not().view(torch.float32).clone(), y.new_ones(3)),
        lambda x, y: (x.clone().mul_(y).add_(1), torch.addmm(y[:, :4], x, y.t())),
        lambda x, y: torch.sort(x + y, dim=1),
        lambda x, y: (torch.zeros(2, 3), torch.empty(0, 3)),
        lambda x, y: (geglu.launch(x.view(2, 12)[:, 4:10]), geglu.launch((x + y).t().contiguous().t())),
        lambda x, y: (x, y.t()),
    ],
    ids=[
        "copies",
        "views",
        "several views",
        "another type",
        "in place",
        "several results",
        "constants",
        "kernels",
        "inputs",
    ],
)
def test_operations_of_all_kinds(function, decided):
    repeats(function, decided, outputs=2)


def test_values_live_as_long_as_without_it():
    alive = []

    def first(x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        alive.append(weakref.ref(z))
        return z

    def last(x: Tensor, y: Tensor) -> Tensor:
        gc.collect()
        assert alive[-1]() is None
        return x * y

    g = Graph()
    z = g.add(first, g.x, g.y)
    w = g.add(aten.exp.default, g.add(aten.exp.default, z))
    program = g.program(g.add(last, w, g.y))
    inputs = torch.randn(3), torch.randn(3)
    run = RecordedRun(program, inputs)  # `last` looks while the run is recorded
    held = []
    for at, (step, dead) in enumerate(run._machine.steps):

        def looked(values, stream, step=step, at=at):
            step(values, stream)
            held.append(sum(x is not None for x in values))

        run._machine.steps[at] = looked, dead
    run(*inputs)
    assert held == [3, 4, 4, 4]
    assert not [x for x in gc.get_referrers(alive[-1]()) if alive[-1]() is not None]


def elsewhere(x: Tensor, y: Tensor) -> Tensor:
    return x + CONSTANT


def past_the_dispatcher(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), y.data_ptr(), y.nbytes)
    return out


def measuring(x: Tensor, y: Tensor) -> Tensor:
    launch_log.put(launch_log.Opaque("measurements"))
    return x + y


CONSTANT = torch.randn(4, 6)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (elsewhere, "comes from elsewhere"),
        (past_the_dispatcher, "the repetition differs"),
        (measuring, "measurements"),
        (lambda x, y: x * float(y[0, 0]), "reads values"),
        (lambda x, y: x.add_(y), "writes to an input or a weight"),
        (lambda x, y: x.view(24).mul_(2).view(4, 6) + y, "writes to an input or a weight"),
        (lambda x, y: torch.add(x, y, out=y), "writes to an input or a weight"),
    ],
    ids=["elsewhere", "past the dispatcher", "measuring", "values", "in place", "through a view", "out"],
)
def test_what_cannot_be_repeated(function, why):
    with pytest.raises(CannotRepeat, match=why):
        recorded(function, torch.randn(4, 6), torch.randn(4, 6))


def test_one_tensor_twice_cannot_be_told_apart():
    x = torch.randn(4, 6)
    with pytest.raises(CannotRepeat, match="two inputs are one tensor"):
        recorded(torch.add, x, x)


def test_a_weight_that_is_written_to_cannot_be_repeated():
    g = Graph()
    program = g.program(g.add(lambda w, x: w.add_(x), g.weight(4, 6), g.x))
    with pytest.raises(CannotRepeat, match="writes to an input or a weight"):
        RecordedRun(program, (torch.randn(4, 6), torch.randn(4, 6)))


def test_a_failing_launch_is_an_error(monkeypatch):
    run, _ = recorded(lambda x, y: geglu.launch(x) + geglu.launch(y), torch.randn(4, 6), torch.randn(4, 6))

    def launched(*args):
        raise nvrtc.Unavailable("cuLaunchKernel: CUDA_ERROR")

    monkeypatch.setattr(nvrtc.loaded_driver(), "cuLaunchKernel", launched)
    with pytest.raises(nvrtc.Unavailable, match="CUDA_ERROR"):
        run(torch.randn(4, 6), torch.randn(4, 6))


def test_tensor_maps_are_of_the_memory_of_that_run(monkeypatch):
    """A map is encoded once for an address."""
    encoded, handed = [], []

    def encode(address):
        encoded.append(address)
        return ctypes.c_uint64(address)

    def launched(function, grid, block, shared, stream, parameters):
        table = (ctypes.c_void_p * 2).from_address(parameters)
        handed.append([ctypes.c_uint64.from_address(place).value for place in table])

    def function(x: Tensor, y: Tensor) -> Tensor:
        source[(1,)](x[1:], y)
        return x + y

    def prepared(x, y):
        return [launch_log.TensorMap(x, encode(x.data_ptr()), encode), y], 32, 0

    source = nvrtc.Source("none", prepared, ())
    driver = SimpleNamespace(cuLaunchKernel=launched)
    monkeypatch.setattr(nvrtc, "loaded_driver", lambda: driver)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    run, _ = recorded(function, x, y)
    del encoded[:], handed[:]
    kept = [x, *(torch.randn(4, 6) for _ in range(recorded_run._MAX_MAPS))]
    for each in (x, x, *kept):
        run(each, y)
        assert handed[-1] == [each[1:].data_ptr(), y.data_ptr()]
    assert encoded == [each[1:].data_ptr() for each in kept[1:]]  # that of x when the repetition was checked
    run(x, y)
    assert len(encoded) == len(kept) and handed[-1][0] == x[1:].data_ptr()


def test_norms_that_take_the_memory_of_operands_are_repeated(decided, monkeypatch):
    monkeypatch.setattr(portable, "whole", lambda *args: None)
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 2)
    results = []
    for given in (False, True):
        torch.manual_seed(0)
        g = Graph()
        options = [g.weight(CHANNELS, CHANNELS, 3, 3), None, [1, 1], [1, 1]]
        conv = g.add(aten.conv2d.default, g.x, *options)
        norm = g.add(group_norm.launch, conv, GROUPS, None, None, EPS, silu=True, **({"out": conv} if given else {}))
        conv = g.add(aten.conv2d.default, norm, *options)
        args = conv, g.weight(CHANNELS), g.y, 1.0, GROUPS, None, None, EPS
        both = g.add(add_group_norm.launch, *args, **({"out": (None, conv)} if given else {}))
        program = g.program(g.add(operator.getitem, both, 0), g.add(operator.getitem, both, 1))
        x, y = images()
        program(x, y)
        run = RecordedRun(program, (x, y))
        run._program = Forbidden(program)
        x, y = images()
        results.append(run(x, y))
        assert equal(results[-1], program(x, y))
    assert equal(*results)
