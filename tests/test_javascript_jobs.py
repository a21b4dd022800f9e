"""Progress and results of Prepare and Measure in the tab, in node."""

from __future__ import annotations

import json

import pytest
from test_javascript import EVIL, STATUS, run

ROW = {
    "label": "512x512, 1 image", "ready": True, "reason": None, "ms_before": 31.04, "ms_after": 14.8, "speedup": 2.1,
}  # fmt: skip
JOB = {
    "kind": "measure", "state": "running", "done": 1, "total": 2, "label": "768x512, 1 image", "seconds": 4.0,
    "seconds_left": 3.6, "message": None, "rows": [ROW],
}  # fmt: skip
KEPT = {
    "when": "2026-11-24T21:05:00+01:00", "version": "0.1.0", "host": "a host", "model": EVIL, "gpu": "a card",
    "driver": "580.65", "torch": "2.7", "rows": [ROW],
}  # fmt: skip
VIEW = "const view = document.getElementById('stable_fast_job'); const live = byClass('sfast-live sfast-job-live');"
OPEN = "observers.forEach((each) => each([{isIntersecting: true}])); await settle();"


def test_a_job_shows_how_far_it_is():
    script = (
        VIEW
        + """
        const bar = byTag('progress', view)[0];
        Object.assign(shown, {text: view.textContent, max: bar.max, value: bar.value, timers: timers.size});
        shown.name = bar.attributes['aria-label'];
    """
    )
    shown = run(script, {**STATUS, "job": JOB})
    assert shown["text"].startswith("Measure|Running|1 / 2|768×512,|1|image|4|s left|")
    assert "512×512,|1|image|31.0|14.8|2.1|Ready" in shown["text"]
    assert (shown["max"], shown["value"], shown["name"], shown["timers"]) == (2, 1, "Measure", 1)


def test_the_page_asks_until_the_job_has_ended_and_tells_its_end_once():
    script = (
        VIEW
        + """
        const heard = [];
        for (let i = 0; i < 9; i++) { await tick(); heard.push(live.textContent); }
        shown.working = timers.size;
        status.job = {...status.job, state: 'done', done: 2, label: null, seconds_left: null};
        for (let i = 0; i < 5; i++) { await tick(); await settle(); heard.push(live.textContent); }
        Object.assign(shown, {heard: [...new Set(heard)], ended: timers.size, text: view.textContent});
        shown.loaded = fetched.filter((url) => url.endsWith('measurements')).length;
        shown.role = live.attributes.role;
    """
    )
    shown = run(script, {**STATUS, "job": JOB, "measurements": [KEPT]})
    assert shown["working"] == 1 and shown["ended"] == 0 and shown["loaded"] == 1
    assert shown["heard"] == ["", "Measure|Done"] and shown["role"] == "status"
    assert shown["text"].startswith("Measure|Done|2 / 2|")


@pytest.mark.parametrize("before", [None, {**JOB, "state": "done", "done": 2, "rows": []}])
def test_a_job_that_began_and_ended_between_two_answers_is_told_and_kept(before):
    done = {**JOB, "state": "done", "done": 2}
    script = f"""
        shown.first = live.textContent;
        status.job = {json.dumps(done)};
        await stableFast.refresh();
        await settle();
        shown.heard = live.textContent;
        shown.loaded = fetched.filter((url) => url.endsWith('measurements')).length;
    """
    shown = run(VIEW + script, {**STATUS, "job": before, "measurements": [KEPT]})
    assert shown == {"first": "", "heard": "Measure|Done", "loaded": 1}


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"state": "waiting", "done": 0, "rows": [], "seconds_left": None}, "Waiting for the image to end"),
        ({"state": "failed", "message": "make one image"}, "Failed|1 / 2|make one image"),
        ({"state": "cancelled"}, "Cancelled|1 / 2"),
        ({"rows": [{**ROW, "ready": False, "reason": EVIL + " 4x"}]}, EVIL + " 4x"),
        ({"kind": "prepare", "rows": [{"label": "512x512", "ready": True}]}, "512×512|–|–|–|Ready"),
    ],
)
def test_each_state_is_told_in_words(job, said):
    assert said in run(VIEW + "shown.text = view.textContent;", {**STATUS, "job": {**JOB, **job}})["text"]


def test_kept_measurements_are_listed_the_last_first_and_stay_open():
    older = {**KEPT, "when": "2026-10-01T08:00:00+01:00", "driver": None, "gpu": None}
    script = (
        VIEW
        + OPEN
        + """
        const rows = () => byTag('tr', view).slice(1).map((row) => row.textContent);
        shown.rows = rows();
        const details = byTag('details', view)[0];
        details.open = true;
        details.listeners.toggle();
        status.job = {kind: 'prepare', state: 'done', done: 1, total: 1, rows: []};
        await stableFast.refresh();
        shown.open = byTag('details', view)[0].open;
    """
    )
    shown = run(script, {**STATUS, "measurements": [older, KEPT]})
    assert shown["rows"] == [
        f"2026-11-24 21:05|512×512,|1|image|31.0|14.8|2.1|580.65|2.7|0.1.0|a card|{EVIL}",
        f"2026-10-01 08:00|512×512,|1|image|31.0|14.8|2.1|–|2.7|0.1.0|CPU|{EVIL}",
    ]
    assert shown["open"] is True


def test_without_an_answer_nothing_is_listed():
    assert run(VIEW + "status.measurements = {detail: 'x'};" + OPEN + "shown.text = view.textContent;") == {"text": ""}


def test_a_click_starts_to_ask():
    assert run("stableFast.watch(); shown.timers = timers.size;") == {"timers": 1}
