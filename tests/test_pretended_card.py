"""The pretended GPU itself: what a test that runs on it may rely upon."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fuzz.nets import SmallNet
from pretended_card import GPU, Card, CardGraph, pretended_card
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.weights import host_order
from sfast_ext.weights.original_layout import OriginalLayouts

KB = 1024


@pytest.fixture
def card(monkeypatch):
    with torch.no_grad(), pretended_card(monkeypatch, 512 * KB) as found:
        yield found


def test_a_tensor_that_moves_has_another_storage_and_another_device(card: Card) -> None:
    here = torch.randn(KB)
    there = here.to("cuda")
    assert there.device == GPU and there.is_cuda and here.device.type == "cpu"
    assert there.data_ptr() != here.data_ptr() and torch.equal(there.cpu(), here)
    assert there.to(0) is there and (there + 1)[3:].device == GPU and torch.empty_like(there).is_cuda
    assert torch.tensor([1.0], device="cuda").is_cuda and torch.arange(3, device=GPU).is_cuda
    assert not there.to("cpu").is_cuda and there.half().is_cuda and torch.zeros(2).to(there).is_cuda


def test_modules_move_by_their_parameters(card: Card) -> None:
    net = nn.Linear(8, 8)
    weight, x = net.weight, torch.randn(8)
    expected = net(x)
    net.to("cuda")
    assert net.weight is weight and weight.is_cuda and card.allocated == 4 * 72
    assert torch.equal(net(x.to("cuda")).cpu(), expected)
    with pytest.raises(RuntimeError, match="same device"):
        net(x)
    net.to("cpu")
    assert not weight.is_cuda and card.allocated == 0


def test_weights_that_are_laid_otherwise_stay_there_in_a_capture_and_in_a_thread_without_modes(card: Card) -> None:
    def laid() -> None:
        with host_order.undisturbed():
            layouts.restore(weight, (1, 8))

    layouts, weight = OriginalLayouts(), torch.randn(8, 8).to("cuda")
    expected = weight.cpu().clone()
    card.blind = True
    laid()
    assert card.blind
    card.blind = False
    assert weight.is_cuda and weight.stride() == (1, 8) and torch.equal(weight.cpu(), expected)
    weight = torch.randn(8, 8).to("cuda")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(laid).result()
    assert weight.is_cuda and weight.stride() == (1, 8)


def test_memory_is_counted_and_ends(card: Card) -> None:
    held = torch.empty(256 * KB, dtype=torch.uint8, device="cuda")
    view = held[:10]
    assert torch.cuda.mem_get_info() == (256 * KB, 512 * KB)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="262144 of 524288 are in use"):
        torch.empty(257 * KB, dtype=torch.uint8, device="cuda")
    assert card.allocated == 256 * KB and card.refused == 1
    del held
    assert card.allocated == 256 * KB
    del view
    assert card.allocated == 0 and card.peak == 256 * KB


def test_a_graph_reads_and_writes_where_it_was_captured(card: Card) -> None:
    weight, given = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    graph = CardGraph()
    graph.capture_begin()
    between = torch.cat([weight * 2, weight])
    result = between[:8] + given
    del between
    graph.capture_end()
    # 96 bytes were alive at once, of which 32 are the result, a tensor
    assert card.graph_bytes == 64
    given.fill_(5)
    weight.add_(1)
    graph.replay()
    assert result.tolist() == [9.0] * 8 and not card.faults
    # the memory of the weight is freed, whoever holds the tensor
    weight.data = weight.clone()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()
    assert card.faults == ["torch.float32 [8]"]
    del graph
    assert card.graph_bytes == 0


def test_plans_and_their_graphs_run_there(card: Card) -> None:
    card.capacity = 64 << 20
    net = SmallNet().eval()
    twin = copy.deepcopy(net)
    net.to("cuda")
    net.table = net.table.to("cuda")
    acc = accelerate(net, Config(triton=False))
    for step in range(4):
        args = torch.randn(2, 4, 8, 8), torch.tensor([5, step]), torch.randn(2, 7, 8)
        ours = net(*[x.to("cuda") for x in args])["sample"]
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), twin(*args)["sample"], rtol=1e-4, atol=1e-4)
    report = acc.report.as_dict()
    assert acc.report.counter("replays") == 3 and acc.report.counter("graph_captures") == 1, report
    assert card.graph_bytes > 0 and not card.faults
    acc.release()
    del ours, acc
    gc.collect()
    assert card.graph_bytes == 0
    assert card.allocated == sum(p.nbytes for p in [*net.parameters(), *net.buffers(), net.table])
