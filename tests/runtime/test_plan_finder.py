"""The states of a call, and what callbacks of the host raise."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext import Config, Hooks, accelerate, reasons
from sfast_ext.call_signature import NotOurs
from sfast_ext.runtime.plan_cache import Earnings
from sfast_ext.runtime.plan_finder import ReplayState, state_of
from sfast_ext.weights.weight import WeightsAway

A_PLAN: Any = object()
CPU = Config(allow_cpu=True)
X = torch.randn(2, 4)
CALLBACKS = ["bypass_reason", "arguments", "prepare", "key"]


class Own(Exception):
    """The host's own error."""


class Sometimes(nn.Module):
    """Raises what it is given to raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.error: Exception | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.linear(x)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def raising(exc: Exception):
    def callback(*_: Any) -> Any:
        raise exc

    return callback


@pytest.mark.parametrize("key_confirmed", [True, False])
@pytest.mark.parametrize("weights_confirmed", [True, False])
def test_a_replay_is_speculative_unless_both_are_confirmed(key_confirmed, weights_confirmed):
    confirmed = key_confirmed and weights_confirmed
    expected = ReplayState.REPLAY_CONFIRMED if confirmed else ReplayState.REPLAY_SPECULATIVE
    assert state_of(A_PLAN, key_confirmed, weights_confirmed) is expected
    assert state_of(None, key_confirmed, weights_confirmed) is ReplayState.BUILD


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_raises_is_reported_under_its_name_and_keeps_the_plans(name):
    module = Sometimes().eval()
    accelerator = accelerate(module, CPU)
    module(X)
    accelerator._context.hooks = replace(Hooks(), **{name: raising(ValueError("no"))})
    torch.testing.assert_close(module(X), module.linear(X))
    report = accelerator.report.as_dict()
    assert report["last_error"]["stage"] == f"{name} of the host"
    assert "ValueError: no" in report["last_error"]["message"]
    assert len(accelerator.plans) == 1 and not report["reasons"]
    accelerator.release()


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_raises_what_has_no_text_is_reported_under_its_name(name):
    module = Sometimes().eval()
    accelerator = accelerate(module, CPU, hooks=Hooks(**{name: raising(Mute())}))
    torch.testing.assert_close(module(X), module.linear(X))
    error = accelerator.report.as_dict()["last_error"]
    assert (error["stage"], error["message"]) == (f"{name} of the host", "Mute")
    accelerator.release()


@pytest.mark.parametrize("key", [[1], {"a": 1}, {1}, (1, [2])])
def test_a_key_of_the_host_without_a_hash_is_reported_as_such(key):
    module = Sometimes().eval()
    accelerator = accelerate(module, CPU, hooks=Hooks(key=lambda: key))
    torch.testing.assert_close(module(X), module.linear(X))
    error = accelerator.report.as_dict()["last_error"]
    assert error["stage"] == "key of the host" and "unhashable" in error["message"]
    accelerator.release()


def test_an_error_without_text_of_the_original_is_its_own():
    module = Sometimes().eval()
    accelerator = accelerate(module, Config(allow_cpu=True, check="always"))
    module(X)
    accelerator._server.run_original = raising(Mute())
    with pytest.raises(Mute):
        module(X)
    assert accelerator.report.as_dict()["last_error"] is None and len(accelerator.plans) == 1
    accelerator.release()


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("kind", [NotOurs, WeightsAway])
def test_a_callback_may_bypass_a_call_by_an_exception(name, kind):
    module = Sometimes().eval()
    accelerator = accelerate(module, CPU, hooks=Hooks(**{name: raising(kind("the host says no"))}))
    torch.testing.assert_close(module(X), module.linear(X))
    report = accelerator.report.as_dict()
    assert report["reasons"] == {"the host says no": 1} and report["last_error"] is None
    accelerator.release()


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_error_of_the_host_that_its_forward_raises_as_well_is_not_reported(name):
    module = Sometimes().eval()
    accelerator = accelerate(module, CPU, hooks=Hooks(**{name: raising(Own("mine"))}))
    module.error = Own("mine")
    with pytest.raises(Own, match="mine"):
        module(X)
    assert accelerator.report.as_dict()["last_error"] is None
    module.error = KeyError("another")
    with pytest.raises(KeyError, match="another"):
        module(X)
    assert accelerator.report.as_dict()["last_error"]["message"] == "Own: mine"
    accelerator.release()


def test_an_error_of_ours_after_a_callback_is_not_taken_for_the_hosts(monkeypatch):
    """Which error is whose does not depend on the stage that the thread was at last."""
    module = Sometimes().eval()
    accelerator = accelerate(module, CPU, hooks=Hooks(key=lambda: "a"))
    module(X)
    monkeypatch.setattr(accelerator._finder, "_is_compared", raising(Own("ours")))
    module.error = Own("the forward's")
    with pytest.raises(Own, match="the forward's"):
        module(X)
    # an error of the same type as the forward's, which is reported all the same
    assert accelerator.report.as_dict()["last_error"]["message"] == "Own: ours"
    accelerator.release()


class Scaled(nn.Module):
    """A layer whose result the host scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x):
        return self.linear(x) * self.factor


