"""Weights are laid out only while no other thread computes with them."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.weights import arena
from sfast_ext.weights.gate import Gate, gate_of
from sfast_ext.weights.weight import WeightsChanged, WeightsInUse

# of a thread that ought to end
SOON = 20


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Elsewhere:
    """Another thread, held between `with` and its end within what it does."""

    def __init__(self, run):
        self.inside, self.go = threading.Event(), threading.Event()
        self.result = None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)

    def _run(self, run):
        with torch.no_grad():
            self.result = run(self)

    def hold(self):
        self.inside.set()
        assert self.go.wait(SOON)

    def __enter__(self):
        self._thread.start()
        assert self.inside.wait(SOON)
        return self

    def __exit__(self, *exc):
        self.go.set()
        self._thread.join(SOON)
        assert not self._thread.is_alive()


def within(gate):
    def run(thread):
        with gate:
            thread.hold()

    return Elsewhere(run)


def test_a_thread_is_alone_with_itself():
    gate = Gate()
    with gate, gate, gate.exclusive(), gate.exclusive(), gate:
        pass


def test_nobody_is_alone_while_another_is_inside():
    gate = Gate()
    with within(gate), pytest.raises(WeightsInUse), gate.exclusive():
        pass
    with gate.exclusive():
        pass


def test_two_may_be_inside_and_neither_is_alone():
    gate = Gate()
    with within(gate), gate, pytest.raises(WeightsInUse), gate.exclusive():
        pass


def test_who_waits_is_alone_when_the_last_has_left():
    gate = Gate()
    with within(gate) as thread:
        threading.Timer(0.05, thread.go.set).start()
        # also from within
        with gate, gate.exclusive(SOON):
            assert thread.go.is_set()


def test_others_enter_when_who_was_alone_has_ended():
    gate, order = Gate(), []

    def run(thread):
        thread.inside.set()
        with gate:
            order.append("inside")

    with gate.exclusive():
        with contextlib.ExitStack() as ends:
            thread = Elsewhere(run)
            thread._thread.start()
            ends.callback(thread._thread.join, 0.05)
            assert thread.inside.wait(SOON)
        order.append("alone")
    thread._thread.join(SOON)
    assert order == ["alone", "inside"]


def test_what_is_put_off_is_done_by_the_last_that_leaves():
    gate, done = Gate(), []
    with within(gate):
        with within(gate):
            gate.when_exclusive(lambda: done.append(threading.get_ident()))
        assert not done
    assert len(done) == 1 and done[0] != threading.get_ident()
    gate.when_exclusive(lambda: done.append(threading.get_ident()))
    assert done[1:] == [threading.get_ident()]


def test_a_failure_of_what_was_put_off_ends_nobody_elses_call(caplog):
    gate = Gate()

    def failing():
        raise ValueError("injected")

    with pytest.raises(ValueError):
        gate.when_exclusive(failing)
    with within(gate):
        gate.when_exclusive(failing)
    assert "injected" in caplog.text
    with gate.exclusive():
        pass


def test_a_gate_goes_with_its_module():
    module = nn.Linear(2, 2)
    gate = weakref.ref(gate_of(module))
    assert gate_of(module) is gate() and gate_of(nn.Linear(2, 2)) is not gate()
    del module
    gc.collect()
    assert gate() is None


class Net(nn.Module):
    """Its forward can be held in the midst, by the thread that a call is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        if held := getattr(_held, "by", None):
            held.hold()
        x = nn.functional.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


_held = threading.local()


def calling(module, x):
    def run(thread):
        _held.by = thread
        return module(x)

    return Elsewhere(run)


def pointers(module):
    return [p.data_ptr() for p in module.parameters()]


@pytest.fixture
def made():
    module, twin = Net().eval(), Net().eval()
    acc = accelerate(module, Config(allow_cpu=True))
    yield module, twin, acc
    acc.release()


def test_weights_lie_still_while_another_thread_computes(made):
    module, twin, acc = made
    x, other = torch.randn(1, 8, 6, 6), torch.randn(2, 8, 4, 4)
    there = pointers(module)
    with calling(acc.run_original, x) as thread:
        for _ in range(3):
            torch.testing.assert_close(module(other), twin(other))
        assert pointers(module) == there and not acc.plans
        assert any("another thread" in reason for reason in acc.report.as_dict()["reasons"])
    torch.testing.assert_close(thread.result, twin(x))
    for _ in range(2):
        torch.testing.assert_close(module(other), twin(other), rtol=1e-4, atol=1e-5)
    assert len(acc.plans) >= 1 and acc.report.counter("eager_runs") >= 1 and pointers(module) != there
    assert acc.report.as_dict()["last_error"] is None


def planned(module, twin):
    x = torch.randn(2, 8, 4, 4)
    for _ in range(3):
        torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-5)
    return x


def held_original(acc):
    """Another thread in the original forward."""
    return calling(acc.run_original, torch.randn(1, 8, 6, 6))


