"""What the random sequences of tests/fuzz found, each as short as it gets."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from fuzz.compare import compare_modules
from fuzz.nets import Request, SmallNet, arguments, make
from torch import nn
from use_count import counted

from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights import arena
from sfast_ext.weights.original_layout import OriginalLayouts

CPU = Config(allow_cpu=True)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Pair:
    """A model under an accelerator, with its plan built, and its twin that has none."""

    def __init__(self, prepare=lambda net: None) -> None:
        self.rng = random.Random(0)
        self.ours, self.twin = (make("small", 0) for _ in range(2))
        self.both(prepare)
        self.acc = accelerate(self.ours, CPU)
        self.same(2)

    def both(self, change) -> None:
        change(self.ours)
        change(self.twin)

    def same(self, times: int = 1) -> None:
        for _ in range(times):
            args, kwargs = arguments(Request(), self.rng, torch.float32, kind="small")
            assert relative_error([self.ours(*args, **kwargs)["sample"]], [self.twin(*args, **kwargs)["sample"]]) < 1e-4

    def counter(self, name: str) -> int:
        return self.acc.report.counter(name)


@pytest.fixture
def pair():
    return Pair()


def attention(net: nn.Module):
    return net.blocks[0].self_attention


def test_a_weight_transposed_on_its_own_memory_is_seen(pair):
    def change(net):
        attention(net).to_out.weight.data = attention(net).to_out.weight.data.t()

    pair.both(change)
    pair.same(2)
    pair.acc.release()
    assert attention(pair.ours).to_out.weight.stride() == attention(pair.twin).to_out.weight.stride()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2)])
def test_the_weight_of_a_convolution_transposed_on_its_own_memory_is_seen(pair, order):
    def change(net):
        weight = net.blocks[1].conv.weight
        weight.data = weight.data.permute(order)

    pair.both(change)
    pair.same(2)


def test_weights_untied_do_not_end_every_plan():
    def tie(net):
        attention(net).to_k.weight = attention(net).to_q.weight

    def untie(net):
        attention(net).to_k.weight = nn.Parameter(attention(net).to_k.weight.clone())

    pair = Pair(tie)
    pair.both(untie)
    pair.same(2)
    before = pair.counter("captures")
    pair.same(2)
    assert pair.counter("captures") == before


def test_a_weight_tied_to_one_that_comes_earlier_is_watched_in_both_places(pair):
    def tie(net):
        net.blocks[0].time.weight = attention(net).to_q.weight

    def replace(net):
        net.blocks[0].time.weight = nn.Parameter(net.blocks[0].time.weight * 3)

    pair.both(tie)
    pair.same(3)
    pair.both(replace)
    pair.same(2)


def test_weights_that_changed_places(pair):
    def change(net):
        a, b = attention(net).to_q, attention(net).to_k
        a.weight, b.weight = b.weight, a.weight

    pair.both(change)
    pair.same(3)
    pair.acc.release()
    assert attention(pair.ours).to_q.weight.untyped_storage().nbytes() == 4 * 64


def test_one_new_tensor_in_two_places_is_no_error(pair):
    def change(net):
        fresh = nn.Parameter(torch.ones_like(attention(net).to_q.weight) / 8)
        attention(net).to_q.weight = attention(net).to_k.weight = fresh

    pair.both(change)
    pair.same(3)
    assert not pair.counter("errors") and pair.counter("eager_runs") > 1
    assert attention(pair.ours).to_q.weight is attention(pair.ours).to_k.weight


def test_a_forward_wrapped_and_installed_under_and_over_it_does_not_go_round_in_circles(pair):
    def wrap(net):
        before = net.forward
        net.forward = lambda sample, *args, **kwargs: before(sample * 1.1, *args, **kwargs)

    pair.both(wrap)
    pair.acc.release()
    pair.acc.install()
    pair.same(3)
    assert not pair.counter("errors")


def test_a_copy_of_a_model_under_accelerates_hook_can_be_made(pair):
    hooks = pytest.importorskip("accelerate.hooks")
    pair.both(lambda net: hooks.add_hook_to_module(net, hooks.ModelHook()))
    pair.same()
    held = pair.ours
    pair.ours = copy.deepcopy(held)
    held.conv_in.weight.mul_(2)
    pair.same(2)


def test_a_copy_keeps_the_wrapper_that_was_there_before_us():
    net, twin = SmallNet().eval(), SmallNet().eval()
    twin.load_state_dict(net.state_dict())
    for module in (net, twin):
        module.forward = lambda *args, f=module.forward, **kwargs: {"sample": f(*args, **kwargs)["sample"] * 2}
    accelerate(net, CPU)
    args, kwargs = torch.randn(1, 4, 4, 4), {"timestep": 1, "encoder_hidden_states": torch.randn(1, 7, 8)}
    ours, theirs = copy.deepcopy(net)(args, **kwargs), copy.deepcopy(twin)(args, **kwargs)
    torch.testing.assert_close(ours, theirs)


def test_weights_that_are_away_while_a_plan_is_built_are_no_reason_to_refuse_for_ever(pair, monkeypatch):
    pair.acc._model.forget_plans("of this test")
    layer, weight = attention(pair.ours).to_out, attention(pair.ours).to_out.weight
    original = pair.acc._server.run_original

    def offloading(*args, **kwargs):
        # as an offload that fetches a layer for the call alone
        layer._parameters["weight"] = weight
        result = original(*args, **kwargs)
        layer._parameters["weight"] = nn.Parameter(torch.empty_like(weight, device="meta"), False)
        return result

    with monkeypatch.context() as m:
        m.setattr(pair.acc._server, "run_original", offloading)
        pair.same(2)
    assert "meta" in " ".join(pair.acc.report.as_dict()["reasons"])
    layer._parameters["weight"] = weight
    before = pair.counter("eager_runs")
    pair.same(2)
    assert pair.counter("eager_runs") == before + 1 and not pair.counter("errors")


def test_a_layout_chosen_by_the_host_is_what_it_gets_back(pair):
    def change(net):
        net.conv_in.weight = nn.Parameter(net.conv_in.weight.detach().transpose(2, 3).contiguous().transpose(2, 3))

    pair.both(change)
    pair.same(2)
    pair.acc.release()
    assert pair.ours.conv_in.weight.stride() == pair.twin.conv_in.weight.stride()


def test_a_strength_in_an_object_that_a_processor_holds():
    class Scaled:
        def __init__(self, inner):
            self.inner, self.settings = inner, SimpleNamespace(scale=1.0)

        def __call__(self, *args, **kwargs):
            return self.inner(*args, **kwargs) * self.settings.scale

    def put_on(net):
        attention(net).processor = Scaled(attention(net).processor)

    # two behaviours are captured at once, a third would wait
    pair = Pair(put_on)
    pair.both(lambda net: setattr(attention(net).processor.settings, "scale", 0.5))
    pair.same(2)
    assert not pair.counter("fallbacks")


def test_a_packed_weight_exchanged_with_another_gets_memory_of_its_own(pair):
    def exchange(net):
        layer = net.blocks[0].cross_attention
        layer.to_q.weight, layer.to_k.weight = layer.to_k.weight, layer.to_q.weight

    pair.both(exchange)
    pair.acc.release()
    compare_modules(pair.ours, pair.twin)


def test_a_forward_of_ours_put_back_does_not_bring_a_class_patch_back(pair):
    """Somebody stored our forward while the class was patched, and puts it back when it is not."""
    kind, original = type(pair.ours), type(pair.ours).forward
    pair.acc.release()
    kind.forward = lambda self, sample, *args, **kwargs: original(self, sample * 2, *args, **kwargs)
    try:
        pair.acc = accelerate(pair.ours, CPU)
        stored = pair.ours.forward
        pair.acc.release()
    finally:
        kind.forward = original
    pair.ours.forward = stored
    pair.acc = accelerate(pair.ours, CPU)
    pair.same(2)
    pair.acc.release()
    pair.same(1)
    compare_modules(pair.ours, pair.twin)


def test_weights_that_change_places_while_only_half_is_taken_up(pair, monkeypatch):
    """One weight's tensor, already in its live place, goes to a layer that is not looked at in the same go."""
    real = arena.copy_in

    def half(tracked, stale):
        real(tracked, stale[: len(stale) // 2])
        raise RuntimeError("half way")

    def load(net):
        for layer in (attention(net).to_q, net.blocks[1].time):
            layer.weight = nn.Parameter(layer.weight.detach() * -1.5)

    def exchange(net):
        a, b = attention(net).to_q, net.blocks[1].time
        a.weight, b.weight = b.weight, a.weight

    with monkeypatch.context() as m:
        m.setattr(arena, "copy_in", half)
        for change in (load, exchange):
            pair.both(change)
            pair.same(1)
    assert pair.counter("errors") == 2
    pair.same(3)
    pair.acc.release()
    compare_modules(pair.ours, pair.twin)


def packed_layer(net: nn.Module):
    return attention(net).to_q


def plain_layer(net: nn.Module):
    return net.conv_in


def conv_out(net: nn.Module):
    return net.conv_out


@pytest.mark.parametrize("layer", [plain_layer, packed_layer])
@pytest.mark.parametrize(
    "kept", ["parameter", pytest.param("data", marks=counted), pytest.param("state dict", marks=counted)]
)
def test_what_a_host_keeps_of_a_weight_and_puts_back_is_not_written_to(pair, layer, kept):
    backups = {}

    def replace(net):
        weight = layer(net).weight
        own = {"parameter": lambda: weight, "data": lambda: weight.data, "state dict": layer(net).state_dict}
        backups[net] = own[kept]()
        layer(net).weight = nn.Parameter(weight.detach() * -1.5)

    def put_back(net):
        backup = backups.pop(net)
        if kept == "parameter":
            layer(net).weight = backup
        elif kept == "data":
            layer(net).weight.data = backup
        else:
            layer(net).load_state_dict(backup)

    pair.both(replace)
    pair.same(3)
    pair.both(put_back)
    pair.same(3)
    # if the object itself is kept it gets memory of its own, and the plan stays
    assert pair.counter("captures") == (1 if kept == "parameter" else 2)
    pair.acc.release()
    pair.same(1)


@pytest.mark.parametrize("second", [lambda net: attention(net).to_k, lambda net: attention(net).to_out])
def test_weights_that_changed_places_by_their_data(pair, second):
    def exchange(net):
        a, b = attention(net).to_q, second(net)
        a.weight.data, b.weight.data = b.weight.data, a.weight.data

    pair.both(exchange)
    pair.same(3)
    assert pair.counter("captures") == 1


@pytest.mark.parametrize("second", [lambda net: attention(net).to_k, lambda net: attention(net).to_out])
@pytest.mark.parametrize("first", [lambda net: attention(net).to_q, lambda net: net.blocks[1].time])
def test_weights_that_changed_places_by_their_data_are_given_back(pair, first, second):
    """No call comes in between: a weight that the arena had left where it was holds memory of the arena's."""

    def exchange(net):
        a, b = first(net), second(net)
        if a.weight.shape != b.weight.shape:
            b = net.blocks[0].time
        a.weight.data, b.weight.data = b.weight.data, a.weight.data

    pair.both(exchange)
    pair.acc.release()
    compare_modules(pair.ours, pair.twin)
    pair.same(1)


def test_data_that_went_round_between_captures_is_given_back(pair):
    """Weights change places, first as objects and then by their data, while what was placed is no longer tracked."""

    def go_round(net):
        a, b, c = attention(net).to_q, attention(net).to_k, attention(net).to_out
        b.weight, c.weight = c.weight, b.weight
        a.weight.data, b.weight.data, c.weight.data = c.weight.data, a.weight.data, b.weight.data

    pair.both(go_round)
    pair.acc._model.forget_plans("a test")
    pair.acc.arena.index()
    pair.acc.release()
    compare_modules(pair.ours, pair.twin)
    pair.same(1)


def test_a_weights_memory_that_another_weight_took_over(pair):
    def move_on(net):
        layer, other = attention(net).to_out, net.blocks[0].cross_attention.to_out
        old = layer.weight.data
        layer.weight, other.weight = nn.Parameter(old * -1.5), nn.Parameter(old)

    pair.both(move_on)
    pair.same(3)
    assert pair.counter("captures") == 1


def test_two_weights_in_one_memory_of_which_one_is_replaced():
    def share(net):
        layer = net.blocks[0].cross_attention.to_out
        layer.weight.data = attention(net).to_out.weight.data

    def replace(net):
        attention(net).to_out.weight = nn.Parameter(attention(net).to_out.weight.detach() * -1.5)

    pair = Pair(share)
    pair.both(replace)
    pair.same(3)


def test_a_weight_that_nobody_keeps_is_not_copied_when_it_is_replaced(pair, monkeypatch):
    monkeypatch.setattr(OriginalLayouts, "restore", lambda *_: pytest.fail("it was copied"))

    def replace(net):
        for layer in (plain_layer(net), packed_layer(net)):
            layer.weight = nn.Parameter(layer.weight.detach() * -1.5)

    pair.both(replace)
    pair.same(1)
    assert pair.counter("captures") == 1


def without_plans_for_a_while(pair, layer):
    """All is laid back, but for what the host took out of the module before."""
    pair.both(lambda net: setattr(layer(net), "weight", nn.Parameter(layer(net).weight.detach() * -1.5)))
    pair.acc._model.forget_plans("of this test")
    pair.acc._model.restore_layout(pair.acc.report)


@pytest.mark.parametrize("kept", ["parameter", "data", "computed"])
def test_what_a_host_puts_back_after_the_weights_were_laid_back(pair, kept):
    weights = {net: conv_out(net).weight for net in (pair.ours, pair.twin)}
    backups = {net: weight if kept == "parameter" else nn.Parameter(weight.data) for net, weight in weights.items()}
    without_plans_for_a_while(pair, conv_out)
    pair.both(lambda net: setattr(conv_out(net), "weight", backups[net]))
    if kept == "computed":
        pair.both(lambda net: setattr(conv_out(net), "weight", nn.Parameter(conv_out(net).weight * 2)))
    else:
        pair.same(2)
    pair.acc.release()
    compare_modules(pair.ours, pair.twin)


@pytest.mark.parametrize("layer", [conv_out, packed_layer])
def test_a_parameter_that_is_out_of_the_module_when_it_is_given_back(pair, layer):
    taken = layer(pair.ours).weight
    without_plans_for_a_while(pair, layer)
    assert taken.is_contiguous() and taken.untyped_storage().nbytes() == taken.nbytes
