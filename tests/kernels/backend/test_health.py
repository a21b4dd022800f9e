from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfast_ext import kernels
from sfast_ext.kernels.attention import attention, mma_attention, short_attention
from sfast_ext.kernels.backend import health, nvrtc, triton_runtime
from sfast_ext.kernels.conv import conv2d, upsample_conv2d
from sfast_ext.kernels.group_norm import add_group_norm, group_norm
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu, linear_layer_norm
from sfast_ext.kernels.pointwise import add_layer_norm, bias_add, geglu, layer_norm

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="launches are not references there")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def healthy():
    health.clear()
    yield
    health.clear()


def test_what_is_supported():
    assert geglu.launch.supported(GPU, triton=True)
    assert not geglu.launch.supported(GPU, triton=False)
    assert linear_accumulate.launch.supported(GPU, triton=False)  # cuBLAS's


def test_a_kernel_that_is_disabled_is_supported_no_more_nor_is_what_uses_it():
    assert health.disable("geglu", GPU, "no such instruction")
    assert not health.disable("geglu", GPU, "again")
    assert health.reason("geglu", GPU) == "no such instruction"
    assert health.disabled(GPU) == {"geglu": "no such instruction"}
    assert not geglu.launch.supported(GPU, triton=True) and not linear_geglu.launch.supported(GPU, triton=True)
    assert group_norm.launch.supported(GPU, triton=True)
    # another card has health of its own
    assert geglu.launch.supported(CPU, triton=True) and health.disabled(CPU) == {}
    health.clear()
    assert linear_geglu.launch.supported(GPU, triton=True)


@pytest.mark.parametrize(
    ("down", "with_it"),
    [
        (layer_norm, linear_layer_norm),
        (group_norm, add_group_norm),
        (conv2d, upsample_conv2d),
        (bias_add, add_group_norm),
    ],
)
def test_what_a_launch_may_call_is_told(down, with_it):
    health.disable(down.launch.name, GPU, "")
    assert not with_it.launch.enabled(GPU)


@pytest.mark.skipif(not triton_runtime.AVAILABLE, reason="needs Triton")
def test_attention_goes_another_way_without_its_own_kernel(monkeypatch):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    for module in (short_attention, mma_attention):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: source.name == "mma_attention")
    q = torch.empty(2, 8, 64, 40, dtype=torch.float16, device="meta")
    k = torch.empty(2, 8, 77, 40, dtype=torch.float16, device="meta")
    with triton_runtime.dry_run(GPU) as before:
        attention.launch(q, k, k)
    health.disable("short_attention", GPU, "")
    with triton_runtime.dry_run(GPU) as after:
        attention.launch(q, k, k)
    health.disable("mma_attention", GPU, "")
    with triton_runtime.dry_run(GPU) as torchs:
        attention.launch(q, k, k)
    owners = [[owner for *_, owner in launches] for launches in (before, after, torchs)]
    assert owners == [["short_attention"], ["mma_attention"], []]
    assert attention.launch.supported(GPU, triton=True)


def fails(function, *args):
    try:
        function(*args)
    except Exception as exc:
        return exc
    raise AssertionError


def test_an_exception_tells_the_kernel_that_it_came_from(monkeypatch):
    def broken(*args):
        raise RuntimeError("at 3:10:\n    x = tl.load(p)\n   ^\nchained boolean operators are not supported")

    monkeypatch.setattr(geglu.launch, "reference", broken)
    assert health.culprits(fails(geglu.launch, torch.zeros(2, 4))) == {
        "geglu": "RuntimeError: chained boolean operators are not supported"
    }


def test_the_innermost_launch_is_the_culprit(monkeypatch):
    def broken(*args):
        raise ValueError("")

    monkeypatch.setattr(group_norm.launch, "reference", broken)
    x = torch.zeros(2, 4, 3, 3)
    exc = fails(add_group_norm.launch, x, None, x, 1.0, 2, None, None, 1e-5)
    assert health.culprits(exc) == {"group_norm": "ValueError"}


@pytest.mark.parametrize(
    "error",
    [torch.cuda.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")],
)
def test_where_memory_ran_out_no_kernel_is_the_culprit(monkeypatch, error):
    def broken(*args):
        raise error

    monkeypatch.setattr(geglu.launch, "reference", broken)
    assert health.culprits(fails(geglu.launch, torch.zeros(2, 4))) == {}


def test_what_came_from_no_kernel():
    assert health.culprits(fails(torch.zeros(2).reshape, 3)) == {}
    assert health.culprits(health.KernelFailed({"a": "b"})) == {"a": "b"}


def test_a_launch_that_cannot_is_the_reference():
    """Fake tensors have no memory to launch on, but the shapes of the result are wanted."""
    with FakeTensorMode():
        x = torch.empty(2, 8, 4, 4, dtype=torch.float16)
        assert group_norm.launch(x, 2, None, None, 1e-5, silu=True).shape == x.shape
        assert layer_norm.launch(x, None, None, 1e-5).shape == x.shape
        assert geglu.launch(x).shape == (2, 8, 4, 2)


def test_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
import sfast_ext
from sfast_ext import kernels
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.kernels.pointwise import add_layer_norm, bias_add, geglu, layer_norm
assert not kernels.interpreted()
x = torch.randn(2, 8, 4, 4)
for module, arguments in (
    (group_norm, (x, 2, None, None, 1e-5)), (layer_norm, (x, None, None, 1e-5)), (geglu, (x,)),
    (bias_add, (x, None, x)), (attention, (x, x, x)),
):
    torch.testing.assert_close(module.launch(*arguments), module.reference(*arguments))
assert torch.equal(add_layer_norm.launch(x, x, None, None, 1e-5)[0], x + x)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_helpers():
    assert [triton_runtime.next_power_of_2(n) for n in (1, 2, 3, 320, 512, 1000)] == [1, 2, 4, 512, 512, 1024]
    assert [triton_runtime.cdiv(n, 8) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


@pytest.mark.gpu
def test_every_kernel_in_a_cuda_graph():
    x = torch.randn(2, 32, 8, 8, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    calls = {
        "group_norm": lambda: group_norm.launch(x, 4, None, None, 1e-5, shift=x[:, :, 0, 0], silu=True),
        "layer_norm": lambda: layer_norm.launch(x, None, None, 1e-5),
        "add_layer_norm": lambda: add_layer_norm.launch(x, x, None, None, 1e-5)[1],
        "geglu": lambda: geglu.launch(x),
        "bias_add": lambda: bias_add.launch(x, None, x),
        "attention": lambda: attention.launch(x, x, x),
    }
    for name, call in calls.items():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, call(), rtol=0, atol=0, msg=name)
