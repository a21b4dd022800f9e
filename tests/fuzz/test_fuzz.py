"""Random sequences of events; `make soak EVENTS=n` plays more of them. A failure names what led to it, made short, and
the command that plays it again."""

from __future__ import annotations

import json
import logging
import os

import eight_bit_kernels
import hypothesis
import pytest
import torch
from hypothesis import Phase, strategies
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from pretended_card import pretended_card

from fuzz import __main__ as soak
from fuzz import ground, machine, own_products, state_events
from fuzz.compare import Wrong
from fuzz.world import World
from sfast_ext.behaviour import reader, surroundings
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.behaviour.snapshot import Snapshot
from sfast_ext.kernels.backend import choices, health
from sfast_ext.kernels.eight_bits import quantise_weights

# an event that is listed more often comes more often
LISTED = machine.listed(machine.EVENTS)
MODELS, EVENTS = (3, 30) if os.environ.get("SFAST_ALL_CASES") else (2, 20)  # `make soak` plays more


@pytest.fixture(autouse=True)
def quiet():
    # failures made on purpose, thousands of them; pytest would keep what they log, and torch's own traces
    logging.disable(logging.CRITICAL)
    logger = logging.getLogger("sfast_ext")
    level = logger.level  # which a soak sets
    yield
    logger.setLevel(level)
    logging.disable(logging.NOTSET)


def state_machine(first: int, played: list[str]) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World("small", first)

        @rule(name=strategies.sampled_from(LISTED), seed=strategies.integers(0, 2**16))
        def event(self, name: str, seed: int) -> None:
            played.append(name)
            machine.play(self.world, name, seed)

        def teardown(self) -> None:
            machine.finish(self.world)

    return Machine


