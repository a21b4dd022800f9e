"""What a report says is of the last images, in words, and each thing once."""

from __future__ import annotations

import logging

import pytest

from sfast_ext import reasons as table
from sfast_ext.hosts.reasons import HYPERNETWORK
from sfast_ext.reasons import MAX_LENGTH, Detail, Private
from sfast_ext.report import REASONS_KEPT, Report
from sfast_ext.secondary_report import SecondaryReport


def reasons(report: Report) -> dict[str, int]:
    return report.as_dict()["reasons"]


def messages(report: Report) -> list[str]:
    return [event["message"] for event in report.as_dict()["events"]]


def test_reasons_are_of_this_generation_and_the_last_that_made_a_call():
    report = Report()
    report.bypassed("a hypernetwork is active")
    report.new_generation()
    report.bypassed("Hypertile is on")
    assert reasons(report) == {"a hypernetwork is active": 1, "Hypertile is on": 1}
    report.new_generation()
    report.count("replays")
    assert reasons(report) == {"Hypertile is on": 1}
    report.new_generation()
    report.count("replays")
    assert reasons(report) == {}
    assert report.as_dict()["reasons_since_start"] == {"a hypernetwork is active": 1, "Hypertile is on": 1}


def test_generations_without_a_call_push_no_reason_out():
    report = Report()
    report.bypassed("Hypertile is on")
    for _ in range(5):
        # each network of an image tells it, and so does a model that is loaded
        report.new_generation()
        report.count("memory_given_back")
    assert reasons(report) == {"Hypertile is on": 1}


def test_a_reason_of_both_generations_is_counted_in_both():
    report = Report()
    for n in (2, 3):
        report.new_generation()
        for _ in range(n):
            report.bypassed("Hypertile is on")
    assert reasons(report) == {"Hypertile is on": 5}
    assert len(messages(report)) == 1


def test_nobody_tells_of_generations():
    report = Report()
    for _ in range(3):
        report.bypassed("x")
        report.count("replays")
    assert reasons(report) == {"x": 3}


@pytest.mark.parametrize(
    "make",
    [
        lambda n: table.INACCURATE(0.03 + n / 1000, 0.02),
        lambda n: table.SLOWER(5.1 + n, 4.9),
        lambda n: table.READS_TENSOR([2, n, 768]),
        lambda n: table.BUILD_FAILED("capture", Detail(f"RuntimeError: {n} of 7 <bytes>")),
    ],
)
def test_a_reason_does_not_multiply_with_its_numbers(make):
    report = Report()
    for n in range(3):
        report.bypassed(make(n))
    assert reasons(report) == {str(make(2)): 3} and messages(report) == [str(make(0))]
    (row,) = report.as_dict()["reasons_listed"]
    assert (row["reason"], row["code"], row["calls"], row["calls_last"]) == (str(make(0)), make(0).code, 3, 3)


def test_a_text_of_a_host_is_counted_without_addresses():
    report = Report()
    for n in range(3):
        report.bypassed(f"score_mod of <function mod at 0x7f{n}8b2c1d0> changes scores")
    assert reasons(report) == {"score_mod of <function mod> changes scores": 3}
    assert report.as_dict()["reasons_listed"][0]["code"] == "other"


def test_names_that_belong_to_the_user_can_be_left_out():
    report = Report()
    report.bypassed(HYPERNETWORK(Private("secret face")))
    beside = SecondaryReport(report, "vae", "VAE decoder")
    beside.bypassed(HYPERNETWORK(Private("secret face")))
    report.bypassed(HYPERNETWORK(Private("another secret")))
    assert "secret" in str(report.as_dict()) and "secret" not in str(report.as_dict(names=False))
    left = "a hypernetwork is active: <name>; remove it from the prompt to accelerate"
    found = report.as_dict(names=False)
    assert found["reasons"] == {left: 2} and [row["reason"] for row in found["reasons_listed"]] == [left, left]
    assert [event["message"] for event in found["events"]] == [left, f"VAE decoder: {left}", left]


def test_what_numbers_name_stays_apart():
    report = Report()
    for words in ("blocks.{} has a foreign forward", "some weights are on cuda:{}", "f (khrfix.py:{})", "SD{} is on"):
        for n in (1, 2):
            report.bypassed(words.format(n))
    assert len(reasons(report)) == 8


