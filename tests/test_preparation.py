"""The stages of a preparation, as the console and the badge tell them."""

from __future__ import annotations

import logging

import pytest

from sfast_ext.preparation import Preparation
from sfast_ext.report import Report, at


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
