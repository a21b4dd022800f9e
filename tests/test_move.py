"""Plans that follow the host to another module of the same architecture."""

from __future__ import annotations

import copy

import pytest
import torch
from fuzz.nets import SmallNet
from torch import nn

from sfast_ext import Config, Hooks, accelerate
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.report import Report
from sfast_ext.runtime import plan_cache

CPU = Config(allow_cpu=True)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def model(seed):
    torch.manual_seed(seed)
    return SmallNet().eval()


def request():
    return torch.randn(2, 4, 8, 8), torch.tensor([5, 7]), torch.randn(2, 7, 8)


def same(ours, twin):
    args = request()
    torch.testing.assert_close(ours(*args)["sample"], twin(*args)["sample"], rtol=1e-4, atol=1e-4)


def captures(acc):
    return acc.report.counter("captures")


def thrown_away(net):
    """As hosts do it: the parameters lose their storage, the objects stay for a while."""
    net.table = net.table.to("meta")
    return net.to("meta")


@pytest.fixture
def used():
    net = model(0)
    acc = accelerate(net, CPU)
    for _ in range(2):
        net(*request())
    return net, acc


def test_plans_are_kept_for_a_model_of_the_same_architecture(used):
    old, acc = used
    thrown_away(old)
    new, twin = model(1), model(1)
    assert acc.move_to(new, Hooks())
    for _ in range(2):
        same(new, twin)
    for each in (new, twin):
        each.blocks[0].conv.weight.mul_(2)
        each.blocks[0].self_attention.to_k.weight = nn.Parameter(torch.ones(8, 8))
    same(new, twin)
    assert captures(acc) == 1 and acc.report.counter("eager_runs") == 4
    assert "forward" not in vars(old) and acc.module is new and acc.installed()
    acc.release()
    for (name, ours), (_, theirs) in zip(new.named_parameters(), twin.named_parameters()):
        assert ours.stride() == theirs.stride() and torch.equal(ours, theirs), name
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes(), name
    assert vars(new).keys() == vars(twin).keys() and not new._state_dict_pre_hooks


def test_the_way_back_to_a_model_that_was_sent_away(used):
    old, acc = used
    twin = model(0)
    # as a host sends it to the CPU for another's sake: in memory of its own
    for parameter in [*old.parameters(), *old.buffers()]:
        parameter.data = parameter.data.clone()
    old.table = old.table.clone()
    new = model(1)
    assert acc.move_to(new, Hooks())
    same(new, model(1))
    # given back as it was, strides and all
    for (name, left), (_, theirs) in zip(old.named_parameters(), twin.named_parameters()):
        assert left.stride() == theirs.stride() and torch.equal(left, theirs), name
    same(old, twin)
    for parameter in [*new.parameters(), *new.buffers()]:
        parameter.data = parameter.data.clone()
    new.table = new.table.clone()
    assert acc.move_to(old, Hooks())
    same(old, twin)
    assert captures(acc) == 1


def differs_in_a_scalar(net):
    net.s1 = 0.5


def differs_in_a_shape(net):
    net.blocks[0].ff = nn.Linear(8, 32)


def differs_in_a_layer(net):
    net.norm_out = nn.GroupNorm(4, 8)


def lacks_a_bias(net):
    net.conv_out = nn.Conv2d(8, 4, 3, padding=1, bias=False)


def has_a_processor_of_another_kind(net):
    net.blocks[0].self_attention.processor = lambda attn, x, **_: x


def has_other_dtype(net):
    net.double()


@pytest.mark.parametrize(
    "change",
    [differs_in_a_scalar, differs_in_a_shape, differs_in_a_layer, lacks_a_bias, has_a_processor_of_another_kind,
     has_other_dtype],
)  # fmt: skip
def test_another_architecture_is_not_moved_to(used, change):
    old, acc = used
    thrown_away(old)
    new = model(1)
    change(new)
    assert not acc.move_to(new, Hooks())
    assert acc.module is old and "forward" not in vars(new)


