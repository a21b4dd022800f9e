"""Every stage is made to fail in turn: the original's result is returned, the report says what failed, nothing is tried
for ever, and afterwards plans run again."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from faulty import (
    CPU,
    OOM,
    WITHOUT_TRITON,
    Counting,
    Fault,
    Injected,
    KernelStage,
    Pair,
    PassStage,
    Stage,
    failing,
    python,
)
from fuzz.compare import places
from fuzz.fault_events import spoil
from torch import nn

from sfast_ext import Hooks, environment, passes
from sfast_ext.behaviour import key
from sfast_ext.behaviour.forward_slot import ForwardSlot
from sfast_ext.capture import fake_trace
from sfast_ext.capture.capture import CaptureRefused
from sfast_ext.capture.state import State
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.backend import precompile
from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.group_norm import group_norm
from sfast_ext.kernels.pointwise import geglu, layer_norm
from sfast_ext.plans import payback
from sfast_ext.plans.plan import Plan
from sfast_ext.runtime import plan_builder, plan_finder, plan_maker, plan_runner, verify
from sfast_ext.weights import arena
from sfast_ext.weights.arena import WeightArena

CALLS = 10


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# on the way to a plan; the original forward is asked at each call, until the failures end
DECIDING = {
    "the host's reason to bypass a call": Stage(Hooks, "bypass_reason", "bypass_reason of the host"),
    "the arguments": Stage(plan_finder, "flatten_call", "arguments"),
    "the host's preparation": Stage(Hooks, "prepare", "prepare of the host"),
    "the behaviour key": Stage(key, "fingerprint", "behaviour key"),
    "the host's key": Stage(Hooks, "key", "key of the host"),
    "the weights": Stage(WeightArena, "sync", "weights"),
    "the weights, without memory": Stage(WeightArena, "sync", "weights", OOM),
}
BUILDING = {
    # the second try is that of giving the weights back
    "the index of weights": Stage(WeightArena, "index", "capture", tries=2),
    "the record of a forward": Stage(fake_trace, "make_fx", "cannot be recorded"),
    "the search for state": Stage(State, "put_back", "capture", done=True),
    "the capture": Stage(plan_builder, "capture", "capture"),
    "the capture, refused": Stage(plan_builder, "capture", "injected", CaptureRefused),
    "the choice of kernels": Stage(environment, "triton_runs_on", "choice of kernels"),
    **{
        f"pass {i}, {entry.name}": PassStage(passes, "PASSES", f"pass {entry.name}", number=i)
        for i, entry in enumerate(passes.PASSES)
    },
    "packing": Stage(WeightArena, "pack", "pass packed_linear", done=True),
    "channels-last weights": Stage(WeightArena, "channels_last", "pass channels_last", done=True),
    "the health of kernels": Stage(Kernel, "supported", "pass "),
    "binding": Stage(WeightArena, "bind", "weights"),
    "binding, half done": Stage(WeightArena, "bind", "weights", done=True),
    "a kernel, without memory": KernelStage(attention, "fallback", "first run", OOM),
    "the first run": Stage(Plan, "run_eagerly", "first run"),
    "the check": Stage(verify, "relative_errors", "check"),
    "the timing": Stage(verify, "milliseconds", "timing"),
}
# of a plan that has already run
RUNNING = {
    "a run": Stage(Plan, "run_eagerly", "replay"),
    "a run, without memory": Stage(Plan, "run_eagerly", "replay", OOM, tries=plan_runner.MAX_OUT_OF_MEMORY),
    "the outputs of a run": Stage(Plan, "_copy_outputs", "replay", done=True),
    "the result": Stage(plan_runner, "rebuild_output", "result"),
}
ALL = [
    *(pytest.param("deciding", s, id=name) for name, s in DECIDING.items()),
    *(pytest.param("building", s, id=name) for name, s in BUILDING.items()),
    *(pytest.param("running", s, id=name) for name, s in RUNNING.items()),
]


def broken(pair: Pair, phase: str, stage: Stage, patch: pytest.MonkeyPatch) -> Fault:
    if phase == "running":
        pair.same(2)
        assert pair.runs == 1
    return stage.fail(pair, patch)


# of the passes each fourth
@pytest.mark.long(but=[*range(13), *range(13, 61, 4), *range(61, 99)])
@pytest.mark.parametrize(("phase", "stage"), ALL)
def test_whatever_fails_is_named_the_original_goes_on_and_plans_come_back(phase, stage, monkeypatch):
    pair = Pair()
    captures = Counting(monkeypatch)
    with monkeypatch.context() as patch:
        fault = broken(pair, phase, stage, patch)
        before = pair.runs
        pair.same()
        named = pair.words() if stage.kind is CaptureRefused or stage.home is fake_trace else pair.error()
        assert stage.words in named and "injected" in pair.words()
        pair.same(CALLS - 1)
        assert pair.runs == before
        if phase == "deciding":
            # it costs next to nothing to ask again, and nothing is captured
            assert fault.times == CALLS and captures.times == 0
        else:
            assert 1 <= fault.times <= stage.tries and captures.times <= 1
    if phase != "deciding":
        # what failed is put aside until the settings change
        pair.same(2)
        assert pair.runs == before and captures.times <= 1
        pair.acc.configure(replace(CPU, max_graphs=3))
    pair.plan_runs_again()
    pair.release()


def stage_of_pass(name: str) -> str:
    return next(stage for stage in BUILDING if stage.startswith("pass ") and stage.endswith(f", {name}"))


AMIDST = ["the behaviour key", "the record of a forward", stage_of_pass("channels_last"), stage_of_pass("attention"),
          "packing", "binding, half done", "the check"]  # fmt: skip


@pytest.mark.parametrize(("phase", "stage"), [p for p in ALL if p.id in AMIDST or p.values[0] == "running"])
def test_the_model_can_be_given_back_while_something_fails(phase, stage, monkeypatch):
    pair = Pair()
    broken(pair, phase, stage, monkeypatch)
    pair.same(3)
    pair.release()


# the module whose reference fails, the kernels that compute by it, and the smaller model that has them
KERNELS = {
    "group_norm": (group_norm, {"group_norm"}, "small"),
    "layer_norm": (layer_norm, {"layer_norm", "add_layer_norm"}, "unet"),
    "geglu": (geglu, {"geglu"}, "small"),
    "attention": (attention, {"attention"}, "small"),
}


@pytest.mark.long(but=[1])
@pytest.mark.usefixtures("two_levels")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_fails_costs_that_kernel(name, monkeypatch, kernels_on_the_cpu):
    module, fail, kind = KERNELS[name]
    pair, captures = Pair(kind), Counting(monkeypatch)
    fault = failing(monkeypatch, module, "reference")
    pair.same(CALLS)
    assert pair.runs == CALLS - 1 and captures.times == len(fail) + 1 and fault.times == len(fail)
    assert pair.counter("kernels_disabled") == len(fail) and not pair.counter("errors")
    assert pair.acc.status()["kernels_disabled"] == dict.fromkeys(fail, "Injected: injected")
    assert f"{name} is disabled, and steps run without it: Injected: injected" in pair.words()
    (plan,) = pair.acc.plans.values()
    assert not any(plan.fused[each] for each in fail)
    # nor is it tried for another size
    pair.plan_runs_again(width=16)
    assert fault.times == len(fail)
    pair.release()


@pytest.mark.usefixtures("two_levels")
def test_kernels_that_all_fail_leave_what_pytorch_does(monkeypatch, kernels_on_the_cpu):
    pair, captures = Pair("unet"), Counting(monkeypatch)
    every = set().union(*(fail for _, fail, _ in KERNELS.values()))
    for module, *_ in KERNELS.values():
        failing(monkeypatch, module, "reference")
    pair.same(CALLS)
    assert pair.runs == CALLS - 1 and captures.times == len(every) + 1
    assert pair.acc.status()["kernels_disabled"].keys() == every
    pair.release()


def test_a_dtype_that_triton_does_not_compile_here_costs_no_kernel(monkeypatch, kernels_on_the_cpu):
    pair = Pair()
    monkeypatch.setattr(
        environment, "triton_refusal", lambda device, *dtypes: "not here" if torch.float32 in dtypes else None
    )
    pair.same(CALLS)
    (plan,) = pair.acc.plans.values()
    assert not any(plan.fused[each] for each in ("group_norm", "layer_norm", "geglu"))
    assert pair.acc.status()["kernels_disabled"] == {}
    pair.release()


def test_kernels_that_did_not_compile_are_disabled_together(monkeypatch, kernels_on_the_cpu):
    pair, captures = Pair(), Counting(monkeypatch)
    compiled = {"geglu": "CompilationError: one", "group_norm": "CompilationError: other"}
    monkeypatch.setattr(precompile, "failed", lambda device: compiled)
    failing(monkeypatch, group_norm, "reference")
    pair.same(CALLS)
    assert pair.runs == CALLS - 1 and captures.times == 2
    assert pair.acc.status()["kernels_disabled"] == {**compiled, "group_norm": "Injected: injected"}
    pair.release()


def test_a_kernel_that_fails_in_a_later_run_costs_that_kernel_too(monkeypatch, kernels_on_the_cpu):
    pair = Pair()
    pair.same(3)
    assert pair.runs == 2
    failing(monkeypatch, geglu, "reference")
    pair.same(CALLS)
    # of these the first went to the original, the second built a plan anew
    assert pair.runs == 2 + CALLS - 2 and pair.counter("errors") == 1
    assert pair.acc.status()["kernels_disabled"] == {"geglu": "Injected: injected"}
    pair.release()


@pytest.mark.long
def test_a_real_unet_goes_on_too(monkeypatch):
    pair = Pair("unet")
    with monkeypatch.context() as patch:
        broken(pair, "running", RUNNING["a run"], patch)
        pair.same(3)
    pair.acc.configure(replace(CPU, max_graphs=3))
    pair.plan_runs_again()
    pair.release()


def test_another_size_is_tried_although_one_was_given_up(monkeypatch):
    pair = Pair()
    with monkeypatch.context() as patch:
        failing(patch, plan_maker, "run_passes")
        pair.same(2)
    pair.plan_runs_again(2, width=16)
    before = pair.runs
    pair.same(2)
    assert pair.runs == before
    pair.release()
    # and so is the first if the accelerator is put on anew
    pair.acc.install()
    pair.plan_runs_again()


def test_weights_of_which_half_were_taken_up_are_taken_up_at_the_next_call(monkeypatch):
    pair = Pair()
    pair.same(2)
    honest = arena.copy_in

    def half(tracked, stale):
        monkeypatch.setattr(arena, "copy_in", honest)
        honest(tracked, stale[: len(stale) // 2])
        raise Injected("injected")

    monkeypatch.setattr(arena, "copy_in", half)
    state = Pair().twin.state_dict()
    for i, name in enumerate(state):
        state[name] = state[name] * (1 + i % 3)
    pair.both(lambda net: net.load_state_dict(state, assign=True))
    pair.held = places(pair.ours)
    pair.same()
    assert "injected" in pair.words()
    pair.plan_runs_again(1)
    pair.release()


def test_a_host_that_fails_to_vouch_for_a_patch_leaves_no_plan_of_before_the_patch():
    faults: list[Exception] = []

    def vouches(*_):
        if faults:
            raise faults.pop()
        return True

    pair = Pair(hooks=Hooks(recognised=vouches))
    pair.same(2)
    faults.append(Injected("injected"))
    pair.both(louder)
    pair.same(width=16)
    assert not faults
    pair.same(2)
    pair.plan_runs_again(1)


def test_a_plan_is_not_given_up_because_the_key_could_not_be_read():
    faults: list[Exception] = []
    pair = Pair(hooks=Hooks(recognised=lambda *_: True))
    pair.same(2)

    def vouches(*_):
        if faults:
            raise faults.pop()
        return True

    pair.acc.hooks.recognised = pair.acc._finder.keys._recognised = vouches
    faults.append(Injected("injected"))
    pair.both(louder)
    pair.same()
    pair.both(lambda net: net.conv_in.__dict__.pop("forward"))
    before = pair.runs
    pair.same(2)
    assert pair.runs == before + 2 and pair.counter("captures") == 1


def louder(net: nn.Module) -> None:
    forward = net.conv_in.forward
    net.conv_in.forward = lambda x: forward(x) * 2


@pytest.mark.parametrize(
    ("home", "name", "done"),
    [(Plan, "close", False), (Plan, "close", True), (WeightArena, "unbind", True), (Plan, "drop_graph", False)],
)
def test_a_plan_that_cannot_be_given_up_ends_no_generation(home, name, done, monkeypatch):
    pair = Pair(config=replace(CPU, max_plans=1))
    pair.same(2)
    with monkeypatch.context() as patch:
        fault = failing(patch, home, name, done=done)
        pair.same(2, width=16)
        failing(patch, Plan, "run_eagerly")
        pair.same(2)
        pair.same(2, width=16)
        pair.both(lambda net: net.conv_in.double())
        pair.both(lambda net: net.conv_in.float())
        pair.same(2)
        assert fault.times
    pair.acc.configure(replace(CPU, max_graphs=3))
    pair.plan_runs_again(3)
    pair.release()


@pytest.mark.parametrize(
    ("home", "name", "done"), [(Plan, "close", False), (WeightArena, "unbind", False), (ForwardSlot, "release", True)]
)
def test_a_release_that_raises_gives_everything_back_all_the_same(home, name, done, monkeypatch):
    pair = Pair()
    pair.same(2)
    pair.same(2, width=16)
    with monkeypatch.context() as patch:
        failing(patch, home, name, done=done)
        with pytest.raises(Injected):
            pair.acc.release()
    pair.untouched()
    assert not pair.acc.plans


class Speechless(Exception):
    """One that cannot be put in words."""

    def __str__(self) -> str:
        raise Injected("no words")


@pytest.mark.parametrize("how", ["a filter of the log", "an exception without words"])
@pytest.mark.parametrize("phase", ["building", "running"])
def test_a_report_that_cannot_be_made_ends_no_generation(phase, how, monkeypatch):
    pair = Pair()
    monkeypatch.setattr(logging.getLogger("sfast_ext"), "level", logging.DEBUG)
    if phase == "running":
        pair.same(2)
    with monkeypatch.context() as patch:
        if how == "a filter of the log":
            patch.setattr(logging.getLogger("sfast_ext"), "filters", [Fault(None, Injected, False)])
        kind = Injected if how == "a filter of the log" else Speechless
        home, name = (Plan, "run_eagerly") if phase == "running" else (WeightArena, "index")
        failing(patch, home, name, kind)
        pair.same(3)
    pair.acc.configure(replace(CPU, max_graphs=3))
    pair.plan_runs_again()
    pair.release()


def test_what_fails_at_every_call_is_said_once(monkeypatch, caplog):
    pair = Pair()
    failing(monkeypatch, plan_finder, "flatten_call")
    with caplog.at_level(logging.INFO, "sfast_ext"):
        pair.same(CALLS)
    assert pair.counter("errors") == CALLS and len(caplog.records) == 1
    assert len(pair.acc.report.as_dict()["events"]) == 1


def test_weights_that_change_their_dtype_at_every_call_end_the_capturing():
    pair = Pair()
    for i in range(2 * CALLS):
        dtype = (torch.float64, torch.float32)[i % 2]
        pair.both(partial(convert, dtype=dtype))
        pair.same(2, dtype=dtype)
    # of each signature, of which there were so many calls
    assert pair.counter("captures") <= 2 * (payback.MAX_UNUSED_CAPTURES + math.log2(2 * CALLS))


def convert(net: nn.Module, dtype: torch.dtype) -> None:
    net.to(dtype)
    net.table = net.table.to(dtype)


def test_after_several_behaviours_that_failed_a_change_of_the_settings_helps_too(monkeypatch):
    pair = Pair()
    with monkeypatch.context() as patch:
        failing(patch, plan_builder, "capture")
        for i in range(payback.MAX_UNUSED_CAPTURES + 2):
            pair.both(partial(nn.Module.__setattr__, name="s1", value=1 + i / 10))
            pair.same(2)
    pair.acc.configure(replace(CPU, max_graphs=3))
    pair.plan_runs_again()


@pytest.mark.parametrize("stage", [BUILDING[stage_of_pass("attention")], BUILDING["the check"]], ids=["pass", "check"])
def test_where_no_plan_comes_of_it_the_weights_lie_as_before(stage, monkeypatch):
    pair = Pair()
    stage.fail(pair, monkeypatch)
    pair.same()
    assert pair.laid_out_alike() and pair.acc.arena.status()["packed_tensors"] == 0
    pair.same(2)


def wrong(graph_module, context, real=plan_maker.run_passes):
    counts = real(graph_module, context)
    spoil(graph_module.graph)
    return counts


def test_a_wrong_plan_built_while_the_model_gives_nan_is_found_out(monkeypatch):
    monkeypatch.setattr(plan_maker, "run_passes", wrong)
    pair = Pair()
    pair.same(2, change=lambda sample: sample * float("nan"))
    pair.same(3)
    assert "differs from the original" in pair.words() and pair.counter("captures") == 1


def test_a_model_that_gives_nan_gives_nan_and_nothing_is_tried_for_ever():
    pair = Pair()
    pair.same(CALLS, change=lambda sample: sample * float("nan"))
    assert pair.counter("captures") == 1 and not pair.counter("errors")
    pair.plan_runs_again(3)
    pair.release()


def test_a_plan_that_gives_nan_if_the_model_does_not_is_given_up(monkeypatch):
    real = Plan.run_eagerly
    monkeypatch.setattr(Plan, "run_eagerly", lambda plan, leaves: [o * float("nan") for o in real(plan, leaves)])
    pair = Pair()
    pair.same(CALLS)
    assert "differs from the original by inf" in pair.words() and pair.counter("captures") == 1
    pair.release()


@pytest.mark.long
def test_without_triton_plans_run_and_the_doctor_says_why():
    found = python(WITHOUT_TRITON)
    assert found["triton_error"].startswith("ModuleNotFoundError") and "triton" in found["triton_error"]
