"""The text that shows a preparation changes while a forward is recorded, and is no state of the forward."""

from __future__ import annotations

import functools
import types

import pytest
from stateful import Root, assert_same, run

from sfast_ext import Config, accelerate, preparation

TEXT = "textinfo"


class Job:
    """The state of a program's job."""

    textinfo, step = None, 0

    def __init__(self):
        self.textinfo, self.step = None, 0

    def of_step(self, x):
        return x * (2 if self.step == 0 else 3) if self.textinfo != "stop" else x


class Slots:
    __slots__ = ("step", "textinfo")

    def __init__(self):
        self.textinfo, self.step = None, 0


class Process:
    def __init__(self, job):
        self.job, self.parents = job, [types.SimpleNamespace(callbacks={"progress": lambda: job.textinfo})]


def looked_at(job, x):
    return x * (2 if job.step == 0 else 3) if job.textinfo != "stop" else x


JOB = Job()
HOME = types.ModuleType("a_program")
HOME.job = JOB


def by_name(part, x):
    return looked_at(JOB, x)


def by_module(part, x):
    return looked_at(HOME.job, x)


def in_a_closure(job):
    return lambda part, x: looked_at(job, x)


def in_a_closure_of_a_process(job):
    process = Process(job)

    def processor(part, x):
        return looked_at(process.job, x)

    return processor


def in_a_list_of_callbacks(job):
    process = Process(job)

    def processor(part, x):
        return x * 2 if process.parents[0].callbacks["progress"]() != "stop" else x

    return processor


def in_a_default(job):
    def processor(part, x, job=job):
        return looked_at(job, x)

    return processor


def in_a_partial(job):
    return functools.partial(lambda job, part, x: looked_at(job, x), job)


def on_the_function(job):
    def processor(part, x):
        return looked_at(processor.job, x)

    processor.job = job
    return processor


def by_a_method(job):
    return lambda part, x: job.of_step(x)


class Processor:
    def __init__(self, job):
        self.job, self.others = job, {"a": [(job,)]}

    def __call__(self, part, x):
        return looked_at(self.job, x)


class Nested(Processor):
    def __call__(self, part, x):
        return looked_at(self.others["a"][0][0], x)


PLACES = {
    "by name": (lambda job: by_name, lambda: JOB),
    "by a module": (lambda job: by_module, lambda: JOB),
    "in a closure": (in_a_closure, Job),
    "in a closure, a namespace": (in_a_closure, lambda: types.SimpleNamespace(textinfo=None, step=0)),
    "in a closure, with slots": (in_a_closure, Slots),
    "in a closure of a process": (in_a_closure_of_a_process, Job),
    "in a list of callbacks": (in_a_list_of_callbacks, Job),
    "in a default": (in_a_default, Job),
    "in a partial": (in_a_partial, Job),
    "on the function": (on_the_function, Job),
    "by a method": (by_a_method, Job),
    "in a processor": (Processor, Job),
    "nested in a processor": (Nested, Job),
    "in a processor, with slots": (Processor, Slots),
}


def accelerated(model, shown):
    accelerator = accelerate(model, Config(allow_cpu=True, drop_slower=False))
    accelerator.report.on_stage = shown
    return accelerator, run(model, 3)


def models(place):
    make, job = PLACES[place]
    mine, other = job(), job()
    return mine, Root(lambda: make(mine)).eval(), Root(lambda: make(other)).eval()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(preparation, "_shown", [])
    JOB.__init__()


@pytest.mark.parametrize("place", PLACES)
def test_a_stage_that_is_shown_during_the_capture_is_no_state_of_the_forward(place):
    job, model, twin = models(place)
    stages = []

    def show(stage):
        stages.append(stage)
        preparation.show(job, TEXT, stage)

    accelerator, results = accelerated(model, show)
    assert_same(results, run(twin, 3))
    assert any(stage and "recording" in stage for stage in stages)
    assert len(accelerator.plans) == 1 and job.textinfo is None


@pytest.mark.parametrize("place", [place for place in PLACES if place != "in a list of callbacks"])
def test_what_else_changes_beside_the_stage_is_noticed(place):
    job, model, _ = models(place)

    def show(stage):
        preparation.show(job, TEXT, stage)
        job.step = 0 if stage is None else job.step + 1

    accelerator, _ = accelerated(model, show)
    assert_refused(accelerator, "step")


def assert_refused(accelerator, name):
    assert not accelerator.plans
    reasons = accelerator.report.as_dict()["reasons"]
    assert any("keeps state between calls" in reason and name in reason for reason in reasons), reasons


@pytest.mark.parametrize("place", PLACES)
def test_the_same_attribute_of_another_object_is_state(place):
    job, model, _ = models(place)

    def show(stage):
        preparation.show(Job(), TEXT, stage)
        job.textinfo = stage

    accelerator, _ = accelerated(model, show)
    assert_refused(accelerator, TEXT)


@pytest.mark.parametrize("place", PLACES)
def test_a_text_that_somebody_else_writes_there_is_state(place):
    job, model, _ = models(place)
    accelerator, _ = accelerated(model, lambda stage: setattr(job, TEXT, stage))
    assert_refused(accelerator, TEXT)
