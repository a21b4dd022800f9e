"""What would let a stale or wrong plan run, each where nothing else is in its way; see `mutations`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_card import pretended_card
from torch import Tensor, nn
from use_count import counted

from sfast_ext import Config, accelerate
from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.weights.arena import WeightArena, WeightsChanged
from sfast_ext.weights.copy_in import copy_in

CPU = Config(allow_cpu=True)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Net(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(nn.functional.silu(self.first(x))) * self.gain * getattr(self, "scale", 1.0)).t()


class Louder(Net):
    gain = 2.0


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_two_classes_of_one_forward_differ() -> None:
    # both are known by their methods when the last two are read
    model = nn.Sequential(Net(), Louder(), Net(), Louder())
    before = fingerprint(model)
    model[2].__class__, model[3].__class__ = Louder, Net
    assert not before.unchanged() and fingerprint(model).key != before.key


def test_a_forward_of_torchs_own_classes_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    before = fingerprint(model)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert not before.unchanged() and fingerprint(model).key != before.key


def one_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value * 2


def another_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value * 3


def test_attentions_that_keep_nothing_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, keys = Net(), set()
    for function in (nn.functional.scaled_dot_product_attention, one_attention, another_attention):
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", function)
        keys.add(fingerprint(model).key)
    assert len(keys) == 3


def attribute(net: Net) -> None:
    net.scale = 0.6


def removed(net: Net) -> None:
    del net.scale


def in_an_object(net: Net) -> None:
    net.settings.scale = 0.6


def in_a_list(net: Net) -> None:
    net.factors[0] = 0.6


def of_another_kind(net: Net) -> None:
    # equal, but another number
    net.settings.whole = 1.0


def of_another_name(net: Net) -> None:
    net.named["b"] = net.named.pop("a")


def setting_up() -> Net:
    net = Net()
    net.scale, net.factors, net.named = 0.5, [0.5], {"a": 0.5}
    net.settings = SimpleNamespace(scale=0.5, whole=1)
    return net


@pytest.mark.parametrize("change", [attribute, removed, in_an_object, in_a_list, of_another_kind, of_another_name])
def test_what_a_reading_sees_a_quick_check_sees_too(change: Callable[[Net], None]) -> None:
    net = setting_up()
    before = fingerprint(net)
    assert before.unchanged() and before.unchanged_quick()
    change(net)
    assert not before.unchanged() and fingerprint(net).key != before.key


@pytest.mark.parametrize("change", [attribute, removed, in_an_object, in_a_list])
def test_what_is_seen_at_each_call(change: Callable[[Net], None]) -> None:
    net = setting_up()
    keys = BehaviourKeys(net, frozenset(), None, 8)
    keys.begin_generation()
    number, _ = keys.read()
    change(net)
    assert not keys.trusted and keys.current()[0] != number


def test_an_accelerator_that_is_called_after_its_release_makes_no_plan() -> None:
    net, x = Net().eval(), torch.randn(3, 4)
    acc = accelerate(net, CPU)
    for _ in range(2):
        acc(x)
    acc.release()
    for _ in range(3):
        assert torch.equal(acc(x), net(x))
    assert acc.report.counter("captures") == 1 and acc.report.counter("eager_runs") == 1 and not acc.plans


def test_within_a_generation_a_function_that_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = BehaviourKeys(Net(), frozenset(), None, 8)
    keys.begin_generation()
    number, foreign = keys.read()
    assert keys.trusted and foreign is None
    monkeypatch.setattr(nn.functional, "silu", lambda x: x)
    assert not keys.trusted
    assert keys.current()[0] != number and "silu is replaced" in str(keys.current()[1])


class Unread(nn.Module):
    """Has a weight, by which it is on a device, and reads none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


def test_a_plan_of_one_device_does_not_run_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_card(monkeypatch, 1 << 20):
        net = Unread().to("cuda")
        acc = accelerate(net, Config(allow_cpu=True, triton=False))
        x = torch.ones(100)
        for _ in range(2):
            assert net(x.to("cuda")).is_cuda
        net.to("cpu")
        for _ in range(2):
            ours = net(x)
            assert not ours.is_cuda and ours.tolist() == [3.0] * 100
        assert acc.report.counter("captures") == 2 and acc.report.counter("errors") == 0
        acc.release()