# two of them: as many as there are workers
@pytest.mark.long(but=[0])
@pytest.mark.parametrize("seed", range(2))
def test_after_each_event_the_model_computes_what_its_twin_does(seed):
    played: list[str] = []
    settings = hypothesis.settings(
        max_examples=MODELS, stateful_step_count=EVENTS, deadline=None, derandomize=False, database=None,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    # the seed makes each run the same, and each of them different
    hypothesis.seed(seed)(cls := state_machine(seed, played))
    run_state_machine_as_test(cls, settings=settings)
    assert len(played) >= MODELS * EVENTS


def test_weights_of_two_devices(monkeypatch):
    with pretended_card(monkeypatch, 1 << 28) as card:
        w = machine.run("small", 0, machine.sequence(0, 40, machine.ground.PRETENDED), machine.ground.PRETENDED)
    assert w.plan_runs > 20 and w.counter("memory_given_back") > 0 and not card.faults


def test_events_on_a_real_unet():
    w = machine.run("unet", 1, machine.sequence(1, 8, machine.ground.CPU))
    assert w.plan_runs > 2


def test_events_on_a_transformer():
    w = machine.run("transformer", 2, machine.sequence(2, 30, machine.ground.CPU, "transformer"))
    assert w.plan_runs > 10


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("part", range(2))
def test_a_release_after_each_kind_of_event_leaves_an_untouched_model(part):
    w = World("small", 100 + part)
    for i, name in enumerate(machine.EVENTS):
        if i % 2 == part:
            machine.play(w, "calm", i)
            runs = w.plan_runs
            machine.play(w, name.__name__, i)
            assert runs, "no plan was there to be released"
            machine.play(w, "released", i)
    machine.finish(w)


def test_the_kernels_of_a_card_wherever_they_can_be(tmp_path):
    file = tmp_path / "soak.json"
    command = ["--events", "40", "--seed", "3", "--model", "wide", "--as", "sm_89", "--json", str(file)]
    assert soak.main(command) == 0
    result = json.loads(file.read_text())
    assert result["as"] == "sm_89" and result["plan_runs"] > 10
    device, known = torch.device("cpu"), choices.Memory(None, {})
    chooser = choices.Choices("linear", lambda run: 1.0, lambda: True, lambda _: known)
    own, ours = torch.zeros(1), {"mma 64x80": lambda: torch.ones(1), "mma 128x80": lambda: torch.full((1,), 2.0)}
    with own_products.everywhere((8, 9)) as chosen:
        found = {float(chooser.run(device, f"{n}x32x32", lambda: own, ours)) for n in range(8)}
        assert float(chooser.run(device, "alone", lambda: own, {})) == 0
    assert found == {1, 2} and chosen.total() == 9 and chosen["linear: torch"] == 1


def test_weights_in_8_bits_are_those_of_the_twin(tmp_path):
    file = tmp_path / "soak.json"
    command = ["--events", "40", "--seed", "3", "--model", "tokens", "--eight-bits", "--json", str(file)]
    assert soak.main(command) == 0
    result = json.loads(file.read_text())
    assert result["eight_bits"] > 30 and not result["faults"]


def test_rows_that_are_quantised_once_and_never_again_are_found(monkeypatch):
    real = quantise_weights.digest_of_rows
    eight_bit_kernels.available(monkeypatch)
    monkeypatch.setattr(quantise_weights, "digest_of_rows", lambda *given: torch.ones_like(real(*given)))
    w = World("tokens", 5, ground.with_eight_bits(ground.CPU))
    machine.play(w, "another_call", 0)
    try:
        with pytest.raises(Wrong, match="are stale"):
            w.both(lambda m: m.blocks[0].ff.weight.mul_(1.01))
            w.check()
    finally:
        w.undo()


def test_the_soak_names_the_command_that_plays_a_failure_again(tmp_path, monkeypatch, capsys):
    def forgetful(w, rng):
        # the twin alone
        w.twin.conv_in.weight.data.mul_(2)

    file = tmp_path / "soak.json"
    assert soak.main(["--events", "40", "--seed", "3", "--model", "small", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert sum(result["events_by_kind"].values()) == result["events"] == 40
    assert result["plan_runs"] > 10 and result["seeds"] == {"first": 3, "last": 3} and not result["faults"]
    monkeypatch.setitem(machine.BY_NAME, "mode", forgetful)
    command = ["--play", "small:7", "another_call:1", "mode:2", "another_call:3"]
    assert soak.main(command) == 1
    said = capsys.readouterr().out
    assert "small:7 another_call:1 mode:2" in said and "another_call:3" not in said


def test_an_attention_that_a_plan_does_not_follow_is_found(monkeypatch):
    monkeypatch.setattr(BehaviourKeys, "read", lambda keys: (0, None))
    monkeypatch.setattr(BehaviourKeys, "current", lambda keys: (0, None))
    w = World("small", 5)
    machine.play(w, "another_call", 0)
    try:
        with pytest.raises(Wrong, match="the result differs"):
            for seed in range(4):
                machine.play(w, "attention_switched", seed)
    finally:
        w.undo()


def raising(w, text: str = "no such size", *, of_ours: Exception | None = None):
    """Forwards that raise from now on; `of_ours` is what the accelerated model raises instead."""

    def put(m):
        def raises(*args, **kwargs):
            raise of_ours if of_ours is not None and m is w.subject.conv_in else ValueError(text)

        m.forward = raises

    for model in (w.subject, w.twin):
        put(model.conv_in)


def test_an_original_that_raises_is_no_fault_of_a_model_that_raises_the_same():
    w = World("small", 4)
    machine.play(w, "another_call", 0)
    runs, calls = w.plan_runs, w.calls
    raising(w)
    machine.play(w, "another_call", 1)
    assert w.raised == w.calls - calls >= 2 and w.plan_runs == runs
    # the calls before were compared
    w.calls += 100
    for model in (w.subject, w.twin):
        del model.conv_in.forward
    machine.play(w, "another_call", 2)
    assert w.plan_runs > runs
    machine.finish(w)


@pytest.mark.parametrize("of_ours", [ValueError("another text"), TypeError("no such size"), KeyError("sample")])
def test_a_model_that_raises_something_else_is_found(of_ours):
    w = World("small", 4)
    raising(w, of_ours=of_ours)
    with pytest.raises(Wrong, match="the original gives ValueError"):
        machine.play(w, "another_call", 0)
    w.undo()


def test_a_model_that_raises_alone_is_found(monkeypatch):
    w = World("small", 4)
    ours, theirs = w.call_both()
    for one, other in ((ValueError("no such size"), theirs), (ours, ValueError("no such size"))):
        monkeypatch.setattr(w, "call_both", lambda one=one, other=other: (one, other))
        with pytest.raises(Wrong, match="no such size"):
            machine.play(w, "another_call", 0)
    w.undo()


def test_events_whose_calls_mostly_raise_test_nothing(monkeypatch, tmp_path):
    w = World("small", 4)
    raising(w)
    machine.play(w, "another_call", 0)
    with pytest.raises(Wrong, match="this tests nothing"):
        machine.finish(w)

    def none_fits(w, rng):
        raising(w)

    def all_fit(w, rng):
        for model in (w.subject, w.twin):
            del model.conv_in.forward

    monkeypatch.setitem(machine.BY_NAME, "mode", none_fits)
    monkeypatch.setitem(machine.BY_NAME, "switched", all_fit)
    file = tmp_path / "soak.json"
    events = [*["another_call:1"] * 4, "mode:2", "another_call:3", "switched:4"]
    assert soak.main(["--json", str(file), "--play", "small:7", *events]) == 1
    result = json.loads(file.read_text())
    (fault,) = result["faults"]
    assert "this tests nothing" in fault and 0 < result["raised"] < result["calls"] / 2


@pytest.mark.parametrize("state", ["no inference mode", None])
@pytest.mark.parametrize("mode", ["no_grad", "inference", "autocast", "gradients"])
def test_weights_are_merged_under_inference_mode_only_if_calls_bear_it(mode, state):
    w = World("small", 2)
    w.mode = mode
    if state is not None:
        w.states[state] = lambda: state_events.STATES[state](1.0)
    before = dict(w.twin.named_parameters())
    machine.play(w, "merged_under_inference_mode", 3572734190)
    merged = any(p is not before[name] for name, p in w.twin.named_parameters())
    assert merged == (state is None and mode != "gradients") and not w.raised
    machine.finish(w)


STOCK = surroundings.look()
UNSEEN = {
    "function_of_torch_replaced": (surroundings, "look", lambda: STOCK),
    "hook_on_all": (surroundings, "look", lambda: STOCK),
    "class_forward": (reader, "foreign_layers", lambda *class_of_anybody, **options: []),
    "attribute": (Snapshot, "unchanged_quick", lambda snapshot: True),
}


@pytest.mark.parametrize("event", UNSEEN)
def test_what_is_not_looked_at_is_found(event, monkeypatch):
    home, name, blind = UNSEEN[event]
    monkeypatch.setattr(home, name, blind)
    w = World("small", 8)
    w.ticks = True
    machine.play(w, "calm", 0)
    try:
        with pytest.raises(Wrong, match="the result differs"):
            for seed in range(60):
                machine.play(w, event, seed)
    finally:
        w.undo()


def test_a_kernel_that_fails_and_is_not_disabled_is_found(monkeypatch):
    monkeypatch.setattr(health, "disable", lambda *names: False)
    w = World("small", 6)
    machine.play(w, "triton_switched", 0)
    try:
        with pytest.raises(Wrong, match="an error of ours"):
            for seed in range(20):
                machine.play(w, "kernel_fails", seed)
    finally:
        w.undo()


def test_kernels_fail_and_triton_comes_and_goes():
    w = World("small", 7)
    fused = lambda name: [plan.fused[name] for plan in w.acc.plans.values()]
    machine.play(w, "another_call", 0)
    assert not any(fused("group_norm"))
    _until(w, "triton_switched", lambda: all(fused("group_norm")))
    _until(w, "kernel_fails", lambda: "group_norm" in health.disabled(w.ground.device))
    assert not any(fused("group_norm")) and w.counter("kernels_disabled")
    machine.play(w, "calm", 0)
    assert not health.disabled(w.ground.device)
    machine.finish(w)


def _until(w, name, there):
    for seed in range(100):
        machine.play(w, name, seed)
        if there():
            return
    raise AssertionError(f"{name} has done nothing in 100 times")


@pytest.mark.parametrize(("runs", "read", "told"), [(99, 0, False), (100, 1, False), (100, 0, True)])
def test_a_soak_in_8_bits_without_any_fails(runs, read, told):
    played = soak.Soak(ground.with_eight_bits(ground.CPU))
    played.counters.update(plan_runs=runs, eight_bits=read)
    assert (played.without_eight_bits() is not None) == told
    in_half_precision = soak.Soak(ground.CPU)
    in_half_precision.counters.update(plan_runs=runs)
    assert in_half_precision.without_eight_bits() is None
