"""Kernels of Triton that begin before the one in front of them has ended, in captures and out of them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from kernels.support import driver_copies, driver_zeros, randn
from sfast_ext.kernels.attention import short_attention
from sfast_ext.kernels.backend import cuda_libraries, pdl, triton_runtime
from sfast_ext.kernels.conv import upsample
from sfast_ext.kernels.group_norm import add_group_norm, cat_group_norm, conv_group_norm, group_norm
from sfast_ext.kernels.linear import linear_layer_norm
from sfast_ext.kernels.pointwise import add_layer_norm, bias_add, geglu, layer_norm, timestep_embedding

from .test_pdl import CUDA, alike, captured, slow

HALF = torch.float16


@pytest.fixture(autouse=True)
def poisoned():
    """Not here: the kernel that fills new memory would part all others."""


@pytest.mark.parametrize(
    ("has", "kept", "capability", "early"),
    [
        (True, True, (9, 0), True),
        (True, True, (12, 0), True),
        (True, True, (8, 9), False),
        (True, True, (0, 0), False),  # no GPU
        (True, False, (9, 0), False),
        (False, True, (9, 0), False),
    ],
)
def test_where_they_begin_early(monkeypatch, has, kept, capability, early):
    monkeypatch.setattr(triton_runtime, "HAS_PDL", has)
    monkeypatch.setattr(pdl, "capture_keeps_pdl", lambda: kept)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
    assert triton_runtime.pdl_enabled(CUDA) == early


@pytest.mark.skipif(not triton_runtime.AVAILABLE, reason="needs Triton")
def test_which_triton_has_the_words():
    version = tuple(map(int, triton_runtime.triton.__version__.split(".")[:2]))
    has = version >= (3, 5) and not triton_runtime.INTERPRETED
    assert has == triton_runtime.HAS_PDL


@pytest.mark.skipif(not triton_runtime.AVAILABLE, reason="needs Triton")
def test_which_triton_is_told_to_fuse_products_and_sums():
    told = triton_runtime.VERSION >= (3, 0) and not triton_runtime.INTERPRETED
    assert ({"enable_fp_fusion": True} if told else {}) == triton_runtime.FP_FUSION


class Kernel:
    def __init__(self, *names):
        self.arg_names, self.launched = names, []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launched.append(constants)


@pytest.mark.parametrize("early", [False, True])
def test_what_a_kernel_is_told(monkeypatch, early):
    monkeypatch.setattr(triton_runtime, "pdl_enabled", lambda device: early)
    told = {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
    ours, other = Kernel("x", "N", "PDL"), Kernel("x", "N")
    for kernel in (ours, other):
        triton_runtime.launch_kernel(kernel, (1,), torch.zeros(1), N=2)
    assert ours.launched == [{"N": 2, **told, **triton_runtime.FP_FUSION}] and other.launched == [{"N": 2}]


def test_what_is_noted_is_for_the_device_that_will_run_it(monkeypatch):
    seen = []
    monkeypatch.setattr(triton_runtime, "pdl_enabled", lambda device: seen.append(device) or device == CUDA)
    kernel = Kernel("x", "PDL")
    for device in (None, CUDA):
        with triton_runtime.dry_run(device) as found:
            triton_runtime.launch_kernel(kernel, (1,), torch.empty(1, device="meta"))
        assert found[0][2].get("launch_pdl", False) == (device == CUDA)
    assert seen == [torch.device("meta"), CUDA] and not kernel.launched


@pytest.fixture
def begins(monkeypatch):
    """Say whether they begin early from here on."""
    if not triton_runtime.pdl_enabled(CUDA):
        pytest.skip("needs Hopper, CUDA 12.3 and Triton 3.5")
    wanted = SimpleNamespace(early=True)
    monkeypatch.setattr(triton_runtime, "pdl_enabled", lambda device: wanted.early)
    return wanted


def vector(width):
    return randn(width, dtype=HALF, device=CUDA)


def norms():
    """A chain of all norms and what is between them, on images of three sizes; its last results."""
    scale, term, bias = vector(640), vector(640), vector(640)
    wide, wider = vector(1280), vector(1280)

    def run(x):
        for _ in range(3):
            y = group_norm.launch(x, 32, scale, term, 1e-5, None, True)
            total, y = add_group_norm.launch(y, bias, x, 1.0, 32, scale, term, 1e-5, True)
            joined, z = cat_group_norm.launch(total, bias, y, y, 32, wide, wider, 1e-5, True)
            y = bias_add.launch(y, bias, total, 0.5)
            large = upsample.launch(y, (128, 128), (0.5, 0.5), total)
            large = group_norm.launch(large, 32, scale, term, 1e-5)
            x = bias_add.launch(y, None, group_norm.launch(y, 32, None, term, 1e-5), 1.0)
            small = upsample.launch(x, (16, 16), (4.0, 4.0))
            small, few = add_group_norm.launch(small, None, small, 0.5, 32, scale, term, 1e-5)
            few = group_norm.launch(few, 2, scale, term, 1e-5)  # by the kernels that loop
        return x, z, joined, large, small, few

    return run, randn(2, 640, 64, 64, dtype=HALF, device=CUDA).to(memory_format=torch.channels_last)


def tokens():
    """A chain as in a transformer, but for its products."""
    scale, term, bias = vector(640), vector(640), vector(640)
    keys, values = (randn(2, 10, 77, 64, dtype=HALF, device=CUDA) for _ in range(2))
    frequency = torch.rand(160, device=CUDA)

    def run(x):
        for _ in range(4):
            total, y = add_layer_norm.launch(x, x, scale, term, 1e-5, None, bias, bias)
            heads = y.view(2, -1, 10, 64).transpose(1, 2)
            attended = short_attention.launch(heads, keys, values, None).transpose(1, 2).reshape(2, -1, 640)
            total, y = add_layer_norm.launch(attended, total, scale, term, 1e-5)
            x = geglu.launch(torch.cat([y, total], -1))
            x = layer_norm.launch(x, scale, term, 1e-5)
            times = timestep_embedding.launch(x.view(-1, 1)[:4], frequency, True)
        return x, total, times

    return run, randn(2, 1024, 640, dtype=HALF, device=CUDA)


def mixed():
    """Kernels in CUDA C++ and of Triton in turns."""
    filters = [randn(640, 640, 3, 3, dtype=HALF, device=CUDA, std=0.01) for _ in range(2)]
    filters = [weight.to(memory_format=torch.channels_last) for weight in filters]
    scale, term, bias = vector(640), vector(640), vector(640)
    product = randn(640, 640, dtype=HALF, device=CUDA, std=0.04)

    def run(x):
        for _ in range(3):
            _, y = conv_group_norm.launch(x, filters[0], None, None, 32, scale, term, 1e-5, True)
            total, y = conv_group_norm.launch(y, filters[1], bias, x, 32, scale, term, 1e-5)
            flat = y.permute(0, 2, 3, 1).reshape(-1, 640)
            added, y = linear_layer_norm.launch(flat, product, bias, flat, scale, term, 1e-5)
            y = layer_norm.launch(y, scale, term, 1e-5)
            x = bias_add.launch(y.view(2, 64, 64, 640).permute(0, 3, 1, 2), bias, total, 0.5)
        return x, added

    run.still = [*filters, scale, term, bias, product]
    return run, randn(2, 640, 64, 64, dtype=HALF, device=CUDA).to(memory_format=torch.channels_last)


def forked():
    """A part of the work on another stream, which waits for the first and is waited for."""
    second = torch.cuda.Stream()

    def run(x):
        first = torch.cuda.current_stream()
        x = layer_norm.launch(slow(x, 5), None, None, 1e-5)
        x = layer_norm.launch(x, None, None, 1e-5)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            a = layer_norm.launch(x, None, None, 1e-3)
            b = add_layer_norm.launch(a, x, None, None, 1e-5)
        c = layer_norm.launch(x, None, None, 1e-4)
        first.wait_stream(second)
        return (c, *add_layer_norm.launch(b[1], c, None, None, 1e-5), *b)

    return run, randn(8192, 640, dtype=HALF, device=CUDA)


def both(run, x, begins):
    begins.early = False
    turns, wanted = captured(run, x, None)
    begins.early = True
    early, results = captured(run, x, getattr(run, "still", []))
    return turns, early, wanted, results


@pytest.mark.gpu
@pytest.mark.parametrize("behind", ["itself", "slow kernels"])
@pytest.mark.parametrize("chain", [norms, tokens, mixed, forked])
def test_the_same_to_the_bit_as_in_turn(begins, chain, behind):
    run, x = chain()
    if behind == "slow kernels":
        fast = run

        def run(x):
            return tuple(slow(y, 3) for y in fast(slow(x)))

        run.still = getattr(fast, "still", [])
    alike(x, *both(run, x, begins), times=50)


def programmatic(graph):
    """(edges along which a kernel may begin early, all edges)."""
    edges = cuda_libraries.driver().cuGraphGetEdges_v2
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert edges(handle, None, None, None, ctypes.byref(count)) == 0
    nodes = [(ctypes.c_void_p * count.value)() for _ in range(2)]
    # CUgraphEdgeData: ports, the type of dependency, which is 1 for a programmatic one, and 5 reserved bytes
    data = (ctypes.c_ubyte * (8 * count.value))()
    assert edges(handle, *nodes, data, ctypes.byref(count)) == 0
    return sum(kind == 1 for kind in data[2::8]), count.value


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_a_capture_keeps_it(begins, early):
    x, begins.early = randn(512, 640, dtype=HALF, device=CUDA), early

    def run(x):
        for _ in range(5):
            x = layer_norm.launch(x, None, None, 1e-5)
        return x

    run(x)
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        pytest.skip("this torch keeps no graph to look at")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(x)
    assert programmatic(graph) == (4 * early, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", ["copies", "zeros"])
def test_behind_what_is_no_kernel(begins, nodes):
    x = randn(8192, 640, dtype=HALF, device=CUDA)
    taken = torch.zeros_like(x)

    def run(x):
        stream = torch.cuda.current_stream().cuda_stream
        y = layer_norm.launch(slow(x), None, None, 1e-5)
        taken.copy_(y)
        if nodes == "copies":
            driver_copies(taken, y, x.nbytes // 2, stream)
        else:
            driver_zeros(taken, x.nbytes // 2, stream)
        return add_layer_norm.launch(taken, y, None, None, 1e-5)

    turns, early, wanted, results = both(run, x, begins)
    alike(x, turns, early, wanted, [*results, taken])


@pytest.mark.gpu
@pytest.mark.parametrize("chain", [norms, tokens, mixed, forked])
def test_out_of_captures_too(begins, chain):
    """On the stream that is there, with memory that is used again at once."""
    run, x = chain()
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        begins.early = False
        wanted = run(x)
        torch.cuda.synchronize()
        begins.early = True
        results = run(slow(x, 2))
        host = [result.cpu() for result in results]
        assert all(torch.equal(a, b.cpu()) for a, b in zip(host, wanted))
