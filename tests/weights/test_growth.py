"""Nothing grows with reloads, changes of weights, copies and calls."""

from __future__ import annotations

import copy
import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate

X = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.last(self.conv(x)).flatten(2).transpose(1, 2)
        return self.q(x) + self.k(x) * self.v(x)


def items(accelerator) -> dict[str, int]:
    """How many items are in each container that an accelerator reaches, by what leads there."""
    found: dict[str, int] = {}
    waiting: list[tuple[str, object]] = [("", accelerator)]
    seen: set[int] = set()
    while waiting:
        path, each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType, types.FunctionType, nn.Module, torch.Tensor)):
            continue
        seen.add(id(each))
        if isinstance(each, (dict, weakref.WeakKeyDictionary)):
            found[path] = found.get(path, 0) + len(each)
            waiting += [(f"{path}[]", value) for value in list(each.values())]
        elif isinstance(each, (list, tuple, set, frozenset, weakref.WeakSet)) or type(each).__name__ == "deque":
            found[path] = found.get(path, 0) + len(each)  # type: ignore[arg-type]
            waiting += [(f"{path}[]", value) for value in list(each)]  # type: ignore[call-overload]
        elif type(each).__module__.startswith("sfast_ext") or isinstance(each, types.MethodType):
            names = [n for k in type(each).__mro__ for n in getattr(k, "__slots__", ()) if n != "__dict__"]
            held = {**{n: getattr(each, n, None) for n in names}, **getattr(each, "__dict__", {})}
            waiting += [(f"{path}.{name}", value) for name, value in held.items()]
    return found


def assign(net, n):
    net.load_state_dict({k: v.clone() + n * 1e-4 for k, v in net.state_dict().items()}, assign=True)


def load(net, n):
    net.load_state_dict({k: v + n * 1e-4 for k, v in net.state_dict().items()})


def parameters(net, n):
    for m in (net.conv, net.last, net.q):
        m.weight = nn.Parameter(m.weight * 1.001, requires_grad=False)


def aliases(net, n):
    for m in (net.conv, net.q):
        m.weight = nn.Parameter(m.weight.data, requires_grad=False)


def data(net, n):
    net.conv.weight.data = net.conv.weight.data * 1.001
    net.k.weight.data = net.k.weight.data.clone()


def backups(net, n):
    kept = {m: m.weight for m in (net.conv, net.q)}
    for m in kept:
        m.weight = nn.Parameter(m.weight * 2, requires_grad=False)
    net(X)
    for m, weight in kept.items():
        m.weight = weight


def bypassed(net, n):
    handle = net.conv.register_forward_hook(lambda *_: None)
    net(X)
    handle.remove()


def copied(net, n):
    copy.copy(net)(X)
    copy.deepcopy(net)


def sizes(net, n):
    net(torch.randn(1, 4, 6 + n % 3, 6))


def adapters(net, n):
    if n % 40 == 0:
        net.q = nn.Linear(8, 8, bias=False).requires_grad_(False)


def formats(net, n):
    if n % 40 == 0:
        net.to(memory_format=(torch.channels_last, torch.contiguous_format)[n // 40 % 2])


def saved(net, n):
    net.state_dict()


CHANGES = [
    assign, load, parameters, aliases, data, backups, bypassed, copied, sizes, adapters, formats, saved,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_grows(change):
    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False, max_plans=3))
    counts, least = [], 120 if change in (adapters, formats) else 12
    for n in range(4 * least):
        change(net, n)
        net(X)
        if n % least == least - 1:
            counts.append(items(accelerator))
    assert counts[0] and sum(counts[0].values()) > 100
    first, last = counts[1], counts[-1]
    # the report keeps so many events; sequences of operators are kept for so many behaviours
    limited = ("_report", "_op_sequences[][]")
    counted = {k: v for k, v in last.items() if not any(name in k for name in limited)}
    assert not {k: (first.get(k, 0), v) for k, v in counted.items() if v > first.get(k, 0) + 8}
    accelerator.release()


@torch.no_grad()
def test_what_the_host_dropped_is_freed():
    net = Net().eval().requires_grad_(False)
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    for _ in range(3):
        net(X)
    for _ in range(5):
        old = net.conv.weight
        count = sys.getrefcount(old)
        net.conv.weight = nn.Parameter(old * 2, requires_grad=False)
        net(X)
        gc.collect()
        assert sys.getrefcount(old) < count
        gone = weakref.ref(old)
        del old
        # the record of layouts gives it up with the next change
        net.q.weight = nn.Parameter(net.q.weight * 2, requires_grad=False)
        net(X)
        assert gone() is None
    accelerator.release()