@pytest.mark.parametrize("announced", [False, True])
def test_a_forward_that_takes_the_modules_place_ends_its_plans(announced: bool) -> None:
    net, x = Net().eval(), torch.randn(3, 4)
    acc = accelerate(net, CPU)
    if announced:
        acc.new_generation()
    for _ in range(2):
        close(net(x), Net.forward(net, x))
    assert acc.report.counter("eager_runs") == 1

    def tripled(x: Tensor) -> Tensor:
        return 3 * Net.forward(net, x)

    net.forward = tripled  # type: ignore[method-assign]
    acc.install()
    assert not acc.plans
    for _ in range(2):
        close(net(x), tripled(x))
    assert acc.report.counter("captures") == 2 and acc.report.counter("eager_runs") == 2
    acc.release()


def test_results_of_a_plan_have_the_originals_strides() -> None:
    net, x = Net().eval(), torch.randn(3, 4)
    acc = accelerate(net, CPU)
    expected = net(x)
    ours = net(x)
    assert acc.report.counter("eager_runs") == 1
    close(ours, expected)
    assert ours.stride() == expected.stride() == (1, 4)
    acc.release()


def arena_of(net: Net) -> tuple[WeightArena, list[Any]]:
    arena = WeightArena(net)
    arena.index()
    weights = list({id(w): w for w in map(arena.locate, (net.first.weight, net.second.weight))}.values())
    arena.bind(weights)
    return arena, weights


def test_a_weight_that_is_untied_cannot_be_followed() -> None:
    net = Net()
    net.second.weight = net.first.weight
    arena, weights = arena_of(net)
    assert len(weights) == 1
    net.second.weight = nn.Parameter(net.first.weight * 2)
    with pytest.raises(WeightsChanged, match="no longer shared"):
        arena.sync()


def test_one_tensor_for_two_weights_cannot_be_followed() -> None:
    net = Net()
    arena, weights = arena_of(net)
    assert len(weights) == 2
    net.first.weight = net.second.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(WeightsChanged, match="is now the tensor of"):
        arena.sync()


@pytest.mark.parametrize("now", [torch.ones(4, 4).to_sparse(), torch.ones(4, 4).to_mkldnn(), torch.ones(4, 4)])
def test_a_weight_in_another_form_cannot_be_followed(now: Tensor) -> None:
    class Packed(nn.Parameter):
        """As a host's quantised weights are."""

    net = Net()
    arena, _ = arena_of(net)
    plain = now.layout is torch.strided
    net.first._parameters["weight"] = Packed(now, requires_grad=False) if plain else now  # type: ignore[assignment]
    with pytest.raises(WeightsChanged, match="is now a"):
        copy_in(arena._tracked, [(arena._tracked.live[0], net.first._parameters["weight"])])


@counted
def test_the_memory_of_a_weight_that_somebody_reads_is_not_written_to() -> None:
    net = Net()
    arena, _ = arena_of(net)
    # past the module: nobody can give this view memory of its own
    kept, values = net.first.weight.data.view(16), net.first.weight.data.clone().view(16)
    net.first.weight.data = torch.zeros(4, 4)
    with pytest.raises(WeightsChanged, match="still in use by others"):
        arena.sync()
    assert torch.equal(kept, values)


def test_a_layers_state_that_somebody_keeps_ends_no_plan_for_ever() -> None:
    net = nn.Sequential(nn.Conv2d(4, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 3, padding=1)).eval()
    accelerator = accelerate(net.requires_grad_(False), Config(allow_cpu=True, drop_slower=False))
    x = torch.randn(1, 4, 8, 8)
    for _ in range(3):
        net(x)
    with torch.enable_grad():
        want = net(x).detach()
    kept = net[0].state_dict()
    for _ in range(3):
        close(net(x), want)
    assert accelerator.plans and kept["weight"].data_ptr()
    runs = accelerator.report.counter("eager_runs")
    close(net(x), want)
    assert accelerator.report.counter("eager_runs") > runs
    accelerator.release()
