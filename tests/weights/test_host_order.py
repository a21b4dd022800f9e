"""Strides of results, of what hooks get, and of weights that others read, next to plans."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights import host_order
from sfast_ext.weights.original_layout import is_channels_last
from weights.ordered import (
    X,
    alike,
    counting,
    disabled,
    flat,
    made,
    maps,
    original,
    planned_pair,  # noqa: F401
)


def by_gradients(net):
    with torch.enable_grad():
        return [t.detach() for t in flat(net(X.clone().requires_grad_()))]


def by_hook_of_the_root(net):
    seen = []
    handle = net.register_forward_hook(lambda m, i, o: seen.extend(flat(o)))
    net(X)
    handle.remove()
    return seen


def by_patch(net):
    net.first.forward = lambda x: type(net.first).forward(net.first, x) + 1
    try:
        return flat(net(X))
    finally:
        del net.first.forward


def by_copy(net):
    return flat(copy.copy(net)(X))


def another_batch(net):
    return flat(net(torch.cat([X, X, X])))


def one_row(net):
    return flat(net(X[:1]))


BYPASSES = [maps, by_gradients, by_hook_of_the_root, by_patch, disabled, original, by_copy, another_batch, one_row]


@pytest.mark.parametrize("bypass", BYPASSES)
def test_a_bypassed_call_has_the_strides_of_the_original(pair, bypass):
    net, twin, _ = pair
    for _ in range(2):
        alike(flat(net(X)), flat(twin(X)))
        alike(bypass(net), bypass(twin))
        alike(bypass(net), bypass(twin))
    alike(flat(net(X)), flat(twin(X)))


@counting
def test_the_memory_of_plans_is_rewritten_and_its_addresses_stay(pair):
    net, _, accelerator = pair
    order = accelerator.arena._tracked.order
    addresses = {path: p.data_ptr() for path, p in net.named_parameters()}
    live = [w.tensor for w, _ in order._laid.values()]
    assert len(live) == 3
    before = [t.clone() for t in live]
    maps(net)
    assert len(order._in_place) == 3 and not order._apart
    assert {path: p.data_ptr() for path, p in net.named_parameters()} == addresses
    assert all(p.is_contiguous() for p in net.parameters())
    runs = accelerator.report.counter("eager_runs")
    net(X)
    assert not order._in_place and all(map(torch.equal, live, before))
    assert {path: p.data_ptr() for path, p in net.named_parameters()} == addresses
    assert accelerator.report.counter("eager_runs") == runs + 1 and accelerator.report.counter("weights_copied") == 0


@pytest.mark.parametrize("counts", [pytest.param(True, marks=counting), False])
@pytest.mark.parametrize("held", ["data", "detached", "a row", "state_dict", "vector", "numpy", "none"])
@pytest.mark.parametrize("when", ["plan", "host"])
def test_what_others_hold_of_the_weights_keeps_its_values(pair, held, when, counts, monkeypatch):
    if not counts:
        monkeypatch.setattr(host_order, "ALONE", 0)
    net, twin, _ = pair
    if when == "host":
        maps(net)

    def take(module):
        weight = module.first.weight
        return {
            "data": lambda: weight.data, "detached": weight.detach, "a row": lambda: weight[3],
            "state_dict": lambda: module.state_dict()["first.weight"],
            "vector": lambda: weight.reshape(-1), "numpy": lambda: torch.from_numpy(weight.detach().numpy()),
            "none": lambda: torch.zeros(1),
        }[held]()  # fmt: skip

    kept, wanted = take(net), take(twin).clone()
    for _ in range(3):
        alike(flat(net(X)), flat(twin(X)))
        assert torch.equal(kept, wanted)
        alike(maps(net), maps(twin))
        assert torch.equal(kept, wanted)


CHANGES = {
    "in place": lambda net: net.first.weight.mul_(2),
    "data": lambda net: setattr(net.first.weight, "data", net.first.weight.data * 2),
    "parameter": lambda net: setattr(net.first, "weight", nn.Parameter(net.first.weight * 2, requires_grad=False)),
    "state": lambda net: net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()}),
    "assigned": lambda net: net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()}, assign=True),
    "vector": lambda net: nn.utils.vector_to_parameters(
        2 * torch.cat([p.reshape(-1) for p in net.parameters()]), net.parameters()
    ),
    "swapped": lambda net: [
        setattr(p, "data", q)
        for p, q in [(net.first.weight, net.first.weight.flip(0)), (net.down.weight, net.down.weight.flip(1))]
    ],
    "from a backup": lambda net: net.first.weight.copy_(net.first.weight.clone() * 3),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("between", ["plan, plan", "plan, host", "host, plan", "host, host"])
def test_weights_that_change_between_two_kinds_of_runs(pair, change, between):
    net, twin, _ = pair
    runs = {"plan": lambda m: flat(m(X)), "host": maps}
    first, second = (runs[each] for each in between.split(", "))
    for _ in range(2):
        alike(first(net), first(twin))
        for each in (net, twin):
            CHANGES[change](each)
        alike(second(net), second(twin))
    alike(flat(net(X)), flat(twin(X)))


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
def test_conversions_of_the_whole_model(first):
    net, twin = made().to(memory_format=first), made().to(memory_format=first)
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    with torch.no_grad():
        for step in (first, torch.channels_last, torch.contiguous_format, torch.channels_last, first):
            for each in (net, twin):
                each.to(memory_format=step)
            for _ in range(3):
                alike(flat(net(X)), flat(twin(X)))
            alike(maps(net), maps(twin))
    accelerator.release()


def test_a_conversion_of_some_weights_drops_the_plan(pair):
    net, twin, accelerator = pair
    for each in (net, twin):
        each.point.to(memory_format=torch.channels_last)
    for _ in range(3):
        alike(flat(net(X)), flat(twin(X)))
    assert accelerator.report.counter("captures") == 2
    # values alone drop none
    for each in (net, twin):
        each.point.weight = nn.Parameter(each.point.weight * 2)
    alike(flat(net(X)), flat(twin(X)))
    assert accelerator.report.counter("captures") == 2


class Reading(nn.Module):
    """A forward that reads the weight of a convolution in another way."""

    def __init__(self, how) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.plain = nn.Conv2d(4, 4, 3, padding=1)
        self.how = how

    def forward(self, x):
        return self.plain(self.conv(x)) + self.how(self.conv.weight)


READERS = [
    lambda w: w.view(4, -1).sum(), lambda w: w.view(-1).mean(), lambda w: w.flatten(1).norm(),
    lambda w: w.view(2, 2, 36).amax(), lambda w: torch.mm(w.view(4, -1), w.view(4, -1).t()).sum(),
    lambda w: torch.linalg.vector_norm(w, dim=(1, 2, 3)).sum(), lambda w: w.float().view(4, 36).std(),
    lambda w: w[0].view(-1).sum(),
    lambda w: w.unfold(1, 2, 1).sum(), lambda w: w.permute(1, 0, 2, 3).sum(),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("how", READERS)
def test_a_weight_that_other_code_reads_keeps_its_layout(how):
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Reading(how).eval())
    net, twin = nets
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    for side in (8, 8, 8, 12, 12):
        x = torch.randn(1, 4, side, side)
        assert relative_error([net(x)], [twin(x)]) < 1e-5
        assert net.conv.weight.view(4, -1).shape == (4, 36)
    assert len(accelerator.plans) == 2
    # one that its own convolution alone reads does not
    assert is_channels_last(net.plain.weight.shape, net.plain.weight.stride())
    how(net.conv.weight)


@torch.no_grad()
def test_a_copy_of_the_module_has_the_hosts_strides(pair):
    net, twin, _ = pair
    net(X)
    assert [p.stride() for p in copy.deepcopy(net).parameters()] == [p.stride() for p in twin.parameters()]
    alike(flat(net(X)), flat(twin(X)))


def put_back_older(net, twin, kept):
    """A copy made while plans ran, as of a host that restores what it kept."""
    net.first.weight = kept


def data_of_older(net, twin, kept):
    net.first.weight.data = kept.data


def replaced_by_itself(net, twin, kept):
    net.first.weight = nn.Parameter(net.first.weight.detach().clone(), requires_grad=False)


def in_place(net, twin, kept):
    for each in (net, twin):
        each.last.weight.mul_(1.5)


def plan_between(net, twin, kept):
    net(X)


def there_and_back(net, twin, kept):
    net.double().float()


def state_loaded(net, twin, kept):
    values = {name: 2 * value for name, value in twin.state_dict().items()}
    for each in (net, twin):
        each.load_state_dict(values)


BETWEEN = [
    put_back_older, data_of_older, replaced_by_itself, in_place, plan_between, there_and_back, state_loaded,
]  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("bypass", [maps, one_row])
def test_strides_that_were_seen_to_be_the_hosts_are_asked_again_once_they_change(pair, between, bypass):
    net, twin, accelerator = pair
    alike(flat(net(X)), flat(twin(X)))
    kept = nn.Parameter(net.first.weight.detach().clone(), requires_grad=False)
    assert is_channels_last(kept.shape, kept.stride())
    for _ in range(3):
        alike(bypass(net), bypass(twin))
    between(net, twin, kept)
    for _ in range(2):
        alike(bypass(net), bypass(twin))
    assert accelerator.report.counter("errors") == 0


def test_strides_are_not_worked_out_again_as_long_as_they_stay(pair, monkeypatch):
    net, twin, accelerator = pair
    for _ in range(2):
        alike(maps(net), maps(twin))
    order, asked = accelerator.arena._tracked.order, []
    monkeypatch.setattr(order, "_strange", lambda own: asked.append(own) or [])
    for _ in range(3):
        alike(maps(net), maps(twin))
    assert not asked
