"""Half-precision weights that are to come back, and for which the GPU has no room: forwards read them from system
memory until there is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended_card import GPU, Card
from torch import nn
from torch.nn import functional as F

from sfast_ext import Config, Hooks, accelerate, accelerator_of, reasons
from sfast_ext.plans.graph_pool import MB
from sfast_ext.weights import resident as weights_resident
from sfast_ext.weights import streamed_by_layer
from sfast_ext.weights.digest import Digests
from sfast_ext.weights.weight import WeightsInUse

from .eight_bits import Net, On, changed, net
from .test_resident import CARD, OFF, WEIGHTS, away, card, halves, kernels, started  # noqa: F401

EAGER = replace(CARD, cuda_graphs=False)
MORE = 400_000
"""Bytes that suffice for the weights as well."""


def full(card: Card, on: On) -> None:  # noqa: F811
    """Another program has all memory but what a small forward takes."""
    card.capacity = card.used + 90_000


@pytest.fixture
def on(card: Card) -> On:  # noqa: F811
    found = started(EAGER)
    full(card, found)
    assert away(found) == len(halves(found.ours))
    return found


def off(on: On) -> None:
    on.acc.configure(replace(OFF, cuda_graphs=False))


def disabled(on: On) -> None:
    on.acc.configure(replace(EAGER, enabled=False))


def dropped(on: On) -> None:
    on.acc.forget_plans("the user has dropped them")


def released(on: On) -> None:
    on.acc.release()


def untouched(module: nn.Module) -> bool:
    """Whether nothing of ours is in a module, and its weights are in one place."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._state_dict_pre_hooks)
    here = {p.device for p in module.parameters()}
    return "forward" not in vars(module) and not any(hooks) and len(here) == 1 and accelerator_of(module) is None


@pytest.mark.parametrize("how", [off, disabled, dropped, released])
def test_calls_are_right_until_there_is_room(card: Card, on: On, how: Callable[[On], None]) -> None:  # noqa: F811
    how(on)
    for _ in range(3):
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))
    assert on.words().count("no room for half-precision weights") == 1 and on.count("errors") == 0, on.words()
    # the host lacks nothing
    assert card.refused == on.count("out_of_memory") > 2
    card.capacity += MORE
    assert on.error(32) < 0.06 and (how is dropped or away(on) == 0)
    assert how is not released or untouched(on.ours) and not on.acc.arena.resident


def test_a_module_that_the_host_moves_is_the_hosts(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    on.ours.to("cpu")
    x = torch.randn(2, 16, 8).to(torch.bfloat16)
    assert torch.equal(on.ours(x), on.twin(x)) and untouched(on.ours) and not on.acc.arena.resident
    card.capacity += MORE
    on.ours.to("cuda")
    assert on.error(32) < 1e-6 and untouched(on.ours)


def test_a_second_release_ends_it_if_there_is_room(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    released(on)
    assert not untouched(on.ours) and on.error(32) < 1e-6
    card.capacity += MORE
    released(on)
    assert untouched(on.ours) and on.error(32) < 1e-6


def test_another_accelerator_has_what_is_left(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    before, on.acc = on.acc, accelerate(on.ours, EAGER)
    for _ in range(2):
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))
    # the user knows already
    assert "no room for half-precision weights" not in on.words()
    assert not before.arena.resident and not before.installed()
    card.capacity += MORE
    on.acc.release()
    assert untouched(on.ours) and on.error(32) < 1e-6


def test_a_late_release_takes_nothing_from_a_later_accelerator(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    first, on.acc = on.acc, accelerate(on.ours, EAGER)
    released(on)
    # as who cleans up twice
    first.release()
    for _ in range(2):
        on.acc = accelerate(on.ours, EAGER)
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))
        released(on)
    card.capacity += MORE
    assert on.error(32) < 1e-6 and untouched(on.ours)


