"""Prepare and Measure on the hosts' stand-ins: real plans, the host's queue, and nothing else changed."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")

from hosts.adapters.test_a1111 import count, host, started, status  # noqa: F401
from hosts.standins.sdnext import hosted, pipeline

from sfast_ext.hosts.a1111 import adapter
from sfast_ext.hosts.session import Session
from sfast_ext.jobs import measurements, rehearsal
from sfast_ext.report import Report
from sfast_ext.ui.requests import Refused, Wanted, from_text
from sfast_ext.weights.host_order import HostOrder

LONG = 60.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "cache"))
    # one round says as much as seven
    monkeypatch.setattr(rehearsal, "ROUNDS", 1)
    return tmp_path / "cache"


def ended(session, within=LONG):
    until = time.monotonic() + within
    while time.monotonic() < until:
        job = session.rehearsals.jobs.status()
        if job["state"] not in ("waiting", "running"):
            return job
        time.sleep(0.01)
    raise AssertionError(f"the job did not end: {job}")


def a1111():
    return adapter.A1111Session.running


def marks():
    plans = [plan for each in status()["accelerators"] for plan in each["plans"]]
    return [(plan["label"], plan["last_pass"], plan["used_at"]) for plan in plans]


def test_prepared_sizes_need_no_preparation_and_nothing_else_is_changed(host):  # noqa: F811
    unet = started(host)
    with pytest.raises(Refused, match="make one image"):
        a1111().rehearsals.prepare(from_text("64x64", "1"))
    host.generate(steps=3)
    shown = {key: status()[key] for key in ("last_pass", "reasons_listed", "badge")}
    marked = marks()
    torch.manual_seed(5)
    random, grad = torch.get_rng_state(), torch.is_grad_enabled()
    weights = {name: value.clone() for name, value in unet.state_dict().items()}

    a1111().rehearsals.prepare([Wanted(128, 128, 1), Wanted(64, 64, 3)])
    job = ended(a1111())

    assert (job["state"], job["done"], job["total"]) == ("done", 2, 2)
    assert [(row["label"], row["ready"], row["reason"]) for row in job["rows"]] == [
        ("128x128, 1 image", True, None),
        ("64x64, 3 images", True, None),
    ]
    assert [label for label, _, _ in marks()] == [
        "64x64, 1 image, 7 tokens",
        "128x128, 1 image, 7 tokens",
        "64x64, 3 images, 7 tokens",
    ]
    assert {key: status()[key] for key in shown} == shown
    assert marks()[0] == marked[0] and not any(last for _, last, _ in marks()[1:])
    assert torch.equal(torch.get_rng_state(), random) and torch.is_grad_enabled() == grad
    assert all(torch.equal(value, weights[name]) for name, value in unet.state_dict().items())
    state = host.shared.state
    assert (state.job, state.interrupted, state.skipped) == ("", False, False)
    assert not sys.modules["modules.call_queue"].queue_lock.locked()

    captures = count("captures")
    host.generate(size=16, steps=3)
    assert count("captures") == captures and status()["last_pass"]["prepared"] == 0


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("job", ["prepare", "measure"])
def test_one_image_is_enough_though_its_plan_was_not_earned(host, monkeypatch, size, job):  # noqa: F811
    # as on a GPU
    as_given = Session.config
    monkeypatch.setattr(Session, "config", lambda self: dataclasses.replace(as_given(self), earned=True))
    started(host)
    host.generate(steps=3, size=size)
    assert not marks()
    getattr(a1111().rehearsals, job)([Wanted(128, 128, 1), Wanted(64, 64, 3)])
    told = ended(a1111())
    assert told["state"] == "done" and [row["ready"] for row in told["rows"]] == [True, True], told
    assert [label for label, _, _ in marks()] == ["128x128, 1 image, 7 tokens", "64x64, 3 images, 7 tokens"]
    host.generate(steps=3, size=16)
    assert status()["last_pass"] == {"accelerated": 3, "bypassed": 0, "prepared": 0}
    a1111().drop_plans()
    with pytest.raises(Refused, match="make one image"):
        a1111().rehearsals.prepare(from_text("64x64", "1"))


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("padded", [False, True])
def test_lengths_of_the_prompt_are_prepared_for_each_call_of_an_image(host, padded):  # noqa: F811
    started(host)
    host.opts.data["pad_cond_uncond"] = padded
    host.generate(steps=3, tokens=77)
    a1111().rehearsals.prepare(from_text("128x128", "1", ["150", "75"]))
    job = ended(a1111())
    assert [(row["label"], row["ready"], row["tokens"]) for row in job["rows"]] == [
        ("128x128, 1 image, 154 tokens", True, 150),
        ("128x128, 1 image, 77 tokens", True, 75),
    ]
    captures = count("captures")
    for tokens in (77, 154):
        host.generate(size=16, steps=1, tokens=tokens)
    assert count("captures") == captures == (3 if padded else 5)
    # a long prompt beside a short negative one, if the WebUI does not pad it: calls of one row
    rows = sorted(tuple(plan.signature.shapes()[0]) for plan in a1111().loaded().plans.values())
    assert rows.count((1, 4, 16, 16)) == (0 if padded else 2)


def test_a_prompt_of_another_kind_has_no_length_to_choose(host):  # noqa: F811
    started(host)
    host.generate(steps=3)
    a1111().rehearsals.prepare(from_text("64x64", "1", ["75"]))
    (row,) = ended(a1111())["rows"]
    assert not row["ready"] and row["reason"].startswith("the length of the prompt cannot be chosen")
    assert count("captures") == 1


def test_what_cannot_be_prepared_says_why(host, monkeypatch):  # noqa: F811
    started(host)
    host.generate(steps=3)
    before = status()["reasons_since_start"]
    host.shared.loaded_hypernetworks = [SimpleNamespace(name="<b>one</b>")]
    a1111().rehearsals.prepare(from_text("128x128", "1"))
    (row,) = ended(a1111())["rows"]
    assert not row["ready"] and row["reason"].startswith("a hypernetwork is active: <b>one</b>")
    # it is no image's reason
    assert status()["reasons_since_start"] == before
    host.shared.loaded_hypernetworks = []
    # a size that the model refuses ends nothing
    monkeypatch.setattr(rehearsal.ExampleCall, "inputs", lambda self, *_: ((torch.zeros(1),), {}))
    a1111().rehearsals.prepare(from_text("128x128, 64x64", "1"))
    job = ended(a1111())
    assert job["state"] == "done" and [row["ready"] for row in job["rows"]] == [False, False]
    assert "Error" in job["rows"][0]["reason"]
    host.opts.data["sfast_check"] = "always"
    with pytest.raises(Refused, match="made twice"):
        a1111().rehearsals.measure(from_text("64x64", "1"))
    host.opts.data.update(sfast_check="first use", sfast_enabled=False)
    with pytest.raises(Refused, match="switched off"):
        a1111().rehearsals.measure(from_text("64x64", "1"))


def test_a_preparation_is_interrupted_between_stages(host):  # noqa: F811
    started(host)
    host.generate(steps=3)
    session = a1111()

    def shown(stage):
        if stage is not None and "recording" in stage:
            session.rehearsals.jobs.cancel()

    session.report.on_stage = shown
    session.rehearsals.prepare(from_text("128x128, 192x192", "1"))
    job = ended(session)
    assert (job["state"], job["rows"]) == ("cancelled", []) and len(marks()) == 1
    assert status()["counters"].get("errors", 0) == 0 and not host.shared.state.interrupted


def test_interrupting_an_image_ends_its_preparation_and_keeps_what_there_is(host):  # noqa: F811
    started(host)
    session = a1111()
    session.report.on_stage = lambda stage: host.shared.state.interrupt() if stage and "recording" in stage else None
    result = host.request(steps=5)
    assert marks() == [] and any(event["stage"] == "interrupted" for event in status()["events"])
    # the step that was prepared is in the image
    host.shared.state.interrupted, session.report.on_stage = False, None
    torch.testing.assert_close(result.images[0], host.generate(steps=1), rtol=1e-3, atol=1e-4)
    assert len(marks()) == 1


def test_measured_in_turns_and_kept_without_a_name(host, cache):  # noqa: F811
    started(host)
    host.generate(steps=3)
    a1111().rehearsals.measure(from_text("64x64", "1"))
    job = ended(a1111())
    assert job["state"] == "done" and job["message"] is None
    for row in job["rows"]:
        assert row["ready"] and row["speedup"] == row["ms_before"] / row["ms_after"] > 0
    (kept,) = a1111().rehearsals.measurements.all()
    assert kept["rows"] == job["rows"] and kept["host"] == "AUTOMATIC1111 WebUI"
    assert kept["model"].startswith("UNetModel, ") and kept["torch"] == torch.__version__ and "driver" in kept
    file = cache / "measurements.json"
    assert "seed 1" not in file.read_text() and str(cache) not in file.read_text()
    if os.name == "nt":
        # who else may write there is not in a file's mode
        return
    assert file.stat().st_mode & 0o077 == 0
    # a folder that others may write to is told of, and the result is there
    cache.chmod(0o777)
    a1111().rehearsals.measure(from_text("64x64", "1"))
    job = ended(a1111())
    assert job["state"] == "done" and "not kept" in job["message"] and job["rows"][0]["ready"]


def test_no_measured_call_lays_weights_out(host, monkeypatch):  # noqa: F811
    monkeypatch.setattr(rehearsal, "ROUNDS", 2)
    started(host)
    host.generate(steps=3)
    moved, during = [], []
    for way in ("_to_host", "_to_plans"):
        real = getattr(HostOrder, way)

        def seen(order, given, real=real):
            before = order.changed
            result = real(order, given)
            moved.append(order.changed != before)
            return result

        monkeypatch.setattr(HostOrder, way, seen)

    def timed(run, device, times):
        before = sum(moved)
        run()
        during.append(sum(moved) - before)
        return 1.0

    monkeypatch.setattr(rehearsal, "milliseconds", timed)
    a1111().rehearsals.measure(from_text("64x64", "1"))
    assert ended(a1111())["state"] == "done"
    assert sum(moved) >= 3 and during == [0, 0, 0, 0]


def test_the_last_measurements_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "KEPT", 3)
    store = measurements.Measurements(lambda: tmp_path / "cache")
    net = torch.nn.Linear(10, 10).half()
    for number in range(5):
        store.add(net, [{"label": str(number)}], "1", "a host")
    assert [each["rows"][0]["label"] for each in store.all()] == ["2", "3", "4"]
    assert store.all()[0]["model"] == "Linear, 0.00011 million parameters, float16"
    for broken in ("", "{}", '[1, {"rows": 1}]'):
        (tmp_path / "cache" / "measurements.json").write_text(broken)
        assert store.all() == []


def test_measurements_that_were_kept_by_former_names_are_read(tmp_path):
    store = measurements.Measurements(lambda: tmp_path / "cache")
    net = torch.nn.Linear(10, 10).half()
    store.add(net, [{"label": "former", "pictures": 4, "ready": True}], "1", "a host")
    store.add(net, [{"label": "now", "images": 1, "ready": True}], "1", "a host")
    rows = [row for each in store.all() for row in each["rows"]]
    assert rows == [{"label": "former", "ready": True, "images": 4}, {"label": "now", "images": 1, "ready": True}]
    # the next measurement writes all by today's name
    store.add(net, [], "1", "a host")
    assert "pictures" not in (tmp_path / "cache" / "measurements.json").read_text()


@pytest.fixture
def sdnext(monkeypatch):
    yield from hosted(monkeypatch)


def test_sdnext_prepares_and_measures_alike(sdnext):
    sdnext.modeldata.model_data.sd_model = pipeline()
    sdnext.image()
    session = sdnext.session
    session.rehearsals.prepare(from_text("128x128", "1"))
    (row,) = ended(session)["rows"]
    assert row["ready"], row
    captures = sdnext.captures()
    sdnext.image(width=16, height=16)
    assert sdnext.captures() == captures
    session.rehearsals.measure(from_text("128x128", "1"))
    (row,) = ended(session)["rows"]
    assert row["speedup"] > 0 and json.dumps(session.rehearsals.measurements.all())
    assert not sdnext.shared.state.job and not sdnext.shared.state.interrupted


def test_calls_of_a_rehearsal_are_no_image_s():
    from sfast_ext.report import rehearsal as in_rehearsal

    report = Report()
    report.count("replays")
    with in_rehearsal(), report.tally() as tally:
        report.count("replays")
        report.bypassed("a reason")
    shown = report.as_dict()
    assert shown["last_pass"] == {"accelerated": 1, "bypassed": 0, "prepared": 0} and shown["reasons_listed"] == []
    assert (tally.accelerated, tally.bypassed, str(tally.reason)) == (1, 1, "a reason")
