"""The stages of a preparation, as the console and the badge tell them."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from sfast_ext import accelerate
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.preparation import WORDS, Preparation, StageTimes
from sfast_ext.report import Report, advance, at


def test_each_stage_is_told_and_timed(caplog):
    report, told = Report(), []
    report.on_stage = told.append
    with caplog.at_level(logging.INFO, logger="sfast_ext"), Preparation(report, "512x512") as preparation:
        at("capture")
        shown = report.as_dict()["preparing"]
        at("binding of weights")
        at("choice of kernels")
        at("check")
    assert (shown["label"], shown["stage"]) == ("512x512", "recording") and shown["seconds"] >= 0
    assert report.as_dict()["preparing"] is None
    stages = ["recording", "compiling kernels", "comparing with the original"]
    assert list(preparation.seconds) == stages
    assert told == ["Stable Fast: beginning", *(f"Stable Fast: {stage}" for stage in stages), None]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == [f"preparing 512x512: {stage} ..." for stage in stages]
    assert lines[3].startswith("prepared 512x512 in ") and "recording 0.0" in lines[3]


def test_stages_of_other_work_are_not_told():
    report = Report()
    with Preparation(report, "512x512"):
        pass
    at("capture")
    assert report.as_dict()["preparing"] is None


def test_an_exception_ends_it(caplog):
    report = Report()
    with caplog.at_level(logging.INFO, logger="sfast_ext"), pytest.raises(KeyError), Preparation(report, "x"):
        at("capture")
        raise KeyError
    assert report.as_dict()["preparing"] is None
    assert not [record for record in caplog.records if record.getMessage().startswith("prepared")]


def test_a_host_that_cannot_show_it_stops_nothing():
    report = Report()

    def show(stage):
        raise RuntimeError("no state")

    report.on_stage = show
    with Preparation(report, "x"):
        at("capture")
    assert report.as_dict()["last_error"]["stage"] == "showing a stage"


def test_how_far_a_stage_is_comes_beside_it():
    report, told = Report(), []
    report.on_stage = told.append
    with Preparation(report, "x"):
        at("choice of kernels")
        advance(12, 40)
        at("pass geglu")
        advance(1, 2)
    assert told[2:4] == ["Stable Fast: compiling kernels 12 of 40", None]


def test_seconds_left_are_those_of_the_same_stages_before(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("sfast_ext.preparation.time.monotonic", lambda: clock[0])
    times, report = StageTimes(), Report()

    def prepare(*stages, kind="UNet"):
        left = []
        with Preparation(report, "x", kind=kind, times=times):
            for stage, seconds in stages:
                at(stage)
                left.append(report.as_dict()["preparing"]["seconds_left"])
                clock[0] += seconds
        return left

    assert prepare(("capture", 3.0), ("choice of kernels", 5.0)) == [None, None]
    # the first one of a process compiles; those after it are expected to take as long, until there is one of them
    assert prepare(("capture", 1.0), ("choice of kernels", 0.5)) == [None, None]
    assert prepare(("capture", 1.0), ("choice of kernels", 0.5)) == [1.5, 0.5]
    # a stage that takes longer than expected leaves none, not less
    assert prepare(("capture", 9.0), ("choice of kernels", 0.5)) == [1.5, 0.5]
    assert prepare(("capture", 1.0), kind="ControlNet") == [None]
    told = []
    report.on_stage = told.append
    prepare(("capture", 1.0))
    assert told[1] == "Stable Fast: recording, about 10 s left"


def test_the_next_process_knows_them(tmp_path):
    folder = tmp_path / "cache"
    StageTimes(lambda: folder).record("UNet", {"recording": 3.0})
    assert StageTimes(lambda: folder).of("UNet") == {"recording": 3.0}
    if os.name != "nt":
        assert (folder / "stages.json").stat().st_mode & 0o077 == 0
    for broken in (b"", b"[1]", b'{"first UNet": {"recording": "x"}}', b"\xff"):
        (folder / "stages.json").write_bytes(broken)
        assert StageTimes(lambda: folder).of("UNet") == {}
    (folder / "stages.json").write_bytes(b'{"first UNet": 3, "later UNet": {"recording": 1}}')
    assert StageTimes(lambda: folder).of("UNet") == {"recording": 1.0}


def test_a_folder_that_is_refused_is_left_alone(tmp_path):
    if os.name == "nt":
        pytest.skip("Windows tells nothing of who may write")
    open_to_all = tmp_path / "cache"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / "stages.json").write_text('{"first UNet": {"recording": 9}}')
    times = StageTimes(lambda: open_to_all)
    assert times.of("UNet") == {}
    times.record("UNet", {"recording": 3.0})
    assert "9" in (open_to_all / "stages.json").read_text()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.first(x)) + x


@pytest.mark.parametrize("stage", range(len(WORDS)))
def test_an_interruption_leaves_the_result_and_no_plan(stage):
    """At each of the stages, and the next call may build the plan."""
    net, asked, there = Net().eval(), [], [True]

    def interrupted():
        asked.append(1)
        return there[0] and len(asked) == stage + 1

    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = net(x)
        accelerator = accelerate(net, Config(allow_cpu=True), hooks=Hooks(interrupted=interrupted))
        assert torch.equal(net(x), expected)
        report = accelerator.report.as_dict()
        assert report["counters"].get("errors", 0) == 0 and not report["reasons"]
        assert len(asked) == stage + 1 and not accelerator.plans
        assert report["events"][-1]["stage"] == "interrupted"
        assert report["counters"].get("captures", 0) == report["last_pass"]["prepared"] == 0
        for _ in range(4):
            # as often as the user likes: a plan that was interrupted delays none
            asked.clear()
            net(x)
            assert not accelerator.plans
        there[0] = False
        net(x)
        assert len(accelerator.plans) == 1
        accelerator.release()