def test_a_model_that_is_still_in_use_keeps_its_plans(used):
    old, acc = used
    twin = copy.deepcopy(old)
    assert not acc.move_to(model(1), Hooks())
    same(old, twin)


def test_plans_of_another_behaviour_stay_behind(used):
    old, acc = used
    for each in (0.5, 1.0):
        old.s1 = each
        old(*request())
    assert len(acc.plans) == 2
    thrown_away(old)
    new, twin = model(1), model(1)
    assert acc.move_to(new, Hooks()) and len(acc.plans) == 1
    for scale in (1.0, 0.5):
        for each in (new, twin):
            each.s1 = scale
        for _ in range(2):
            same(new, twin)
    assert captures(acc) == 3


def test_weights_that_come_later_are_waited_for(used):
    old, acc = used
    thrown_away(old)
    new, twin = thrown_away(model(1)), model(1)
    assert acc.move_to(new, Hooks())
    acc._cache.drop(next(iter(acc.plans)))
    new.to_empty(device="cpu")
    new.load_state_dict(twin.state_dict())
    new.table = twin.table.clone()
    for _ in range(3):
        same(new, twin)


def test_saving_finds_the_strides_of_the_host_and_plans_go_on(used, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net, acc = used
    twin = model(0)
    assert not net.conv_in.weight.is_contiguous()
    state = net.state_dict()
    assert all(value.is_contiguous() for value in state.values())
    safetensors.save_file(state, tmp_path / "net.safetensors")
    loaded = safetensors.load_file(tmp_path / "net.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in twin.state_dict().items())
    # what is written to the state is written to the model, as ever
    state["conv_in.weight"].mul_(2)
    state["blocks.0.self_attention.to_q.weight"].mul_(2)
    twin.conv_in.weight.mul_(2)
    twin.blocks[0].self_attention.to_q.weight.mul_(2)
    for _ in range(2):
        same(net, twin)
    assert captures(acc) == 1
    nested = nn.ModuleDict({"unet": net}).state_dict()
    assert all(value.is_contiguous() for value in nested.values())
    assert copy.deepcopy(net).state_dict().keys() == twin.state_dict().keys()


EARNED = Config(allow_cpu=True, earned=True)


def images(attachment, nets, config=EARNED):
    """How many plans are made for an image by each of some models, of which the host has one at a time."""
    made = []
    for net in nets:
        acc = attachment.follow(net, config)
        before = acc.report.counter("captures")
        acc.new_generation()
        for _ in range(3):
            twin = copy.deepcopy(net)
            twin.__dict__.pop("forward", None)
            same(net, twin)
        made.append(acc.report.counter("captures") - before)
    return made


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_a_size_is_not_new_because_the_checkpoint_is(monkeypatch, count, gone):
    # no clock decides
    monkeypatch.setattr(plan_cache.Investment, "debt", lambda self: 1.0)
    attachment, old = Attachment(lambda module: Hooks(), Report()), model(0)
    assert images(attachment, [old]) == [0]
    if gone:
        thrown_away(old)
    nets = [model(seed) for seed in range(1, count)]
    assert images(attachment, nets)[0] == 1
    assert "forward" not in vars(old) and len(attachment.status()) == 1
    attachment.release()
    assert all("forward" not in vars(net) for net in nets)


@pytest.mark.parametrize(
    "change",
    [differs_in_a_scalar, differs_in_a_layer, lacks_a_bias, has_a_processor_of_another_kind],
)
def test_a_size_is_new_to_a_model_of_another_architecture(change):
    attachment, other = Attachment(lambda module: Hooks(), Report()), model(1)
    change(other)
    assert images(attachment, [model(0)]) == [0]
    acc = attachment.follow(other, EARNED)
    acc.new_generation()
    other(*request())
    assert captures(acc) == 0
    attachment.release()
