"""CUDA graphs that the program itself captures: the original runs, and weights stay where they are."""

from __future__ import annotations

import pytest
import torch
from torch_states import (
    latent,
    no_gradients,  # noqa: F401
    pair,
    reasons,
    runs,
)

from sfast_ext.runtime import plan_finder


def test_a_call_within_a_graph_that_the_program_captures_gets_the_original(monkeypatch):
    ours, accelerator, twin = pair()
    for seed in range(2):
        ours(latent(seed))
    before = runs(accelerator)
    monkeypatch.setattr(plan_finder, "records_graph", lambda device: True)
    torch.testing.assert_close(ours(latent(3)), twin(latent(3)), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == before and "captures a CUDA graph" in reasons(accelerator)


@pytest.mark.parametrize("warm", [False, True], ids=["without a plan", "with a plan"])
def test_weights_that_a_graph_of_the_program_reads_stay_where_and_as_they_are(monkeypatch, warm):
    ours, accelerator, twin = pair()
    for seed in range(2 * warm):
        ours(latent(seed))
    with monkeypatch.context() as patch:
        patch.setattr(plan_finder, "records_graph", lambda device: True)
        ours(latent(3))
    memory = [(p.data_ptr(), p.untyped_storage()._cdata, p.stride()) for p in ours.parameters()]
    plans, before = len(accelerator.plans), runs(accelerator)
    for x in (latent(4), latent(5)[:, :, :4], latent(6)):
        torch.testing.assert_close(ours(x), twin(x), rtol=1e-5, atol=1e-5)
    assert [(p.data_ptr(), p.untyped_storage()._cdata, p.stride()) for p in ours.parameters()] == memory
    assert len(accelerator.plans) == plans and "has captured a CUDA graph of the model" in reasons(accelerator)
    assert runs(accelerator) - before == 2 * warm


@pytest.mark.gpu
def test_a_graph_that_the_program_captures_gets_the_original():
    ours, accelerator, twin = pair()
    ours.cuda(), twin.cuda()
    x = latent().cuda()
    for _ in range(4):
        ours(x)
    before = accelerator.report.counter("replays")
    assert before
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        twin(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(x)
    assert "captures a CUDA graph" in reasons(accelerator)
    x.copy_(latent(5))
    graph.replay()
    torch.testing.assert_close(out, twin(x), rtol=1e-3, atol=1e-3)
    # whatever runs in between, the program's graph finds the weights as they were
    torch.testing.assert_close(ours(x), twin(x), rtol=1e-3, atol=1e-3)
    assert accelerator.report.counter("replays") == before + 1
    ours.train(), ours(x), ours.eval(), ours(x[:, :, :4])
    graph.replay()
    torch.testing.assert_close(out, twin(x), rtol=1e-3, atol=1e-3)
