"""A node that takes lists of weights and returns the banks that it writes to: in a plan's graph, its register machine,
and a recorded run, on the CPU."""

from __future__ import annotations

import operator

import pytest
import torch
from kernels import cuda_on_cpu
from torch import fx, nn

from sfast_ext import kernels
from sfast_ext.kernels.backend import graph_memory, nvrtc, size_prediction, triton_runtime
from sfast_ext.kernels.eight_bits import quantise_rows, quantise_weights
from sfast_ext.kernels.linear import linear_accumulate
from sfast_ext.passes import rewrite
from sfast_ext.passes.cse import cse
from sfast_ext.passes.rewrite import aten
from sfast_ext.plans import graph_facts
from sfast_ext.plans.recorded_run import RecordedRun
from sfast_ext.plans.register_machine import _COMPILE_AFTER, Interpreter

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)
# the second is packed: the rows of three linears
SHAPES, GROUPS = [(6, 64), (3 * 4, 64), (5, 128)], [64, 0, 128]


class Graph:
    """Of x (M, 64) and y (M, 128): the products with each weight, times its scales."""

    def __init__(self, used: tuple[int, ...] = (0, 1, 2)) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.x, self.y = self.graph.placeholder("x"), self.graph.placeholder("y")
        torch.manual_seed(0)
        self.weights = [self.tensor(f"weight{i}", torch.randn(shape).half()) for i, shape in enumerate(SHAPES)]
        self.rows = [self.tensor(f"rows{i}", torch.zeros(shape, dtype=torch.int8)) for i, shape in enumerate(SHAPES)]
        self.scales = [self.tensor(f"scales{i}", torch.zeros(shape[0])) for i, shape in enumerate(SHAPES)]
        self.digests = [
            self.tensor(f"digests{i}", torch.zeros(shape[0], dtype=torch.int64)) for i, shape in enumerate(SHAPES)
        ]
        self.node = self.call(
            quantise_weights.launch, self.weights, self.rows, self.scales, self.digests, GROUPS, val=self.values()
        )
        self.outputs = []
        for i in used:
            q = self.call(operator.getitem, self.node, i, val=self.root.get_buffer(f"rows{i}"))
            x = self.y if SHAPES[i][1] == 128 else self.x
            val = torch.empty(3, SHAPES[i][0])
            wide = self.call(aten.mul.Tensor, q, 1.0, val=torch.empty(SHAPES[i]))
            product = self.call(aten.linear.default, x, wide, val=val)
            self.outputs.append(self.call(aten.mul.Tensor, product, self.scales[i], val=val))
        self.graph.output(self.outputs)

    def values(self):
        return [self.root.get_buffer(f"rows{i}") for i in range(len(SHAPES))]

    def tensor(self, name, tensor):
        self.root.register_buffer(name, tensor)
        node = self.graph.get_attr(name)
        node.meta["val"] = tensor
        return node

    def call(self, function, *args, val):
        node = self.graph.call_function(function, args)
        node.meta["val"] = val
        return node

    def module(self):
        return fx.GraphModule(self.root, self.graph)

    def wanted(self, x, y):
        found = []
        for i, group in enumerate(GROUPS):
            q, scale = quantise_rows.reference(self.root.get_buffer(f"weight{i}"), group)
            found.append(torch.nn.functional.linear(y if SHAPES[i][1] == 128 else x, q * 1.0) * scale)
        return found


def inputs():
    return [torch.randn(3, columns) for columns in (64, 128)]


def equal(these, those):
    return len(these) == len(those) and all(torch.equal(a, b) for a, b in zip(these, those))


@pytest.fixture(params=["pytorch", "kernel"])
def way(request, monkeypatch):
    if request.param == "kernel":
        cuda_on_cpu.as_driver(monkeypatch)
    with torch.no_grad(), triton_runtime.without_triton():
        yield request.param


