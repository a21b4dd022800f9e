from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from kernels.support import needs_nvrtc, randn
from sfast_ext.kernels.backend import cuda_libraries, input_copies, nvrtc
from sfast_ext.kernels.backend.cuda_driver import CU_GRAPH_NODE_TYPE_KERNEL as KERNEL
from sfast_ext.kernels.backend.cuda_driver import CUDA_KERNEL_NODE_PARAMS
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.backend.input_copies import Copies
from sfast_ext.plans.graph_pool import CAN_UPDATE_GRAPH

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# a step of SD 1.5: latents, timestep, prompt; and what is odd
SHAPES = [
    ((2, 4, 64, 64), torch.float16),
    ((), torch.int64),
    ((2, 77, 768), torch.float16),
    ((3,), torch.float16),
    ((5, 7), torch.uint8),
    ((1, 3), torch.float32),
    ((129,), torch.bool),
    ((2, 0, 4), torch.float32),
]


def some(device, shapes=SHAPES):
    made = [randn(*shape, dtype=torch.float32, device=CPU) for shape, _ in shapes]
    return [(30 * x).to(dtype).to(device) for x, (_, dtype) in zip(made, shapes)]


def poisoned(like):
    return [torch.full_like(x, 77) for x in like]


def copied(arguments):
    """How many tensors the table of a launch, or of a node, names."""
    table = ctypes.c_void_p.from_address(arguments).value
    entries = (ctypes.c_longlong * (3 * input_copies._MAX_TENSORS)).from_address(table)
    return sum(size > 0 for size in entries[2::3])


@pytest.fixture
def launched(monkeypatch):
    """How many tensors each launch took."""
    taken = []
    driver, compiler = cuda_libraries.bindings()

    class Driver:
        def __getattr__(self, name):
            return getattr(driver, name)

        def cuLaunchKernel(self, *args):
            taken.append(copied(args[-1]))
            return driver.cuLaunchKernel(*args)

    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(Driver(), compiler))
    return taken


def right(sources, targets, launched, expected):
    Copies(targets)(sources)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(targets, sources))
    assert launched == expected


@pytest.mark.gpu
def test_all_by_one_launch(launched):
    sources = some(CUDA)
    right(sources, poisoned(sources), launched, [7])  # but the one that is empty


@pytest.mark.gpu
def test_again_and_from_elsewhere(launched):
    targets = poisoned(some(CUDA))
    ours = Copies(targets)
    for _ in range(3):
        sources = [x.clone() for x in some(CUDA)]
        sources[0] *= 2
        ours(sources)
        assert all(torch.equal(a, b) for a, b in zip(targets, sources))
    assert launched == [7] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_memory_that_begins_anywhere(launched, offset):
    memory = torch.arange(4096, device=CUDA).to(torch.uint8)
    source = memory[offset : offset + 1024]
    target = torch.zeros(2048, dtype=torch.uint8, device=CUDA)
    right([source], [target[:1024]], launched, [1])
    assert not target[1024:].any()


@pytest.mark.gpu
def test_what_torch_copies(launched):
    plain = some(CUDA)[0]
    strided, negative = plain.transpose(2, 3), torch._neg_view(plain)
    large = torch.ones(input_copies._MAX_BYTES + 1, dtype=torch.uint8, device=CUDA)
    sources = [strided, negative, plain.double(), large, plain.cpu()]
    targets = [torch.zeros(x.shape, dtype=torch.float16, device=CUDA) for x in sources]
    targets[3] = torch.zeros_like(large)
    Copies(targets)(sources)
    assert all(torch.equal(a, b.to(CUDA, a.dtype)) for a, b in zip(targets, sources))
    assert launched == []


@pytest.mark.gpu
def test_more_than_one_launch_takes(launched):
    sources = [torch.full((8,), i, device=CUDA) for i in range(input_copies._MAX_TENSORS + 3)]
    right(sources, poisoned(sources), launched, [input_copies._MAX_TENSORS])


@pytest.mark.gpu
def test_in_the_order_of_the_current_stream():
    side = torch.cuda.Stream()
    source, target = torch.zeros(1 << 20, device=CUDA), torch.ones(1 << 20, device=CUDA)
    ours = Copies([target])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        source.fill_(3)
        ours([source])
        assert (target == 3).all()


