"""Parts of a model accelerated one by one under another's forward, as ControlNet's extension lays one over the UNet."""

from __future__ import annotations

import copy

import pytest
import torch
from fuzz.nets import SmallNet
from torch import nn

from sfast_ext import Config, accelerate

CPU = Config(allow_cpu=True)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def model():
    torch.manual_seed(0)
    return SmallNet().eval()


def parts(net):
    return [(f"blocks.{i}", block) for i, block in enumerate(net.blocks)]


def by_blocks(net, residuals):
    """A forward that runs the blocks itself and adds to what they give."""

    def forward(sample, timestep, context):
        t = timestep.float()[:, None] / 100
        emb = net.time_embed(torch.cat([t, t * t, t.sin(), t.cos()], dim=1))
        h = net.conv_in(sample)
        for block, residual in zip(net.blocks, residuals):
            h = block(h, emb, context) + residual
        return net.conv_out(net.norm_out(h))

    return forward


def request(size=8):
    return torch.randn(2, 4, size, size), torch.tensor([5, 7]), torch.randn(2, 7, 8)


@pytest.fixture
def pair():
    ours = model()
    return ours, copy.deepcopy(ours), accelerate(ours, CPU)


def same(ours, twin, args):
    torch.testing.assert_close(ours(*args), twin(*args), rtol=1e-4, atol=1e-4)


def counters(acc):
    return {name: n for name, n in acc.report.as_dict()["counters"].items() if name != "weights_copied"}


def plain(net):
    return lambda *args: net(*args)["sample"]