def test_a_plan_s_machine_follows_its_weights(way):
    g = Graph()
    program = Interpreter(g.module())
    for run in range(_COMPILE_AFTER + 3):  # it becomes code on the way
        x, y = inputs()
        assert equal(program(x, y), g.wanted(x, y))
        if run % 2:
            g.root.get_buffer(f"weight{run % 3}")[run % 4].mul_(-1.5)
    assert program._machine is None


def test_a_recorded_run_follows_them_too(monkeypatch):
    cuda_on_cpu.as_driver(monkeypatch)
    decided = []
    own = nvrtc.Source._launch
    monkeypatch.setattr(
        nvrtc.Source,
        "_launch",
        lambda source, *args, **kwargs: (decided.append(source.name), own(source, *args, **kwargs)),
    )
    with torch.no_grad(), triton_runtime.without_triton():
        g = Graph()
        program = Interpreter(g.module())
        x, y = inputs()
        wanted = program(x, y)
        run = RecordedRun(program, (x, y))
        del decided[:]
        assert equal(run(x, y), wanted)
        for step in range(3):
            g.root.get_buffer(f"weight{step}").mul_(2)
            x, y = inputs()
            assert equal(run(x, y), g.wanted(x, y))
        # weights and banks at other addresses: the machine's tensors get other memory, as by a move
        old = [tensor.detach() for tensor in g.root.buffers()]  # which stays, and holds other values
        for name, tensor in list(g.root.named_buffers()):
            if name.startswith(("weight", "rows", "scales", "digests")):
                tensor.data = tensor.clone()
        g.root.get_buffer("weight1").add_(1)
        before = {name: tensor.clone() for name, tensor in g.root.named_buffers()}
        assert equal(run(x, y), g.wanted(x, y)) and not decided
        assert not torch.equal(g.root.get_buffer("rows1"), before["rows1"])
        assert torch.equal(g.root.get_buffer("rows2"), before["rows2"])
        assert len(old) == 4 * len(SHAPES)


def test_it_takes_no_memory_and_its_results_are_the_banks():
    g = Graph()
    # while the second product is made: two results, and codes as float32; rows are of the arguments
    (first, _), (rows, columns), _ = SHAPES
    assert graph_memory.peak_bytes(g.graph) == 4 * 3 * (first + rows) + 4 * rows * columns
    taken = [node for node in g.graph.nodes if node.target is operator.getitem]
    assert [graph_memory.base_of(node) for node in taken] == g.rows
    assert graph_memory.base_of(g.node) is g.rows[0]
    assert graph_facts.operation_counts(g.graph)["sfast_ext.kernels.eight_bits.quantise_weights.launch"] == 1


def test_banks_that_a_graph_makes_live_as_long_as_they_are_read():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4, 64)
    rows = [graph.call_function(aten.neg.default, (x,)) for _ in range(2)]
    for row in rows:
        row.meta["val"] = torch.zeros(4, 64, dtype=torch.int8)
    node = graph.call_function(quantise_weights.launch, ([x, x], rows, [x, x], [x, x], [0, 0]))
    node.meta["val"] = [row.meta["val"] for row in rows]
    last = graph.call_function(operator.getitem, (node, 1))
    last.meta["val"] = rows[1].meta["val"]
    middle = graph.call_function(aten.neg.default, (x,))
    middle.meta["val"] = torch.zeros(1000, dtype=torch.int8)
    end = graph.call_function(aten.add.Tensor, (last, middle))
    end.meta["val"] = torch.zeros(1, dtype=torch.int8)
    graph.output(end)
    # while the last is made: the second row, what lies between, and itself
    assert graph_memory.peak_bytes(graph) == 256 + 1000 + 1


def test_a_sum_may_be_given_by_name():
    graph = fx.Graph()
    x, weight, total = map(graph.placeholder, ("x", "weight", "total"))
    by_name = graph.call_function(linear_accumulate.launch, (x, weight), {"out_sum": total})
    by_place = graph.call_function(linear_accumulate.launch, (x, weight, total))
    assert graph_memory.base_of(by_name) is graph_memory.base_of(by_place) is total
    assert graph_memory.base_of(graph.call_function(linear_accumulate.launch, (x, weight))) is None