@pytest.mark.gpu
def test_by_a_thread_that_has_called_nothing_of_the_runtime():
    source, target = torch.full((64,), 3, device=CUDA), torch.zeros(64, dtype=torch.int64, device=CUDA)
    ours = Copies([target])
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ours, [source]).result()
    assert (target == 3).all()


@pytest.mark.gpu
def test_without_the_kernel(monkeypatch):
    def broken(*args, **kwargs):
        raise nvrtc.Unavailable("no")

    monkeypatch.setattr(input_copies._SOURCE, "_function", broken)
    sources = some(CUDA)
    targets = poisoned(sources)
    Copies(targets)(sources)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources))


def test_a_launch_that_fails_is_the_last(monkeypatch):
    sources = some(CPU)
    targets = poisoned(sources)
    ours, tried = Copies(targets), []
    # -1 is a CPU's index
    ours._function = "a kernel"
    ours._kinds = [(t.dtype, t.nbytes) if t.numel() else None for t in targets]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)

    def failing(*args):
        tried.append(copied(args[-1]))
        raise nvrtc.Unavailable("CUDA_ERROR_INVALID_CONTEXT")

    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(SimpleNamespace(cuLaunchKernel=failing), None))
    monkeypatch.setattr(nvrtc, "bind", lambda index: None)
    monkeypatch.setattr(nvrtc, "current_stream", lambda index: 0)
    for _ in range(2):
        ours(sources)
        assert all(torch.equal(a, b) for a, b in zip(targets, sources))
        sources = [x + x for x in sources]
    assert tried == [7]


def captured(ours, after=lambda: None):
    """A graph that begins with these copies; `after` is what it does then."""
    graph, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        ours.begin()
        after()
        graph.capture_end()
    graph.instantiate()
    ours.join(graph.raw_cuda_graph(), graph.raw_cuda_graph_exec())
    torch.cuda.synchronize()
    return graph


needs_graphs = pytest.mark.skipif(not CAN_UPDATE_GRAPH, reason="this torch does not hand out its graphs")


@pytest.mark.gpu
@needs_graphs
def test_a_graph_copies_before_all_else(launched):
    sources = some(CUDA)
    targets = poisoned(sources)
    seen = poisoned(sources)
    ours = Copies(targets)
    graph = captured(ours, lambda: [a.copy_(b) for a, b in zip(seen, targets)])
    assert launched == [0]
    for _ in range(3):
        sources = [x.clone() for x in some(CUDA)]
        ours(sources)
        assert not any(torch.equal(a, b) for a, b in zip(targets, sources) if a.dtype.is_floating_point and a.numel())
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(seen, sources))
    assert launched == [0]


@pytest.mark.gpu
@needs_graphs
def test_a_replay_that_waits_keeps_what_it_was_told():
    target = torch.zeros(1 << 16, device=CUDA)
    ours, seen = Copies([target]), []
    graph = captured(ours)
    torch.cuda._sleep(50_000_000)
    sources = [torch.full_like(target, i) for i in range(20)]
    for source in sources:
        ours([source])
        graph.replay()
        seen.append(target.clone())
    assert [int(x[-1]) for x in seen] == list(range(20)) and all((x == x[-1]).all() for x in seen)


@pytest.mark.gpu
@needs_graphs
def test_what_torch_copies_a_graph_leaves_alone():
    plain = some(CUDA)[0]
    targets = [torch.zeros_like(plain) for _ in range(3)]
    ours = Copies(targets)
    graph = captured(ours)
    ours([plain + 1, plain + 1, plain + 1])
    graph.replay()
    ours([plain.transpose(2, 3), None, plain.cpu()])
    graph.replay()
    wanted = [plain.transpose(2, 3), plain + 1, plain]
    assert all(torch.equal(a, b) for a, b in zip(targets, wanted))


class Nodes:
    """A driver of one graph: by node its kind and its kernel."""

    def __init__(self, **nodes):
        self.nodes, self.told, self.fails = nodes, [], False

    def cuGraphGetRootNodes(self, graph):
        return list(self.nodes)

    def cuGraphNodeGetType(self, node):
        return KERNEL if self.nodes[node][0] == "kernel" else KERNEL + 2

    def cuGraphKernelNodeGetParams(self, node):
        return CUDA_KERNEL_NODE_PARAMS(self.nodes[node][1], kernelParams=1, extra=1)

    def cuGraphExecKernelNodeSetParams(self, executable, node, params):
        assert params.extra is None
        self.told.append((executable, node, params.func, copied(params.kernelParams)))
        if self.fails:
            raise nvrtc.Unavailable("CUDA_ERROR_INVALID_VALUE")