def test_blocks_under_a_foreign_forward_run_on_plans(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    acc.accelerate_parts(parts(net))
    for residuals in ((0.5, 1.5), (2.0, -1.0)):
        args = request()
        same(by_blocks(net, residuals), by_blocks(twin, residuals), args)
    assert counters(acc) == {"captures": 2, "eager_runs": 2}
    assert [len(part.plans) for part in acc.parts] == [1, 1] and not acc.plans


def test_the_whole_is_captured_down_to_the_parts_own_forwards(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    for _ in range(3):
        same(plain(net), plain(twin), request())
    assert counters(acc)["captures"] == 1, "blocks inside the original of the first call make no plans"
    assert len(acc.plans) == 1 and acc.report.as_dict()["last_error"] is None
    (plan,) = acc.plans.values()
    assert plan.replays == 2 and plan.fused["packed_linear"] > 0


def test_where_the_whole_goes_to_the_original_its_parts_make_no_plans(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    for each in (net, twin):
        norm = each.norm_out
        each.norm_out.forward = lambda x, norm=norm: nn.GroupNorm.forward(norm, x) * 2
    for _ in range(3):
        same(plain(net), plain(twin), request())
    assert counters(acc) == {"fallbacks": 3}
    # a forward that calls them itself
    for _ in range(2):
        same(by_blocks(net, (0.5, 1.5)), by_blocks(twin, (0.5, 1.5)), request())
    assert counters(acc) == {"fallbacks": 3, "captures": 2, "eager_runs": 2}


def test_the_first_call_of_the_whole_runs_no_plan_of_a_part(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    args = request()
    for _ in range(2):
        same(by_blocks(net, (0.5, 1.5)), by_blocks(twin, (0.5, 1.5)), args)
    before = acc.report.counter("eager_runs")
    # a plan of the whole is compared with this result
    same(plain(net), plain(twin), args)
    assert acc.report.counter("eager_runs") == before == 2
    # the parts' plans are gone, or the weights could not be packed
    assert [len(part.plans) for part in acc.parts] == [0, 0]
    assert next(iter(acc.plans.values())).fused["packed_linear"] > 0
    acc.release()


@pytest.mark.parametrize("whole_first", [True, False])
def test_whole_and_parts_share_the_weights_and_see_every_change(pair, whole_first):
    net, twin, acc = pair
    by_ours, by_twin = by_blocks(net, (0.5, 1.5)), by_blocks(twin, (0.5, 1.5))
    if whole_first:
        same(plain(net), plain(twin), request())
    acc.accelerate_parts(parts(net))
    for change in range(3):
        for _ in range(2):
            args = request()
            same(by_ours, by_twin, args)
            same(plain(net), plain(twin), args)
        for each in (net, twin):
            block = each.blocks[0]
            torch.manual_seed(change)
            # drawn by shape: another memory layout would take the same numbers in another order
            block.cross_attention.to_k.weight.add_(torch.randn(8, 8))
            block.conv.weight = nn.Parameter(torch.randn(8, 8, 3, 3))
            block.time.weight.data = torch.randn(8, 8)
    args = request()
    same(by_ours, by_twin, args)
    same(plain(net), plain(twin), args)
    assert acc.report.counter("captures") <= 5 and acc.report.as_dict()["last_error"] is None


def test_a_weight_of_another_shape_brings_new_plans_for_all(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    for _ in range(2):
        same(plain(net), plain(twin), request())
        same(by_blocks(net, (0, 0)), by_blocks(twin, (0, 0)), request())
    for each in (net, twin):
        torch.manual_seed(1)
        each.blocks[0].ff = nn.Linear(8, 16, bias=False)
    for _ in range(3):
        same(by_blocks(net, (0, 0)), by_blocks(twin, (0, 0)), request())
        same(plain(net), plain(twin), request())
    before = acc.report.counter("eager_runs")
    same(plain(net), plain(twin), request())
    same(by_blocks(net, (0, 0)), by_blocks(twin, (0, 0)), request())
    assert acc.report.counter("eager_runs") == before + 3


def test_a_part_under_a_forward_of_others_is_left_alone(pair):
    net, twin, acc = pair
    net.blocks[0].forward = lambda h, emb, context: h * 2
    twin.blocks[0].forward = lambda h, emb, context: h * 2
    acc.accelerate_parts(parts(net))
    for _ in range(2):
        same(by_blocks(net, (0, 0)), by_blocks(twin, (0, 0)), request())
    assert [part.module for part in acc.parts] == [net.blocks[1]]
    assert any("in place of the forward of blocks.0" in reason for reason in acc.report.as_dict()["reasons"])


def test_a_part_that_was_patched_over_runs_its_plan_again_when_it_comes_back(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    run = [by_blocks(each, (0, 0)) for each in (net, twin)]
    for _ in range(2):
        same(*run, request())
    ours = net.blocks[0].forward
    for each in (net, twin):
        each.blocks[0].forward = lambda h, emb, context: h * 3
    acc.accelerate_parts(parts(net))
    for _ in range(2):
        same(*run, request())
    net.blocks[0].forward = ours
    del twin.blocks[0].forward
    before = acc.report.counter("eager_runs")
    same(*run, request())
    assert acc.report.counter("eager_runs") == before + 2


def test_release_gives_the_parts_back(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    for _ in range(2):
        same(by_blocks(net, (0, 0)), by_blocks(twin, (0, 0)), request())
        same(plain(net), plain(twin), request())
    acc.release()
    for (name, ours), (_, theirs) in zip(net.named_parameters(), twin.named_parameters()):
        assert ours.stride() == theirs.stride() and torch.equal(ours, theirs), name
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes(), name
    for ours, theirs in zip(net.modules(), twin.modules()):
        assert ours.__dict__.keys() == theirs.__dict__.keys()


def test_a_copy_of_a_model_with_parts_runs_its_own_weights(pair):
    net, twin, acc = pair
    acc.accelerate_parts(parts(net))
    for _ in range(2):
        same(by_blocks(net, (0, 0)), by_blocks(twin, (0, 0)), request())
    other = copy.deepcopy(net)
    for each in (other, twin):
        each.blocks[1].conv.weight.mul_(2)
    same(by_blocks(other, (0, 0)), by_blocks(twin, (0, 0)), request())
    same(plain(other), plain(twin), request())


def exchanged(*nets, by: str, where: slice = slice(None)) -> None:
    """Other values in memory of their own, for all parameters or for some."""
    torch.manual_seed(9)
    names = [name for name, _ in nets[0].named_parameters()][where]
    for name in names:
        value = torch.randn_like(nets[0].get_parameter(name)) * 0.3
        for net in nets:
            owner, _, last = name.rpartition(".")
            if by == "data":
                net.get_parameter(name).data = value.clone()
            else:
                net.get_submodule(owner)._parameters[last] = nn.Parameter(value.clone(), requires_grad=False)


@pytest.mark.thinned
@pytest.mark.parametrize("where", [slice(None), slice(2, None), slice(0, -2), slice(4, 8)], ids=str)
@pytest.mark.parametrize("by", ["data", "parameters"])
@pytest.mark.parametrize("whole", [False, True])
def test_parts_run_plans_at_once_after_the_memory_of_all_plans_was_given_back(pair, whole, by, where):
    net, twin, acc = pair
    by_ours, by_twin = by_blocks(net, (0.5, 1.5)), by_blocks(twin, (0.5, 1.5))
    if whole:
        # its plan reads weights that are in no part, and which the parts do not bring back
        same(plain(net), plain(twin), request())
    acc.accelerate_parts(parts(net))
    for _ in range(2):
        same(by_ours, by_twin, request())
    for _ in range(2):
        exchanged(net, twin, by=by, where=where)
        acc.give_memory_back()
        before = counters(acc)
        for _ in range(2):
            same(by_ours, by_twin, request())
        after = counters(acc)
        assert after["eager_runs"] == before.get("eager_runs", 0) + 4 and "fallbacks" not in after
        assert after["captures"] == before["captures"]
    same(plain(net), plain(twin), request())
    same(plain(net), plain(twin), request())
    assert acc.report.as_dict()["last_error"] is None
