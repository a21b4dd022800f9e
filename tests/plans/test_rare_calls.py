"""Plans of modules that are called about once for each image."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import vaes
from sfast_ext import Config, accelerate, environment
from sfast_ext.behaviour.key import BehaviourKeys
from sfast_ext.hooks import Hooks
from sfast_ext.kernels.backend import graph_memory
from sfast_ext.plans import payback
from sfast_ext.plans.payback import RareCalls
from sfast_ext.runtime import plan_runner, verify
from sfast_ext.runtime.plan_builder import PlanBuilder
from sfast_ext.timing import Stopwatch
from sfast_ext.tools.lib import models
from sfast_ext.weights.gate import gate_of

CONFIG = Config(allow_cpu=True, cuda_graphs=False, rare_calls=True, rare_gain=math.inf)


class Counted:
    """An accelerated decoder beside an untouched twin; counts runs of the original."""

    def __init__(self, config: Config = CONFIG, hooks: Hooks | None = None) -> None:
        vae = vaes.random_vae("tiny-sd")
        self.module, self.twin = vae.decoder, models.copied(vae.decoder)
        self.accelerator = accelerate(self.module, config, hooks=hooks)
        self.originals = 0
        original = self.accelerator._context.run_forward
        self.accelerator._context.run_forward = self._count(original)  # type: ignore[method-assign]

    def _count(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.originals += 1
            return original(*args, **kwargs)

        return run

    @torch.no_grad()
    def call(self, width: int = 64) -> int:
        """Runs of the original in a call, whose result is right."""
        x, before = vaes.part_input("decoder", width, 64), self.originals
        torch.testing.assert_close(self.module(x), self.twin(x), rtol=1e-4, atol=1e-4)
        return self.originals - before

    def count(self, name: str) -> int:
        return self.accelerator.report.counter(name)


def test_the_second_call_makes_a_plan_and_no_call_runs_the_original_twice():
    ours = Counted()
    assert ours.call() == 1 and ours.count("captures") == 0
    assert ours.call() == 1 and ours.count("captures") == 1
    (plan,) = ours.accelerator.plans.values()
    assert plan.error is not None and plan.error < 1e-4
    assert plan.ms_before is not None and plan.ms_after is None
    assert ours.call() == 0 and ours.count("eager_runs") == 1
    # the first image that it decodes times it
    assert plan.ms_after is not None
    first = plan.ms_after
    assert ours.call() == 0 and plan.ms_after == first


def test_other_calls_make_a_plan_at_once():
    ours = Counted(Config(allow_cpu=True, cuda_graphs=False))
    ours.call()
    assert ours.count("captures") == 1


def test_a_plan_says_what_its_values_need_at_one_time():
    ours, often = Counted(), Counted(Config(allow_cpu=True, cuda_graphs=False))
    for each in (ours, ours, often):
        each.call()
    (plan,), (other,) = ours.accelerator.plans.values(), often.accelerator.plans.values()
    # two images of the last level at least, and not all of its values
    image = 4 * 16 * 64 * 64
    assert plan.peak_bytes is not None and 2 * image <= plan.peak_bytes <= 6 * image
    assert other.peak_bytes is None


@pytest.mark.parametrize("key", [None, lambda: ("scales", 1.0)])
def test_until_a_plan_pays_the_behaviour_is_not_read(monkeypatch: pytest.MonkeyPatch, key: Any):

    ours, reads = Counted(replace(CONFIG, rare_gain=0.5), Hooks(key=key)), list[int]()
    read = BehaviourKeys.read
    monkeypatch.setattr(BehaviourKeys, "read", lambda keys: [reads.append(1), read(keys)][1])
    # of one key: all calls are counted by the same
    monkeypatch.setattr(payback.Runs, "spent", lambda runs: math.inf if len(runs.pending) >= 4 else 0.0)
    for _ in range(4):
        ours.accelerator.new_generation()
        assert ours.call() == 1
    # the first call has read it
    assert len(reads) == 1 and ours.count("captures") == 0
    ours.accelerator.new_generation()
    assert ours.call() == 1 and ours.count("captures") == 1 and len(reads) > 1
    ours.accelerator.new_generation()
    assert ours.call() == 0


def test_calls_count_whose_key_has_what_is_prepared_in_it(monkeypatch: pytest.MonkeyPatch):
    prepared = list[int]()
    hooks = Hooks(key=lambda: tuple(prepared), prepare=lambda: prepared.append(1) if not prepared else None)
    ours = Counted(replace(CONFIG, rare_gain=0.5), hooks)
    monkeypatch.setattr(payback.Runs, "spent", lambda runs: math.inf if len(runs.pending) > 1 else 0.0)
    for prepares in (0, 0, 1, 1):
        # as the layers of AUTOMATIC1111's Lora, which are read anew for each image
        prepared.clear()
        ours.accelerator.new_generation()
        ours.call()
        assert ours.count("captures") == prepares


def test_another_behaviour_waits_for_its_own_second_call_whatever_the_host_adds_to_the_key():
    seamless = [False]
    ours = Counted(hooks=Hooks(key=lambda: seamless[0]))

    def calls(times: int) -> list[int]:
        found = []
        for _ in range(times):
            ours.accelerator.new_generation()
            found.append(ours.call())
        return found

    assert calls(3) == [1, 1, 0]
    # what the host says changes with an attribute of layers
    seamless[0] = True
    for layer in (*ours.module.modules(), *ours.twin.modules()):
        if type(layer) is torch.nn.Conv2d:
            layer.padding_mode = "circular"
    assert calls(3) == [1, 1, 0] and ours.count("captures") == 2


def test_each_size_waits_for_its_own_second_call():
    ours = Counted()
    for width in (64, 48, 64, 48):
        ours.call(width)
    assert ours.count("captures") == 2 and len(ours.accelerator.plans) == 2


def test_one_plan_in_a_generation():
    # tiles of several sizes in one image
    ours = Counted()
    ours.accelerator.new_generation()
    for width in (64, 48, 40, 64, 48, 40, 64, 48, 40):
        ours.call(width)
    assert ours.count("captures") == 1
    ours.accelerator.new_generation()
    for width in (64, 48, 40):
        ours.call(width)
    assert ours.count("captures") == 2


class Timed:
    """A stopwatch of a run that took so long, or has not ended."""

    def __init__(self, ms: float | None) -> None:
        self.ms = ms

    def elapsed(self) -> float | None:
        return self.ms


def until_a_plan(calls: RareCalls, ms: float, gain: float = 0.5, key: str = "a") -> int:
    """How many runs of the original come before a plan is made."""
    for runs in range(1000):
        if calls.take(key, gain):
            return runs
        calls.ran(key, Timed(ms))
    return 1000


def test_a_plan_is_made_once_it_would_have_saved_what_it_costs():
    calls = RareCalls()
    assert until_a_plan(calls, ms=300) == Config.rare_build_ms / 150
    calls.built(450)
    assert until_a_plan(calls, ms=300, key="b") == 3
    assert until_a_plan(calls, ms=300, gain=0.25, key="c") == 6
    # one that was evicted pays again
    assert until_a_plan(calls, ms=300, key="b") == 3


def test_no_plan_is_made_at_the_first_call_whatever_it_would_save():
    calls = RareCalls()
    calls.built(0)
    assert until_a_plan(calls, ms=1000) == 1
    assert until_a_plan(RareCalls(), ms=0, gain=math.inf) == 1


def test_a_run_counts_when_it_has_ended():
    calls, running = RareCalls(), Timed(None)
    calls.built(100)
    assert not calls.take("a", 0.5)
    for watch in (running, Timed(150.0)):
        calls.ran("a", watch)
        assert not calls.take("a", 0.5)
    running.ms = 200.0
    assert calls.take("a", 0.5)


def test_the_first_run_which_loads_what_others_find_says_nothing_of_them():
    for cold in (100.0, 3000.0, 90_000.0):
        calls = RareCalls()
        calls.ran("a", Timed(cold))
        assert not calls.take("a", 0.5, 500.0)
        assert until_a_plan(calls, ms=10.0, gain=0.5) == 2 * Config.rare_build_ms / 10 - 1


def test_calls_that_cost_little_get_no_plan_and_their_time_is_that_of_the_original():
    ours = Counted(Config(allow_cpu=True, cuda_graphs=False, rare_calls=True))
    for _ in range(4):
        assert ours.call() == 1
    assert ours.count("captures") == 0
    (runs,) = ours.accelerator._server._rare._runs.values()
    assert 0 < runs.fastest < Config.rare_build_ms and runs.ended == 3 and len(runs.pending) == 1
    # as if the original had run more often
    runs.ended = int(4 * Config.rare_build_ms / runs.fastest)
    assert ours.call() == 1 and ours.count("captures") == 1
    assert ours.accelerator._server._rare._build_ms != Config.rare_build_ms
    assert ours.call() == 0


def test_what_was_seen_is_bounded():
    calls = RareCalls()
    for key in range(1000):
        assert not calls.take(key, math.inf)
        calls.ran(key, Timed(1))
    assert len(calls._runs) <= 256 and calls.take(999, math.inf)


def test_a_generation_counts_only_if_generations_are_told():
    calls = RareCalls()
    found = []
    for key in "aabb":
        found.append(calls.take(key, math.inf))
        calls.ran(key, Timed(1))
    assert found == [False, True, False, True]
    calls.new_generation()
    assert [calls.take(key, math.inf) for key in "ab"] == [True, False]


def test_a_gain_must_be_positive():
    with pytest.raises(ValueError, match="rare_gain must be a number above 0"):
        Config(rare_gain=0)


def test_a_plan_whose_first_use_is_slower_is_dropped(monkeypatch):
    ours = Counted()
    ours.call()
    ours.call()
    (plan,) = ours.accelerator.plans.values()
    # as on a GPU, where both are timed alike
    monkeypatch.setattr(plan, "ms_before", 1e-6)
    monkeypatch.setattr(plan_runner.PlanRunner, "_on_gpu", staticmethod(lambda plan: True))
    assert ours.call() == 0 and not ours.accelerator.plans
    assert ours.call() == 1
    assert any("slower" in reason for reason in ours.accelerator.report.as_dict()["reasons"])


@pytest.mark.parametrize(("after", "dropped"), [(10.0, False), (10.9, False), (11.1, True)])
def test_noise_of_one_measurement_is_allowed_for(after, dropped):
    ours = Counted()
    ours.call()
    ours.call()
    (plan,) = ours.accelerator.plans.values()
    plan.ms_before, plan.ms_after = 10.0, after
    assert (verify.too_slow(plan, CONFIG, verify.NOISE_OF_ONE) is not None) == dropped
    kept = Config(allow_cpu=True, drop_slower=False)
    assert verify.too_slow(plan, kept, verify.NOISE_OF_ONE) is None


def test_the_setting_changes_what_is_built():
    assert not Config(rare_calls=True).builds_like(Config())
    assert Config(max_graphs=3).builds_like(Config())


def test_a_stopwatch_on_a_cpu_times_what_lies_between():
    watch = Stopwatch(torch.device("cpu"))
    watch.stop()
    assert 0 <= watch.milliseconds() < 1000


def test_no_run_is_recorded_in_place_of_a_capture(monkeypatch):
    # a recorded run would be timed as the original's
    monkeypatch.setattr(PlanBuilder, "live_trace", lambda *args: pytest.fail("recorded"))
    ours = Counted()
    for width in (64, 64, 48, 48):
        ours.call(width)
    assert ours.count("captures") == 2


def test_one_plan_is_built_at_a_time_whatever_the_model():
    # torch's stack of modes is one for all threads
    ours, other = Counted(Config(allow_cpu=True, cuda_graphs=False)), Counted(Config(allow_cpu=True))
    with other.accelerator._model.build_lock:
        assert ours.call() == 1 and ours.count("captures") == 0
    assert ours.call() == 1 and ours.count("captures") == 1


def test_what_a_first_plan_costs_is_that_of_the_kind_of_network_until_one_was_made():
    for price in (150.0, 500.0, 3000.0):
        calls = RareCalls()
        calls.ran("a", Timed(100))
        count = 1
        while not calls.is_due("a", 0.5, price):
            calls.ran("a", Timed(100))
            count += 1
        assert count == price / 50
        calls.built(1000)
        calls.ran("b", Timed(100))
        assert not calls.is_due("b", 0.5, price)
        for _ in range(19):
            calls.ran("b", Timed(100))
        assert calls.is_due("b", 0.5, price)
    with pytest.raises(ValueError, match="rare_build_ms must be a number above 0"):
        Config(rare_build_ms=0)


@pytest.mark.parametrize("gain", [math.inf, 0.5, 0.9])
def test_a_plan_that_another_thread_s_build_delays_is_made_in_the_same_generation(gain):
    ours = Counted(replace(CONFIG, rare_gain=0.5))
    ours.accelerator.new_generation()
    ours.call()
    (runs,) = ours.accelerator._server._rare._runs.values()
    runs.ended = 10**9
    with ours.accelerator._model.build_lock:
        for _ in range(3):
            assert ours.call() == 1 and ours.count("captures") == 0
    assert ours.call() == 1 and ours.count("captures") == 1


@contextlib.contextmanager
def original_runs_elsewhere(module: Any) -> Iterator[None]:
    """Within, another thread is inside the module's original forward."""
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with gate_of(module):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(20)
    try:
        yield
    finally:
        leave.set()
        thread.join()


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("times", [1, 2, 3, 9])
def test_a_plan_that_another_thread_s_run_delays_is_made_once_it_has_ended(times):
    ours = Counted()
    ours.accelerator.new_generation()
    ours.call()
    with original_runs_elsewhere(ours.module):
        for _ in range(times):
            assert ours.call() == 1
    assert ours.count("captures") == 0 and ours.count("errors") == 0
    assert ours.call() == 1 and ours.count("captures") == 1
    assert not any("too often" in reason for reason in ours.accelerator.report.as_dict()["reasons"])


