"""Strides of results, of what hooks get, and of weights that others read, next to plans."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights import external_refs, host_order
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.original_layout import is_channels_last
from sfast_ext.weights.weight import WeightsChanged, WeightsInUse

COUNTS = external_refs.ALONE > 0
counting = pytest.mark.skipif(not COUNTS, reason="this torch does not count the uses of memory")


class Net(nn.Module):
    """Convolutions that are laid out channels-last (3x3) and others (1x1), and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.narrow, self.wide = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 8, 1)
        self.point = nn.Conv2d(8, 6, 1)
        self.last = nn.Conv2d(6, 4, 3, padding=1)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        first = self.first(x).relu()
        down = self.down(first)
        last = self.last(self.point(self.wide(self.narrow(down))))
        return last, [first, down], {"mean": self.out(last.mean((2, 3)))}


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def flat(result):
    last, residuals, more = result
    return [last, *residuals, more["mean"]]


def maps(net, x=X):
    """The results, and what a hook on each layer gets."""
    seen = []
    handles = [m.register_forward_hook(lambda _, i, o: seen.extend([*i, o])) for m in net.children()]
    try:
        return flat(net(x)) + seen
    finally:
        for handle in handles:
            handle.remove()


def alike(ours, theirs):
    assert [t.stride() for t in ours] == [t.stride() for t in theirs]
    assert all(relative_error([a], [b]) < 1e-5 for a, b in zip(ours, theirs))


@pytest.fixture
def pair():
    net, twin = made(), made()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    with torch.no_grad():
        for _ in range(3):
            net(X)
        assert len(accelerator.plans) == 1
        yield net, twin, accelerator
    accelerator.release()
    assert [p.stride() for p in net.parameters()] == [p.stride() for p in twin.parameters()]


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


def disabled(net):
    owner = vars(net)["forward"].owner if "forward" in vars(net) else None
    if owner is None:
        return flat(net(X))
    config = owner.config
    owner.configure(Config(**{**vars(config), "enabled": False}))
    try:
        return flat(net(X))
    finally:
        owner.configure(config)


def original(net):
    owner = vars(net)["forward"].owner if "forward" in vars(net) else None
    return flat(net(X) if owner is None else owner.run_original(X))


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
    order = accelerator.arena._order
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


def test_another_thread_that_runs_the_original_keeps_the_hosts_order():
    net = made()
    arena = WeightArena(net)
    arena.index()
    weight = arena.locate(net.first.weight)
    assert arena.channels_last(weight)
    arena.bind([weight])
    inside, leave, found = threading.Event(), threading.Event(), []

    def other():
        with arena.order.host():
            inside.set()
            leave.wait(5)
            found.append(net.first.weight.is_contiguous())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(5)
    with pytest.raises(WeightsInUse):
        arena.order.plan()
    with pytest.raises(WeightsInUse):
        arena.sync()
    leave.set()
    thread.join()
    assert found == [True] and not arena.order.is_plans()
    assert arena.order.plan() and arena.order.is_plans()


@counting
def test_an_order_that_changes_while_another_thread_asks_for_it_is_noticed(monkeypatch):
    net = made()
    arena = WeightArena(net)
    arena.index()
    weight = arena.locate(net.first.weight)
    assert arena.channels_last(weight)
    arena.bind([weight])
    asked = []

    def while_it_changes(*args):
        thread = threading.Thread(target=lambda: asked.append(arena.order.is_plans()))
        thread.start()
        thread.join(5)
        return fills_memory(*args)

    fills_memory = host_order._fills_memory
    for _ in range(2):
        monkeypatch.setattr(host_order, "_fills_memory", while_it_changes)
        with arena.order.host():
            assert net.first.weight.is_contiguous()
        assert asked and not arena.order.is_plans()
        monkeypatch.undo()
        assert arena.order.plan() and not net.first.weight.is_contiguous()


@counting
def test_memory_that_others_took_in_the_hosts_order_is_not_rewritten():
    net = made()
    arena = WeightArena(net)
    arena.index()
    weight = arena.locate(net.first.weight)
    assert arena.channels_last(weight)
    arena.bind([weight])
    with arena.order.host():
        kept = net.first.weight.data
    before = kept.clone()
    with pytest.raises(WeightsChanged):
        arena.order.plan()
    assert torch.equal(kept, before) and torch.equal(net.first.weight, before)
    del kept
    assert arena.order.plan() and torch.equal(net.first.weight, before) and not net.first.weight.is_contiguous()


def test_copies_by_other_threads_have_the_values():
    net, wanted = made(), made().state_dict()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    stop, wrong = threading.Event(), []

    def copies():
        while not stop.is_set():
            try:
                other = copy.deepcopy(net)
                wrong.extend(k for k, v in other.named_parameters() if not torch.equal(v, wanted[k]))
            except Exception as exc:
                wrong.append(exc)

    thread = threading.Thread(target=copies)
    with torch.no_grad():
        for _ in range(3):
            net(X)
        thread.start()
        for _ in range(60):
            maps(net)
            net(X)
    stop.set()
    thread.join()
    accelerator.release()
    assert not wrong


class Noisy(TorchDispatchMode):
    """Changes what every operation computes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        changes = isinstance(result, torch.Tensor) and result.is_floating_point() and "copy" in str(function)
        return result.add_(1) if changes else result


class NoisyFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.add_(1) if "copy_" in str(function) else result


@pytest.mark.parametrize(
    "mode", [Noisy, NoisyFunctions, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_modes_around_a_call_change_no_weight(pair, mode):
    net, twin, _ = pair
    # on another device the original may raise
    with mode(), contextlib.suppress(RuntimeError):
        disabled(net)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))
    alike(flat(net(X)), flat(twin(X)))
    alike(maps(net), maps(twin))


def test_a_trace_of_the_original_records_nothing_that_is_done_to_weights(pair):
    net, twin, _ = pair
    original = vars(net)["forward"].owner.run_original

    class Traced(nn.Module):
        def forward(self, x):
            return tuple(flat(original(x)))

    traced = torch.jit.trace(Traced(), (X,), check_trace=False, strict=False)
    assert not any("as_strided" in str(node) or "copy_" in str(node) for node in traced.graph.nodes())
    alike(flat(net(X)), flat(twin(X)))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))


@torch.no_grad()
def test_a_copy_of_the_module_has_the_hosts_strides(pair):
    net, twin, _ = pair
    net(X)
    assert [p.stride() for p in copy.deepcopy(net).parameters()] == [p.stride() for p in twin.parameters()]
    alike(flat(net(X)), flat(twin(X)))