@pytest.fixture
def joined(monkeypatch):
    """Copies that have joined a graph of a driver, for CPU tensors."""

    def join(driver, targets):
        monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(driver, None))
        ours = Copies(targets)
        ours._function = 7
        ours.join(1, 2)
        return ours

    return join


def test_its_own_node_is_told(joined):
    sources = some(CPU)
    driver = Nodes(memset=("memset", 0), other=("kernel", 5), ours=("kernel", 7))
    ours = joined(driver, poisoned(sources))
    ours(sources)
    ours([None, *sources[1:]])
    assert driver.told == [(2, "ours", 7, 7), (2, "ours", 7, 6)]


FOUR = [1.0, 2.0, 3.0, 4.0]
UNLIKE = {
    "of as many bytes": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
    "narrower": torch.tensor(FOUR, dtype=torch.float16),
    "wider": torch.tensor(FOUR, dtype=torch.float64),
    "a single number": torch.tensor([5.0]),
    "strided": torch.stack([torch.tensor(FOUR)] * 2, 1)[:, 0],
    "negated": torch._neg_view(torch.tensor(FOUR)),
    "a subclass": torch.nn.Parameter(torch.tensor(FOUR), requires_grad=False),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_its_targets_like_is_left_to_torch(joined, name):
    source, like = UNLIKE[name], torch.tensor(FOUR)
    driver, targets = Nodes(ours=("kernel", 7)), [torch.full((4,), 77.0), torch.full((4,), 77.0)]
    joined(driver, targets)([source, like])
    assert driver.told == [(2, "ours", 7, 1)]
    assert torch.equal(targets[0], source.float().expand(4)) and (targets[1] == 77).all()


def test_what_is_on_another_device_is_left_to_torch(joined):
    driver, targets = Nodes(ours=("kernel", 7)), [torch.full((4,), 77.0)]
    ours = joined(driver, targets)
    ours._index = 1
    ours([torch.tensor(FOUR)])
    assert driver.told == [(2, "ours", 7, 0)] and targets[0].tolist() == FOUR


def test_a_node_that_cannot_be_told_must_not_run(joined):
    sources = some(CPU)
    driver = Nodes(ours=("kernel", 7))
    ours = joined(driver, poisoned(sources))
    driver.fails = True
    with pytest.raises(nvrtc.Unavailable):
        ours(sources)


@pytest.mark.parametrize("nodes", [{}, {"other": ("kernel", 5)}, {"other": ("memset", 7)}], ids=str)
def test_without_its_node_they_are_launched(monkeypatch, joined, nodes):
    sources = some(CPU)
    driver = Nodes(**nodes)
    ours = joined(driver, poisoned(sources))
    tried = []
    driver.cuLaunchKernel = lambda *args: tried.append(copied(args[-1]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # a CPU's index
    monkeypatch.setattr(nvrtc, "bind", lambda index: None)
    monkeypatch.setattr(nvrtc, "current_stream", lambda index: 0)
    ours(sources)
    assert tried == [7] and driver.told == []


def test_on_a_cpu_torch_copies():
    sources = some(CPU)
    targets = poisoned(sources)
    Copies(targets)([sources[0], None, *sources[2:]])
    assert targets[1] == 77
    targets[1] = sources[1]
    assert all(torch.equal(a, b) for a, b in zip(targets, sources))


def test_nothing_to_copy():
    Copies([])([])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a", "sm_120a"])
def test_compiles(architecture):
    needs_nvrtc()
    known = nvrtc.targets()
    if known is not None and int(architecture.strip("sm_a")) not in known[1]:
        pytest.skip(f"NVRTC {known[0]} does not know it")
    source = (nvrtc.SOURCES / "copies.cu").read_bytes()
    code, log = nvrtc.build(source, architecture, {"CAPACITY": input_copies._MAX_TENSORS})
    assert code and "spill stores" not in log.replace(" 0 bytes spill stores", "")