def test_a_plan_that_another_thread_made_meanwhile_is_not_made_again(monkeypatch):
    ours = Counted(Config(allow_cpu=True, cuda_graphs=False))
    server = ours.accelerator._server
    found = server._finder.find
    seen = []

    def late(args: Any, kwargs: Any, **options: Any) -> Any:
        """As if another thread had served the same call between the look-up and the lock."""
        lookup = found(args, kwargs, **options)
        if not seen:
            seen.append(lookup)
            ours.call()
        return lookup

    monkeypatch.setattr(server._finder, "find", late)
    ours.call()
    assert seen[0].plan is None and ours.count("captures") == 1 and len(ours.accelerator.plans) == 1
    assert ours.call() == 0


def test_what_was_taken_and_given_back_is_due_as_before():
    calls = RareCalls()
    calls.built(100)
    calls.new_generation()
    for key in "aabb":
        calls.ran(key, Timed(150))
    assert calls.take("a", 0.5) and not calls.take("b", 0.5) and not calls.is_due("a", 0.5)
    calls.give_back()
    assert calls.is_due("a", 0.5) and calls.is_due("b", 0.5)
    calls.give_back()
    assert calls.take("b", 0.5)
    calls.new_generation()
    # that of another kind stays taken
    assert calls.take("a", 0.5) and not calls.take("b", 0.5)


def test_of_many_threads_one_takes():
    calls, start, taken = RareCalls(), threading.Barrier(8), []
    calls.new_generation()
    for key in range(8):
        calls.ran(key, Timed(1))

    def take(key: int) -> None:
        start.wait()
        if calls.take(key, math.inf):
            taken.append(key)

    threads = [threading.Thread(target=take, args=(key,)) for key in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(taken) == 1


@pytest.mark.parametrize(("gigabytes", "rare"), [(8, True), (12, True), (8, False)])
def test_on_a_small_card_a_plan_gives_cached_memory_back(monkeypatch, gigabytes, rare):
    monkeypatch.setattr(environment, "gpu_memory", lambda device=None: gigabytes << 30)
    monkeypatch.setattr(graph_memory, "LARGE", 1)
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(1))
    ours = Counted(replace(CONFIG, rare_calls=rare))
    ours.call()
    ours.call()
    given.clear()
    assert ours.call() == 0
    assert bool(given) == (gigabytes == 8 and rare)