def test_reasons_have_a_bound():
    report = Report()
    for n in range(3 * REASONS_KEPT):
        report.bypassed(f"name{n} is in the way")
    assert len(reasons(report)) == REASONS_KEPT + 1 and sum(reasons(report).values()) == 3 * REASONS_KEPT


def test_an_event_is_one_line_of_bounded_length_without_addresses():
    report = Report()
    report.event("capture", "the first line\n  the second, <object at 0x7fA0>\n" + 1000 * "x")
    report.error("replay", RuntimeError("one\ntwo of <Net object at 0x7fA0>"))
    event, error = messages(report)
    assert event.startswith("the first line the second, <object>") and len(event) == MAX_LENGTH
    assert error == "RuntimeError: one two of <Net object>" == report.as_dict()["last_error"]["message"]


def test_an_error_that_comes_at_every_call_is_one_event_whichever_stages_it_fails():
    report = Report()
    for _ in range(20):
        for stage in ("host", "prepare of the host"):
            report.error(stage, AttributeError("module 'modules.shared' has no attribute 'opts'"))
        report.error("key", ValueError("another"))
    assert len(messages(report)) == 2 and report.counter("errors") == 60


def test_what_the_last_image_had_is_told_apart_from_all_since_the_start():
    report = Report()
    for _ in range(3):
        report.bypassed("a hypernetwork is active")
    report.new_generation()
    report.bypassed("Hypertile is on")
    rows = {row["reason"]: (row["calls"], row["calls_last"]) for row in report.as_dict()["reasons_listed"]}
    assert rows == {"a hypernetwork is active": (3, 0), "Hypertile is on": (1, 1)}
    assert report.as_dict()["reasons_listed"][0]["reason"] == "Hypertile is on"
    assert report.as_dict()["last_pass"] == {"accelerated": 0, "bypassed": 1, "prepared": 0}


def test_a_pass_without_a_call_leaves_the_last_image_as_it_was():
    report = Report()
    report.count("captures")
    report.count("replays", 19)
    report.new_generation()
    report.new_generation()
    assert report.as_dict()["last_pass"] == {"accelerated": 19, "bypassed": 0, "prepared": 1}
    report.count("replays")
    assert report.as_dict()["last_pass"] == {"accelerated": 1, "bypassed": 0, "prepared": 0}


def test_reasons_age(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("sfast_ext.report.time.monotonic", lambda: now[0])
    report = Report()
    report.bypassed("Hypertile is on")
    now[0] += 61
    assert report.as_dict()["reasons_listed"][0]["seconds_ago"] == 61


def test_the_first_failure_of_a_kind_is_a_line_with_a_remedy_and_the_next_are_counted(caplog):
    report = Report("the host goes on", "/sfast/v1/help#failed")
    with caplog.at_level(logging.INFO, logger="sfast_ext"):
        for _ in range(3):
            try:
                raise ValueError("it broke")
            except ValueError as exc:
                report.error("capture", exc)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "capture failed" in line and "ValueError: it broke" in line and line.endswith("; see /sfast/v1/help#failed")
    assert "the host goes on" in line
    assert "Traceback" not in line and "\n" not in line
    assert report.counter("errors") == 3
    assert "Traceback" in report.as_dict()["last_error"]["traceback"]


def test_tracebacks_are_in_the_log_at_debug(caplog):
    with caplog.at_level(logging.DEBUG, logger="sfast_ext"):
        Report().error("capture", ValueError("it broke"))
    assert "ValueError: it broke" in caplog.records[-1].getMessage() and len(caplog.records) == 2


def test_a_fact_is_recorded_once_whatever_its_numbers_are():
    report = Report()
    for milliseconds in range(5):
        report.once("bypassed", table.SLOWER(float(milliseconds), 2.0).of("VAE decoder"))
        report.once("bypassed", table.SLOWER(float(milliseconds), 2.0).of("VAE encoder"))
        report.once("kernels", f"{milliseconds} kernels")
    said = [event["message"] for event in report.as_dict()["events"]]
    assert [each.partition(":")[0] for each in said if "VAE" in each] == ["VAE decoder", "VAE encoder"]
    assert len(said) == 2 + 5