def test_what_it_writes_is_not_read_before_a_kernel_waits():
    """As with PDL: no kernel reads a bank while it is written."""
    module = Graph().module()
    tensors = list(module.buffers())
    weights = [module.get_buffer(f"weight{i}") for i in range(len(SHAPES))]
    assert list(map(id, graph_facts.readonly(module, tensors))) == list(map(id, weights))


def test_equal_graphs_have_equal_digests():
    first, second, third = Graph().module(), Graph().module(), Graph((0, 2)).module()
    assert graph_facts.digest(first) == graph_facts.digest(second) != graph_facts.digest(third)


def test_it_is_there_while_one_of_its_results_is_read():
    g = Graph((1,))
    assert rewrite.eliminate_dead(g.graph) == 0
    (output,) = (node for node in g.graph.nodes if node.op == "output")
    output.args = ([],)
    rewrite.eliminate_dead(g.graph)
    assert [node for node in g.graph.nodes if node.op == "call_function"] == []


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 0, 1)], ids=str)
def test_its_results_are_read_once_by_all(used):
    g = Graph(used)
    count = cse(g.module(), None)
    taken = [node for node in g.graph.nodes if node.target is operator.getitem]
    assert len(taken) == len(set(used)) and count >= len(used) - len(set(used))
    assert all(node.args[0] is g.node for node in taken)


def test_it_pins_nothing_and_what_is_written_in_place_pins_a_bank_alone():
    g = Graph()
    assert rewrite.mutated(g.graph) == set()
    graph = fx.Graph()
    names = ("x", "weight", "other", "rows", "others", "scales", "digests")
    x, weight, other, rows, others, scales, digests = map(graph.placeholder, names)
    node = graph.call_function(
        quantise_weights.launch, ([weight, other], [rows, others], [scales] * 2, [digests] * 2, [0, 0])
    )
    first = graph.call_function(operator.getitem, (node, 0))
    product_ = graph.call_function(aten.linear.default, (x, weight))
    graph.output([first, product_])
    assert rewrite.mutated(graph) == set()
    with graph.inserting_before(product_):
        written = graph.call_function(aten.neg_.default, (first,))
    pinned = rewrite.mutated(graph)
    assert {written, first, node, rows} <= pinned
    assert not {weight, other, x, product_, scales, digests} & pinned


def test_its_launches_are_predicted_from_a_graph():
    calls = size_prediction.calls(Graph().graph)
    assert len(calls) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc.Source, "supported", lambda source, device: True)
        patch.setattr(quantise_weights, "multiprocessors", lambda device: 4)
        (launch,) = size_prediction.launched(calls, torch.device("cuda", 0)).values()
    assert launch.kernel is quantise_weights.SOURCE and launch.owner == "quantise_weights"
    assert launch.constants == quantise_weights.constants(torch.float16)
    parameters, threads, _ = launch.kernel.prepare(*launch.args, **launch.constants)
    assert threads == 256 and parameters[1].value == sum(rows for rows, _ in SHAPES)
    assert size_prediction.resized(calls, (64, 64), (32, 32)) == calls


@pytest.mark.parametrize("name", ["quantise_rows", "quantise_weights", "layer_norm8", "add_layer_norm8", "layer_norm"])
def test_triton_alone_is_not_enough(name, monkeypatch):
    """What is in CUDA C++ alone is supported by NVRTC, with or without Triton."""
    kernel, device = kernels.registered()[name], torch.device("cuda", 0)
    for there in (False, True):
        monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device, there=there: there)
        assert kernel.supported(device, triton=False) == there
        assert kernel.supported(device, triton=True) == (there or name == "layer_norm")