def test_new_weights_are_taken_up_when_the_other_thread_has_ended(made):
    module, twin, acc = made
    x = planned(module, twin)
    with held_original(acc):
        for each in (module, twin):
            each.q.weight = nn.Parameter(torch.full((8, 8), 0.1), requires_grad=False)
        fresh = module.q.weight.data_ptr()
        torch.testing.assert_close(module(x), twin(x))
        assert module.q.weight.data_ptr() == fresh
    torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-5)
    assert module.q.weight.data_ptr() != fresh and acc.report.counter("weights_copied") == 1


def test_new_weights_of_a_part_are_not_copied_while_another_thread_computes(made):
    module, twin, acc = made
    x = planned(module, twin)
    part = acc.arena.detector({id(module.q._parameters)})
    for each in (module, twin):
        each.q.weight = nn.Parameter(torch.full((8, 8), 0.1), requires_grad=False)
    fresh = module.q.weight.data_ptr()
    with held_original(acc):
        with pytest.raises(WeightsInUse):
            acc.arena.sync(part)
        assert module.q.weight.data_ptr() == fresh
    assert acc.arena.sync(part) == 1 and module.q.weight.data_ptr() != fresh
    torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-5)


def test_a_release_lays_the_weights_back_when_the_other_thread_has_ended(made):
    module, twin, acc = made
    planned(module, twin)
    laid = pointers(module)
    with held_original(acc):
        acc.release()
        assert pointers(module) == laid and not acc.installed()
    assert pointers(module) != laid
    assert [p.stride() for p in module.parameters()] == [p.stride() for p in twin.parameters()]


def located(arena, module):
    arena.index()
    return [arena.locate(p) for p in module.parameters()]


def test_a_layout_is_not_restored_while_a_plan_is_made(made):
    module, twin, acc = made
    x, arena = planned(module, twin), acc.arena
    with held_original(acc):
        acc.forget_plans(None)
        arena.restore_layout()
        weights, laid = located(arena, module), pointers(module)
    assert pointers(module) == laid
    arena.bind(weights)
    for each in (module, twin):
        each.q.weight = nn.Parameter(torch.full((8, 8), 0.1), requires_grad=False)
    assert arena.sync() == 1
    arena.unbind(weights)
    torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["restore_layout", "release"])
def test_weights_that_were_laid_back_meanwhile_are_bound_to_no_plan(how, made):
    module, twin, acc = made
    x, arena = planned(module, twin), acc.arena
    acc.forget_plans(None)
    weights = located(arena, module)
    getattr(arena, how)()
    with pytest.raises(WeightsChanged, match="laid back"):
        arena.bind(weights)
    arena.bind(located(arena, module))
    torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-5)


def test_what_was_put_off_is_left_if_plans_came_since(made):
    module, twin, acc = made
    x = planned(module, twin)
    with held_original(acc):
        acc.arena.restore_layout()
        acc.arena.bind([])
        laid = pointers(module)
    assert pointers(module) == laid
    torch.testing.assert_close(module(x), twin(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_time", [True, False])
def test_state_dict_waits_for_the_other_thread(in_time, made, monkeypatch):
    module, twin, acc = made
    planned(module, twin)
    with held_original(acc) as thread:
        if in_time:
            threading.Timer(0.05, thread.go.set).start()
        else:
            monkeypatch.setattr(arena, "RESTORE_WAIT_S", 0.05)
        state = module.state_dict()
    for name, value in twin.state_dict().items():
        assert torch.equal(state[name], value)
        assert state[name].is_contiguous() or not in_time
    said = [e["message"] for e in acc.report.as_dict()["events"] if "saved as they lie" in e["message"]]
    assert bool(said) != in_time


def test_the_host_moves_on_to_no_other_model_meanwhile(made):
    module, twin, acc = made
    planned(module, twin)
    with held_original(acc):
        assert acc.move_to(Net().eval(), acc.hooks) is False
    assert acc.installed()


def test_two_threads_get_right_results_while_plans_come_and_go(made):
    module, twin, acc = made
    sizes = [torch.randn(1, 8, 8 + i, 8) for i in range(6)]
    expected = [twin(x) for x in sizes]
    wrong, ended = [], threading.Event()

    def original():
        with torch.no_grad():
            while not ended.is_set():
                for x, y in zip(sizes, expected):
                    wrong.extend([1] if not torch.allclose(acc.run_original(x), y, rtol=1e-3, atol=1e-4) else [])

    thread = threading.Thread(target=original, daemon=True)
    thread.start()
    for i in range(12):
        for x, y in zip(sizes[:2], expected):
            torch.testing.assert_close(module(x), y, rtol=1e-3, atol=1e-4)
        if i % 4 == 3:
            acc._model.forget_plans("a test drops them")
            acc._model.restore_layout(acc.report)
    ended.set()
    thread.join(SOON)
    assert not thread.is_alive() and not wrong
