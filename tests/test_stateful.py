"""Random sequences of events; `make soak EVENTS=n` plays more of them. A failure names what led to it, made short."""

from __future__ import annotations

import logging

import hypothesis
import pytest
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from stateful import machine
from stateful.world import World

NAMES = {event.__name__: event for event in machine.EVENTS}
# an event that is listed more often comes more often
LISTED = [event.__name__ for event in machine.EVENTS]


@pytest.fixture(autouse=True)
def quiet():
    # failures made on purpose, thousands of them; pytest would keep what they log, and torch's own traces
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def state_machine(kind: str, first: int, played: list[str]) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(kind, first)

        @rule(name=strategies.sampled_from(LISTED), seed=strategies.integers(0, 2**16))
        def event(self, name: str, seed: int) -> None:
            played.append(name)
            machine.play(self.world, NAMES[name], seed)

        def teardown(self) -> None:
            self.world.finish()

    return Machine


@pytest.mark.parametrize(
    ("kind", "seed", "models", "events"), [("small", 1, 24, 41), ("small", 2, 24, 41), ("unet", 3, 2, 20)]
)
def test_after_each_event_the_model_computes_what_its_twin_does(kind, seed, models, events):
    played: list[str] = []
    settings = hypothesis.settings(
        max_examples=models, stateful_step_count=events, deadline=None, derandomize=False, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    # the seed makes each run the same, and the three of them different
    hypothesis.seed(seed)(cls := state_machine(kind, seed, played))
    run_state_machine_as_test(cls, settings=settings)
    assert len(played) >= models * events


def test_runs_from_a_seed_use_plans():
    """What the soak plays: the same events for the same seed, and most of them on plans."""
    w = machine.run("small", 7, 120)
    assert w.plan_runs > 50