def test_the_same_accelerator_goes_on(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    assert on.error(32) < 1e-6
    on.acc.install()
    assert on.error(32) < 1e-6
    card.capacity = 64 * MB
    assert [on.error(32) < 0.06 for _ in range(3)] == [True] * 3 and on.plan.resident
    released(on)
    assert untouched(on.ours)


def test_some_came_and_memory_ran_out(card: Card, on: On, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        # then weights come one by one
        patch.setattr(weights_resident.Staging, "copy", broken)
        patch.setattr(weights_resident.torch, "empty_like", lambda source, device: source.new_empty(source.shape))
        released(on)
    assert away(on) == len(halves(on.ours))
    assert on.error(32) < 1e-6 and not untouched(on.ours)
    card.capacity += MORE
    assert on.error(32) < 1e-6 and untouched(on.ours)


def test_weights_that_another_thread_uses_at_a_release(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    def in_use(*_: object) -> None:
        raise WeightsInUse(reasons.WEIGHTS_IN_USE())

    with monkeypatch.context() as patch:
        patch.setattr(type(on.acc._context), "bring_back", in_use)
        released(on)
    assert away(on) == len(halves(on.ours)) and on.error(32) < 1e-6
    card.capacity += MORE
    assert on.error(32) < 1e-6 and untouched(on.ours)


class Crowded:
    """A forward that has no room: for the activations of one of its layers next to all weights, or in any case."""

    def __init__(self, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_layer, self.all, self.asked, self._on = True, False, 0, on
        self.runs: list[int] = []
        context = on.acc._context
        monkeypatch.setattr(context, "hooks", replace(context.hooks, short_of_memory=self.give_way))
        next(m for m in on.ours.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(self.run)

    def run(self, *_: Any) -> None:
        self.runs.append(away(self._on))
        if not (self.by_layer if self.runs[-1] else self.all):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def give_way(self) -> bool:
        self.asked += 1
        self.by_layer = self.all = True
        return True


def test_a_forward_without_room_next_to_all_weights_reads_them_by_layer(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    card.capacity += MORE
    assert on.error(32) < 0.06 and on.plan.resident
    number, forward = len(halves(on.ours)), Crowded(on, monkeypatch)
    # another size, whose plan is not earned yet
    with monkeypatch.context() as patch:
        patch.setattr(type(on.acc._server), "_is_earned", lambda *_: False)
        for _ in range(3):
            assert on.error(48) < 1e-6 and away(on) == number
        # they came once, and banks left first
        assert forward.runs == [0, 0, number, number, number] and not forward.asked and on.count("errors") == 0
        assert on.words().count("no room for this image next to half-precision weights") == 1, on.words()
        on.acc.new_generation()
        forward.all = True
        assert on.error(48) < 1e-6 and away(on) == 0
    on.acc.new_generation()
    assert [on.error(48) < 0.06 for _ in range(2)] == [True] * 2 and on.plan.resident and on.count("errors") == 0


def test_weights_leave_again_without_memory_for_digests(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    card.capacity += MORE
    assert on.error(32) < 0.06
    number, forward, asked = len(halves(on.ours)), Crowded(on, monkeypatch), list[int]()

    def full(*_: object) -> list[bool]:
        asked.append(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Digests, "unchanged", full)
    with monkeypatch.context() as patch:
        patch.setattr(type(on.acc._server), "_is_earned", lambda *_: False)
        assert on.error(48) < 1e-6 and away(on) == number
    assert asked and not forward.asked and on.count("errors") == 0, on.words()
    assert on.error(32) < 0.06


def test_without_plans_weights_do_not_leave_again(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    card.capacity += MORE
    assert on.error(32) < 0.06
    # something else holds its banks still
    banks = on.acc.arena.resident.banks
    dropped(on)
    forward = Crowded(on, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(type(on.acc._server), "_is_earned", lambda *_: False)
        assert on.error(48) < 1e-6 and forward.asked == 1 and away(on) == 0
    assert banks and not any(forward.runs) and on.count("errors") == 0


def test_the_host_gives_way_if_there_is_none_by_layer_either(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    card.capacity += MORE
    assert on.error(32) < 0.06
    forward = Crowded(on, monkeypatch)
    forward.by_layer = False
    with monkeypatch.context() as patch:
        patch.setattr(type(on.acc._server), "_is_earned", lambda *_: False)
        assert on.error(48) < 1e-6 and forward.asked == 1
    assert forward.runs[:2] == [0, 0] and forward.runs[2] and on.count("errors") == 0


def test_the_user_is_told_again_after_there_was_room(card: Card, on: On) -> None:  # noqa: F811
    off(on)
    card.capacity = 64 * MB
    assert on.error(32) < 1e-6 and away(on) == 0
    on.acc.configure(EAGER)
    for _ in range(3):
        on.call()
    full(card, on)
    off(on)
    assert away(on) == len(halves(on.ours)) and on.error(32) < 1e-6
    assert on.words().count("no room for half-precision weights") == 2


def test_copies_and_saved_weights_meanwhile(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    saved = on.ours.state_dict()
    assert all(torch.equal(saved[name].cpu(), value) for name, value in on.twin.state_dict().items())
    card.capacity += 2 * MORE
    made = copy.deepcopy(on.ours)
    assert accelerator_of(made) is None
    assert all(torch.equal(a.cpu(), b) for a, b in zip(made.parameters(), on.twin.parameters()))


def hosted(card: Card, short: Callable[[], bool]) -> On:  # noqa: F811
    """A model with plans, without room for its half-precision weights, under a host."""
    on = started(EAGER)
    on.acc.release()
    on.acc = accelerate(on.ours, EAGER, hooks=Hooks(short_of_memory=short))
    for _ in range(3):
        on.call()
    full(card, on)
    return on


@pytest.mark.parametrize("way", ["gave way", "none", "raises"])
def test_without_plans_a_host_gives_way_first(card: Card, way: str) -> None:  # noqa: F811
    asked: list[str] = []

    def short() -> bool:
        asked.append(way)
        if way == "raises":
            raise ValueError("of the host")
        if way == "gave way":
            card.capacity += MORE
        return way == "gave way"

    on = hosted(card, short)
    dropped(on)
    hook = on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    assert on.error(32) < 1e-6 and asked == [way]
    assert away(on) == (0 if way == "gave way" else len(halves(on.ours)))
    assert on.count("errors") == (way == "raises")
    hook.remove()


@pytest.mark.parametrize("call", ["not earned", "bypassed", "not lean"])
def test_with_plans_a_forward_reads_weights_by_layer_first(
    card: Card, monkeypatch: pytest.MonkeyPatch, call: str  # noqa: F811
) -> None:
    """A host gives way for good, and has no plans from then on."""
    asked: list[int] = []
    on = hosted(card, lambda: bool(asked.append(1)))
    number, words = len(halves(on.ours)), "no room for this image next to half-precision weights"
    with monkeypatch.context() as patch:
        if call == "not earned":
            patch.setattr(type(on.acc._server), "_is_earned", lambda *_: False)
        if call == "bypassed":
            on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
        on.acc._context.model.lean_failed = call == "not lean"
        tried, real = list[int](), on.acc.arena.resident.bring_back
        patch.setattr(type(on.acc.arena.resident), "bring_back", lambda _: (tried.append(1), real())[1])
        for _ in range(3):
            assert on.error(32) < 1e-6 and away(on) == number
        attempts = len(tried)
        assert on.words().count(words) == 1 and "no room for half-precision weights" not in on.words()
        assert not asked and on.count("errors") == 0, on.words()
        # they come with the next image for which there is room
        on.acc.new_generation()
        assert on.error(32) < 1e-6 and len(tried) > attempts and away(on) == number
        card.capacity += MORE
        on.acc.new_generation()
        assert on.error(32) < 1e-6 and away(on) == (0 if call != "not lean" else number)
    card.capacity = 64 * MB
    on.ours.blocks[0]._forward_hooks.clear()
    on.acc.new_generation()
    for rows in (256, 256, 32, 32):
        on.call(rows)
    assert on.error() < 0.06 and on.error(32) < 0.06 and away(on) == number
    assert len(on.acc.plans) == 2 and all(plan.resident for plan in on.acc.plans.values())
    assert not asked and on.count("errors") == 0, on.words()


def test_a_step_that_reads_weights_by_layer_earns_the_plan_of_its_size(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    on = hosted(card, lambda: False)
    on.acc.configure(replace(on.acc.config, earned=True))
    monkeypatch.setattr(on.acc._server._earnings, "due", lambda kind: False)
    on.acc.new_generation()
    assert on.error(32) < 1e-6 and len(on.acc.plans) == 1 and away(on) == len(halves(on.ours))
    for _ in range(3):
        assert on.error(32) < 0.06
    assert len(on.acc.plans) == 2 and on.plan.resident and on.count("weights_brought_back") == 0
    # there is room for the weights of another size
    card.capacity += MORE
    on.acc.new_generation()
    for _ in range(3):
        assert on.error(64) < 1e-6
    assert len(on.acc.plans) == 2 and on.count("errors") == 0, on.words()


class Odd(Net):
    """Takes its input out of a list, and fails in one way or another if weights are in system memory."""

    how = ""

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        x, weight = given.pop(), self.blocks[0].to_q.weight
        y = super().forward(x) + torch.rand(8, device=x.device)
        if self.how == "no memory" and not weight.is_cuda:
            out_of_memory()
        if self.how == "strides":
            weight.t_().t_()
        if self.how == "device":
            y = y + torch.zeros(8, device=weight.device)
        return y.to(weight.device) if self.how == "moves" else y


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("how", ["no memory", "strides", "device", "moves"])
def test_a_host_gives_way_if_a_forward_fails_by_layer(card: Card, how: str, gives: bool) -> None:  # noqa: F811
    asked: list[int] = []

    def short() -> bool:
        asked.append(1)
        if gives:
            card.capacity += MORE
        return gives

    on = hosted(card, short)
    for each in (on.ours, on.twin):
        each.__class__ = Odd
    on.ours.how = how
    hook = on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    x = torch.randn(2, 16, 8).to(torch.bfloat16)
    torch.manual_seed(7)
    wanted, state = on.twin([x]), torch.get_rng_state()
    torch.manual_seed(7)
    if not gives and how != "moves":
        with pytest.raises(RuntimeError):
            on.ours([x.to(GPU)])
        on.ours.how = ""
        assert asked and away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()
        assert torch.equal(on.ours([x.to(GPU)]).cpu(), wanted)
    else:
        found = on.ours(there := [x.to(GPU)])
        assert torch.equal(found.cpu(), wanted) and there == [] and found.is_cuda == gives and asked == [1]
        # what failed has drawn nothing
        assert torch.equal(torch.get_rng_state(), state)
        assert away(on) == (0 if gives else len(halves(on.ours))) and on.count("errors") == 0, on.words()
    hook.remove()


class KeepsAView(Net):
    """Keeps a view of a weight, and then finds no memory by layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "view"):
            self.view = self.blocks[1].to_out.weight.t()
        y = super().forward(x)
        if not self.blocks[1].to_out.weight.is_cuda:
            out_of_memory()
        return y + y @ self.view[:8, :8]


def test_what_a_failed_run_by_layer_keeps_is_on_the_gpu(card: Card) -> None:  # noqa: F811
    def short() -> bool:
        card.capacity += MORE
        return True

    on = hosted(card, short)
    on.ours.__class__ = KeepsAView
    on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    x = torch.randn(2, 16, 8).to(torch.bfloat16)
    y = on.twin(x)
    wanted = y + y @ on.twin.blocks[1].to_out.weight.t()[:8, :8]
    assert torch.equal(on.ours(x.to(GPU)).cpu(), wanted) and on.ours.view.is_cuda and on.count("errors") == 0


class Ends(Exception):
    """Of a host, which ends an image by it."""


def test_what_a_host_raises_is_raised_by_layer(card: Card) -> None:  # noqa: F811
    asked: list[int] = []
    on = hosted(card, lambda: bool(asked.append(1)))

    def ends(*_: object) -> None:
        raise Ends

    on.ours.blocks[0].register_forward_hook(ends)
    for _ in range(2):
        with pytest.raises(Ends):
            on.call(32)
    assert not asked and away(on) == len(halves(on.ours)) and on.count("errors") == 0


def reads_device(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert self.weight.is_cuda
    return F.linear(x.to(self.weight.device), self.weight, self.bias)


def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    # as a LoRA that is applied in the forward of its layer
    self.weight.copy_(self.weight.to(torch.float32) * -1.0)
    return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("forward", [reads_device, writes])
def test_a_layer_has_its_weights_on_the_gpu_while_it_is_called(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]  # noqa: F811
) -> None:
    layer, like = on.ours.blocks[0].ff_out, on.twin.blocks[0].ff_out
    place = layer.weight.data_ptr()
    real = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (forward if self is layer else real)(self, x))
    released(on)
    for _ in range(3):
        if forward is writes:
            like.weight.neg_()
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))
        assert torch.equal(layer.weight, like.weight) and layer.weight.data_ptr() == place


def test_what_is_only_read_counts_as_unchanged(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    versions = [p._version for p in halves(on.ours)]
    assert on.error(32) < 1e-6 and versions == [p._version for p in halves(on.ours)]


def test_what_is_written_is_kept_without_memory_for_a_digest(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    layer, like = on.ours.blocks[1].ff_out, on.twin.blocks[1].ff_out

    def write(layer: Any, _: Any) -> None:
        layer.weight.neg_()
        # none of our layers follows
        monkeypatch.setattr(streamed_by_layer, "digest_of", out_of_memory)

    for each in (layer, like):
        each.register_forward_pre_hook(write)
    released(on)
    on.call(32)
    assert torch.equal(layer.weight, like.weight) and away(on) == len(halves(on.ours))


class Outside(Net):
    """Reads a weight, or writes to it, where its layer is not called."""

    writes = resizes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0].to_q.weight
        if self.writes:
            assert weight.mul_(-1.0) is weight
            weight[::3] *= 2
            torch.neg(weight[1], out=weight[2])
            torch._foreach_mul_([weight, self.blocks[1].to_out.weight], 0.5)
        if self.resizes:
            weight.t_()
        return super().forward(x) + self.blocks[1].to_out.weight.sum()


def test_weights_are_read_where_no_layer_is_called(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    for each in (on.ours, on.twin):
        each.__class__ = Outside
    assert on.error(32) < 1e-6
    places = [p.data_ptr() for p in halves(on.ours)]
    for each in (on.ours, on.twin):
        each.writes = True
    for _ in range(2):
        assert on.error(32) < 1e-6 and places == [p.data_ptr() for p in halves(on.ours)]
        assert all(map(torch.equal, halves(on.ours), halves(on.twin)))
    # who gives one other strides finds no memory
    for each in (on.ours, on.twin):
        each.writes = False
    on.ours.resizes = True
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no room for half-precision weights"):
        on.call(32)
    on.ours.resizes = False
    card.capacity += MORE
    assert on.error(32) < 1e-6 and untouched(on.ours)


def test_a_layers_own_hooks_write_and_restore(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    kept = torch.empty(0)

    def apply(layer: Any, _: Any) -> None:
        nonlocal kept
        kept = layer.weight.to("cpu", copy=True)
        layer.weight.mul_(-2.0)

    def restore(layer: Any, *_: Any) -> None:
        # after hooks on all modules
        layer.weight.copy_(kept)

    for each in (on.ours, on.twin):
        each.blocks[0].ff_out.register_forward_pre_hook(apply)
        each.blocks[0].ff_out.register_forward_hook(restore)
    for _ in range(2):
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))
        assert all(map(torch.equal, halves(on.ours), halves(on.twin)))


class Twice(nn.Linear):
    """A layer that calls itself."""

    inside = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            return super().forward(x)
        self.inside = True
        try:
            y = self(x)
        finally:
            self.inside = False
        assert self.weight.device == x.device
        return super().forward(x) - 2 * y


def test_a_layer_within_its_own_call(card: Card, on: On) -> None:  # noqa: F811
    released(on)
    for each in (on.ours, on.twin):
        each.blocks[0].to_q.__class__ = Twice
    for _ in range(2):
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))


def test_other_models_in_other_threads_have_their_plans(card: Card, on: On) -> None:  # noqa: F811
    other, x = net(), torch.randn(2, 16, 8).to(torch.bfloat16)
    acc = accelerate(other, Config(allow_cpu=True, triton=False))

    def call() -> None:
        with torch.no_grad():
            other(x)

    def calls(*_: object) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    for _ in range(2):
        calls()
    released(on)
    on.ours.blocks[0].register_forward_hook(calls)
    before = acc.report.counter("eager_runs")
    for _ in range(3):
        assert on.error(32) < 1e-6
    assert acc.report.counter("eager_runs") == before + 3 and acc.report.counter("fallbacks") == 0
    # also one that is made meanwhile
    acc.forget_plans(None)
    for _ in range(2):
        assert on.error(32) < 1e-6
    on.ours.blocks[0]._forward_hooks.clear()
    calls()
    assert acc.report.counter("captures") == 2 and acc.report.counter("eager_runs") == before + 5


def test_two_threads_take_turns(card: Card, on: On, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    released(on)
    # no attempt to bring weights back keeps them apart
    monkeypatch.setattr(type(on.acc._context), "bring_back", out_of_memory)
    within, ends, errors = threading.Event(), threading.Event(), list[float]()

    def waits(*_: object) -> None:
        if threading.current_thread() is thread:
            within.set()
            ends.wait(10)

    def call() -> None:
        with card, torch.no_grad():
            errors.append(on.error(32))

    on.ours.blocks[0].to_q.register_forward_pre_hook(waits)
    def first(*_: object) -> None:
        # this forward has begun when the other's layer returns its weights
        if threading.current_thread() is not thread:
            ends.set()
            thread.join(10)

    on.ours.first.register_forward_hook(first)
    thread = threading.Thread(target=call)
    threading.Timer(1.0, ends.set).start()
    thread.start()
    assert within.wait(10) and on.error(32) < 1e-6
    thread.join()
    assert errors and errors[0] < 1e-6 and away(on) == len(halves(on.ours))


def wrapped(on: On, ours: bool) -> None:
    """Another extension puts its forward in the module's place, which calls ours or the one of the class."""
    inner = on.ours.forward if ours else type(on.ours).forward.__get__(on.ours)
    on.ours.forward = lambda x: inner(x)  # type: ignore[method-assign]


def test_a_wrapper_has_the_forward_of_a_module_that_is_released(card: Card, on: On) -> None:  # noqa: F811
    wrapped(on, ours=True)
    released(on)
    for _ in range(2):
        assert on.error(32) < 1e-6 and away(on) == len(halves(on.ours))
    assert on.words().count("no room for half-precision weights") == 1
    card.capacity += MORE
    assert on.error(32) < 1e-6 and away(on) == 0 and not on.acc.arena.resident
    del on.ours.forward
    assert on.error(32) < 1e-6 and untouched(on.ours)


def test_another_forward_finds_weights_once_there_is_room(card: Card, on: On) -> None:  # noqa: F811
    on.acc._context.slot.watch()
    wrapped(on, ours=False)
    released(on)
    with pytest.raises(RuntimeError, match="same device"):
        on.call(32)
    card.capacity += MORE
    assert on.error(32) < 1e-6 and away(on) == 0 and not on.acc.arena.resident
    del on.ours.forward
    assert on.error(32) < 1e-6 and untouched(on.ours)


def test_a_layer_that_raises_leaves_its_weights_where_they_were(card: Card, on: On) -> None:  # noqa: F811
    class Raises(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("of the layer")

    released(on)
    on.ours.blocks[0].to_q.__class__ = Raises
    with pytest.raises(ValueError, match="of the layer"):
        on.call(32)
    assert away(on) == len(halves(on.ours)) and not nn.modules.module._global_forward_pre_hooks
    # a caller may go on after that
    forward = type(on.ours.blocks[0]).forward
    on.ours.blocks[0].__class__ = type("Tries", (type(on.ours.blocks[0]),), {"forward": lambda self, x: tried(
        lambda: self.to_q(x), lambda: forward(on.ours.blocks[1], x))})  # fmt: skip
    x = torch.randn(2, 16, 8).to(torch.bfloat16)
    on.ours(x.to(GPU))
    assert away(on) == len(halves(on.ours)) and card.used < 10_000


def tried(action: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    try:
        return action()
    except ValueError:
        return otherwise()


def out_of_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def test_no_more_than_the_largest_layer_is_on_the_gpu(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    released(on)
    on.call(32)
    with monkeypatch.context() as patch:
        # the attempt to bring all of them takes what there is
        patch.setattr(type(on.acc.arena.resident), "bring_back", out_of_memory)
        taken = peak(on, card)
    card.capacity = 64 * MB
    on.call(32)
    largest = max(getattr(on.ours.blocks[0], name).weight.nbytes for name in WEIGHTS)
    assert untouched(on.ours) and peak(on, card) < taken < peak(on, card) + 1.1 * largest


def peak(on: On, card: Card) -> int:  # noqa: F811
    """What a call takes, and gives back."""
    before = card.peak = card.used
    on.call(32)
    assert card.used - before < 1000
    return card.peak - before


def test_changes_meanwhile_are_followed(card: Card, on: On) -> None:  # noqa: F811
    off(on)
    assert on.error(32) < 1e-6
    on.both(changed("in place", -1.5))
    assert on.error(32) < 1e-6
    card.capacity = 64 * MB
    on.acc.configure(EAGER)
    for _ in range(3):
        assert on.error(32) < 0.06
    assert on.plan.resident and away(on) == len(halves(on.ours))
