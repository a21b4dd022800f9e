"""What `benchmarks.moves` measures, on a pretended GPU."""

from __future__ import annotations

import torch
from pretended_card import pretended_card
from torch import nn

from benchmarks import moves


def test_a_row_has_all_times_and_leaves_the_module_as_it_was(monkeypatch):
    threads = torch.get_num_threads()
    module = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(64, 64))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pretended_card(monkeypatch, 1 << 30):
        row = moves.measure(module, threads, 2)
        assert not any(parameter.is_cuda for parameter in module.parameters())
    times = ["copy_ms", "staged_ms", "to_gpu_ms", "to_cpu_ms", "arrive_ms", "leave_ms"]
    assert list(row) == ["threads", "gb", *times] and all(row[name] >= 0 for name in times)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before))