def with_a_first_plan(module, **more):
    accelerator = accelerate(module, replace(CPU, earned=True), **more)
    # as the user drops plans: the next is made at once
    accelerator.forget_plans(None)
    for _ in range(3):
        module(X)
    assert len(accelerator.plans) == 1
    return accelerator


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_no_plan_is_made_with_a_key_that_was_not_read_as_it_was_not_due(monkeypatch, asked):
    """Runs of the original may end between two questions in one call."""
    module, due, answers = Scaled().eval(), Earnings.due, [False] * asked + [True]
    accelerator = with_a_first_plan(module)
    monkeypatch.setattr(Earnings, "due", lambda self, kind: answers.pop(0) if answers else due(self, kind))
    new = torch.randn(3, 4)
    module.factor = 2.0
    while answers:
        assert torch.allclose(module(new), 2 * module.linear(new))
    module.factor = 1.0
    for _ in range(4):
        assert torch.allclose(module(new), module.linear(new))
    assert torch.allclose(module(X), module.linear(X)) and accelerator.report.counter("errors") == 0


def test_a_plan_is_made_once_it_is_due(monkeypatch):
    module, answers = Scaled().eval(), [False, True, True, True]
    accelerator = with_a_first_plan(module)
    monkeypatch.setattr(Earnings, "due", lambda self, kind: answers.pop(0))
    new = torch.randn(3, 4)
    for _ in range(3):
        assert torch.allclose(module(new), module.linear(new))
    assert len(accelerator.plans) == 2 and not answers


def test_a_call_that_gets_no_plan_asks_the_host_for_nothing_but_a_reason(monkeypatch):
    asked: list[str] = []
    hooks = Hooks(
        bypass_reason=lambda: asked.append("reason"),
        key=lambda: asked.append("key"),
        prepare=lambda: asked.append("prepare"),
    )
    module = Scaled().eval()
    accelerator = with_a_first_plan(module, hooks=hooks)
    monkeypatch.setattr(Earnings, "due", lambda self, kind: False)
    for rows in (3, 5, 5, 7):
        asked.clear()
        new = torch.randn(rows, 4)
        assert torch.allclose(module(new), module.linear(new))
        assert asked == ["reason"]
        asked.clear()
        assert torch.allclose(module(X), module.linear(X))
        assert {"reason", "key", "prepare"} <= set(asked)
    assert len(accelerator.plans) == 1
    assert accelerator.report.as_dict()["reasons"] == {str(reasons.NEW_KIND()): 4}


@pytest.mark.parametrize("change", ["factor", "forward"])
def test_a_plan_of_this_size_for_another_behaviour_does_not_hide_a_reason(monkeypatch, change):
    """Its calls are of a kind that has a plan: the key is read."""
    module = Scaled().eval()
    accelerator = with_a_first_plan(module)
    monkeypatch.setattr(Earnings, "due", lambda self, kind: False)
    if change == "factor":
        module.factor = 3.0
        wanted = 3 * module.linear(X)
    else:
        module.linear.forward = lambda x: x + 1
        wanted = X + 1
    for _ in range(3):
        assert torch.allclose(module(X), wanted)
    assert accelerator.report.counter("errors") == 0


class OfImages(nn.Module):
    """An encoder as of a VAE."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(groups, 8)
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, factor=None):
        y = self.last(torch.nn.functional.silu(self.norm(self.first(x))))
        return y if factor is None else y * factor


GREY, NOISE = torch.full((2, 3, 8, 8), 0.5), torch.randn(2, 3, 8, 8)
ONE_GREY = torch.stack([NOISE[0], torch.tensor([0.1, 0.2, 0.3])[:, None, None].expand(3, 8, 8)])


@pytest.mark.parametrize("x", [GREY, torch.zeros(1, 3, 8, 8), ONE_GREY, GREY.half(), GREY.to(torch.bfloat16)])
def test_an_image_of_one_colour_is_not_normalised_by_a_plan_that_keeps_no_digits(x):
    model = OfImages(8).to(x.dtype)
    wanted = copy.deepcopy(model)(x)
    accelerator = accelerate(model, CPU)
    model(torch.randn_like(x))
    assert torch.equal(model(x), wanted)
    assert accelerator.report.as_dict()["reasons"] == {str(reasons.ONE_VALUE()): 1}
    assert len(accelerator._cache.plans) == 1


@pytest.mark.parametrize(
    ("groups", "call"),
    [
        (4, (GREY,)),  # a group of two channels with different constants
        (8, (NOISE,)),
        (8, (GREY, torch.tensor(2.0))),
        (8, (torch.randn(2, 3, 1, 1),)),
    ],
)
def test_other_images_are(groups, call):
    model = OfImages(groups)
    accelerator = accelerate(model, CPU)
    model(*call)
    assert not accelerator.report.as_dict()["reasons"] and len(accelerator._cache.plans) == 1
