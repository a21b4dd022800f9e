from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfast_ext import kernels
from sfast_ext.kernels import _triton, add_layer_norm, attention, bias_add, geglu, group_norm, layer_norm

TRITON = [add_layer_norm, bias_add, geglu, group_norm, layer_norm]


@pytest.mark.parametrize("module", TRITON, ids=lambda module: module.__name__.rpartition(".")[2])
def test_pick(module):
    assert kernels.pick(module, triton=True) is module.launch
    assert kernels.pick(module, triton=False) is module.reference


def test_attention_has_another_way_without_triton():
    assert kernels.pick(attention, triton=True) is attention.launch
    assert kernels.pick(attention, triton=False) is attention.library


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
from sfast_ext.kernels import add_layer_norm, attention, bias_add, geglu, group_norm, layer_norm
assert not kernels.interpreted()
x = torch.randn(2, 8, 4, 4)
for module, arguments in (
    (group_norm, (x, 2, None, None, 1e-5)), (layer_norm, (x, None, None, 1e-5)), (geglu, (x,)),
    (bias_add, (x, None, x)), (attention, (x, x, x)),
):
    for triton in (True, False):
        y = kernels.pick(module, triton=triton)(*arguments)
        torch.testing.assert_close(y, module.reference(*arguments))
assert torch.equal(add_layer_norm.launch(x, x, None, None, 1e-5)[0], x + x)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_helpers():
    assert [_triton.next_power_of_2(n) for n in (1, 2, 3, 320, 512, 1000)] == [1, 2, 4, 512, 512, 1024]
    assert [_triton.cdiv(n, 8) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


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
