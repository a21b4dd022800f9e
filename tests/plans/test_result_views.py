"""Results of a call that share memory do so if a plan makes them: a caller may write to one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.plans.graph_facts import View, shared_results

SHARING = {
    "the same tensor": lambda y: (y, y),
    "the same tensor in a list": lambda y: (y, {"down": [y.tanh(), y]}),
    "a row": lambda y: (y, y[1]),
    "a row first": lambda y: (y[1], y),
    "the last columns": lambda y: (y, y[:, 2:]),
    "another shape": lambda y: (y, y.view(-1)),
    "detached": lambda y: (y, y.detach()),
    "transposed": lambda y: (y.t(), y),
    "expanded": lambda y: (y, y[:1].expand(3, 4)),
    "every second column": lambda y: (y[:, ::2], y),
    "views of views": lambda y: (y.view(2, 6)[:, 3:], y, y.view(-1)[3:9]),
    "the same part twice": lambda y: (lambda part: (part, part, y))(y[:, 1::2]),
}
APART = {
    "halves": lambda y: y.chunk(2, 1),
    "a copy": lambda y: (y, y.clone()),
    "two of equal value": lambda y: (y * 2, y * 2),
    "one": lambda y: y,
}


class Net(nn.Module):
    def __init__(self, results):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.results = nn.Linear(4, 4), results

    def forward(self, x):
        return self.results(self.linear(x))


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for each in (value.values() if isinstance(value, dict) else value) for x in leaves(each)]


@pytest.mark.parametrize("name", [*SHARING, *APART])
def test_a_write_to_a_result_is_seen_in_the_others_as_without_us(name):
    results = {**SHARING, **APART}[name]
    net, twin = Net(results), Net(results)
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    count = len(leaves(results(torch.zeros(3, 4))))
    with torch.no_grad():
        for i in range(2 * count + 1):
            x = torch.randn(3, 4)
            ours, theirs = leaves(net(x)), leaves(twin(x))
            for found in (ours, theirs):
                try:
                    found[i % count].mul_(3.0)
                except RuntimeError:
                    # an expanded one
                    found[i % count][0] *= 3.0
            assert [[a is b for b in ours] for a in ours] == [[a is b for b in theirs] for a in theirs]
            for a, b in zip(ours, theirs):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b)
    assert accelerator.report.as_dict()["counters"]["eager_runs"] >= 2 * count - 1
    accelerator.release()


def test_a_view_is_found_only_in_a_result_that_contains_it():
    y = torch.zeros(3, 4)
    assert shared_results([y, y[1]]) == {1: View(0, (1,), 4)}
    assert shared_results([y[:, ::2], y[:, 1::2]]) == {}
    assert shared_results([y[:2], y[1:]]) == {}
    assert shared_results([y, y.view(torch.int32)]) == {}
    assert shared_results([y, y[1]], alike=False) == {} and shared_results([y, y], alike=False) == {1: View(0)}
    assert shared_results([torch.zeros(0), torch.zeros(0)]) == {}
