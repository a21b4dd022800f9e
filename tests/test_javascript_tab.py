"""What the tab puts first: the number that people came for, what to do, and what can be done now."""

from __future__ import annotations

import pytest
from test_javascript import EVIL, PLAN, STATUS, run

VIEW = "const view = document.getElementById('stable_fast_view');"


def test_the_number_is_a_headline():
    shown = run(VIEW + "shown.headline = byClass('sfast-headline', view).textContent;")
    assert shown == {"headline": "2.1×|faster"}


@pytest.mark.parametrize(
    "change",
    [
        {"enabled": False},
        {"no_gpu": "torch finds no GPU"},
        {"accelerators": []},
        {"accelerators": [{"name": "unet", "plans": [{**PLAN, "speedup": None}]}]},
        {"accelerators": [{"name": "unet", "plans": [{**PLAN, "last_pass": False}]}]},
    ],
    ids=str,
)
def test_without_a_number_there_is_none(change):
    assert run(VIEW + "shown.headline = Boolean(byClass('sfast-headline', view));", {**STATUS, **change}) == {
        "headline": False
    }


def test_the_entry_of_the_help_stands_next_to_what_is_said():
    badge = {"state": "original", "text": "original: x", "detail": "x is on.", "help": "hypertile"}
    script = VIEW + """
        const now = byClass('sfast-now sfast-is-original', view);
        shown.text = now.textContent;
        shown.href = now.all().find((each) => each.tag === 'a').href;
    """  # fmt: skip
    assert run(script, {**STATUS, "badge": badge}) == {
        "text": "x is on.|What to do", "href": "./sfast/v1/help#hypertile",
    }  # fmt: skip


def test_parts_of_the_model_have_names_that_people_know():
    networks = ["unet", "refiner", "controlnet", "VAE decoder", EVIL]
    accelerators = [{"name": name, "plans": [PLAN]} for name in networks]
    script = VIEW + "shown.parts = byTag('tr', view).slice(1).map((row) => row.children[1].textContent).sort();"
    shown = run(script, {**STATUS, "accelerators": accelerators})
    assert shown["parts"] == sorted(["image model", "refiner", "ControlNet", "VAE decoder", EVIL])


@pytest.mark.parametrize(
    ("error", "text"), [(0.0012, "0.12 %"), (0, "0 %"), (None, "–"), (0.0000049, "0.00049 %"), (0.02, "2 %")]
)
def test_a_difference_is_a_percentage(error, text):
    script = VIEW + "shown.last = byTag('tr', view)[1].children[8].textContent;"
    shown = run(script, {**STATUS, "accelerators": [{"name": "unet", "plans": [{**PLAN, "error": error}]}]})
    assert shown["last"] == text


GAUGE = VIEW + """
    const gauge = byClass('sfast-gauge', view);
    shown.width = gauge ? gauge.children[0].style.width : null;
    shown.text = view.textContent;
"""  # fmt: skip


@pytest.mark.parametrize(
    ("total", "eight", "width"),
    [(12288, 0, "1.0%"), (12288, 1 << 30, "9.3%"), (100, 0, "100.0%"), (None, 0, None), (0, 0, None)],
)
def test_a_gauge_shows_how_much_of_the_gpu_is_held(total, eight, width):
    environment = {**STATUS["environment"], "gpu_memory_mb": total}
    eight_bits = {"on": True, "layers": 1, "kept": [], "bytes": eight, "note": None}
    shown = run(GAUGE, {**STATUS, "environment": environment, "eight_bits": eight_bits})
    assert shown["width"] == width and "GPU memory held for fast replays:|120|MB" in shown["text"]
    assert ("of the GPU:" in shown["text"]) == bool(total) and ("for 8 bits:" in shown["text"]) == (eight > 0)


def test_without_a_pool_there_is_no_gauge():
    shown = run(GAUGE, {**STATUS, "accelerators": [{"name": "unet", "plans": [PLAN], "graph_pool": None}]})
    assert shown["width"] is None and "held" not in shown["text"]


BUTTONS = """
    const seen = {};
    ['on', 'off', 'cancel'].forEach((name) => {
        put(body, 'button', `stable_fast_${name}`).classList.toggle = (kind, value) => { seen[name] = !value; };
    });
    await stableFast.refresh();
    shown.seen = seen;
"""


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, {"on": False, "off": True, "cancel": False}),
        ({"enabled": False}, {"on": True, "off": False, "cancel": False}),
        ({"job": "running"}, {"on": False, "off": True, "cancel": True}),
        ({"job": "waiting"}, {"on": False, "off": True, "cancel": True}),
        ({"job": "done"}, {"on": False, "off": True, "cancel": False}),
        ({"job": "cancelled"}, {"on": False, "off": True, "cancel": False}),
        ({"job": "failed"}, {"on": False, "off": True, "cancel": False}),
    ],
    ids=str,
)
def test_what_can_be_done_now_is_seen(change, seen):
    job = {"kind": "prepare", "done": 0, "total": 1, "label": None, "seconds": 1, "seconds_left": None}
    job["message"] = None
    status = {**STATUS, **change}
    if "job" in change:
        status["job"] = {**job, "state": change["job"], "rows": []}
    assert run(BUTTONS, status) == {"seen": seen}


@pytest.mark.parametrize(("may", "said"), [("resolve", "Copied"), ("reject", "Not copied"), (None, "Not copied")])
def test_copying_says_whether_it_worked(may, said):
    board = {"resolve": "Promise.resolve()", "reject": "Promise.reject(new Error('no'))"}.get(may)
    navigator = "" if board is None else f"navigator.clipboard = {{writeText: () => {board}}};"
    script = navigator + """
        put(body, 'div', 'stable_fast_copied');
        await stableFast.copy('a report');
        shown.told = document.getElementById('stable_fast_copied').textContent;
    """  # fmt: skip
    assert run(script)["told"].startswith(said)


@pytest.mark.parametrize(("progress", "size"), [(0.4, "40% 2px"), (None, "0% 2px"), (0, "0% 2px"), (1, "100% 2px")])
def test_the_badge_shows_how_far_a_preparation_is(progress, size):
    badge = {"state": "preparing", "text": "preparing 512x512, 4 s left", "detail": ".", "progress": progress}
    shown = run("shown.size = byClass('sfast-state').style.backgroundSize;", {**STATUS, "badge": badge})
    assert shown == {"size": size}


FOLD = """
    globalThis.Node = {DOCUMENT_POSITION_FOLLOWING: 4};
    // the heading's inner part has its id as well
    const names = ['tolerance', 'enabled', 'expert_heading', 'triton', 'tolerance', 'expert_heading'];
    const ids = names.map((name) => `setting_sfast_${name}`);
    const settings = ids.map((id) => put(body, 'div', id));
    const hidden = {};
    settings.forEach((each, place) => {
        each.compareDocumentPosition = (other) => (settings.indexOf(other) > place ? 4 : 2);
        each.classList.toggle = (name, on) => { hidden[place] = on; };
    });
    const heading = settings[2];
    heading.querySelector = () => heading.children[0] || null;
    document.querySelectorAll = (selector) => (selector.endsWith('"setting_sfast_"]') ? settings : []);
    const search = put(body, 'input', 'search');
    search.value = '';
    document.querySelector = () => search;
    loaded.forEach((callback) => callback());
    const button = () => heading.children[0];
    const state = () => [{...hidden}, button().textContent, button().attributes['aria-expanded']];
    shown.first = state();
"""


def test_settings_for_experts_are_folded_away_and_others_are_not():
    script = FOLD + """
        button().listeners.click();
        shown.opened = state();
        button().listeners.click();
        shown.closed = state();
        // the host writes the heading anew
        heading.children = [];
        updated.forEach((callback) => callback());
        shown.anew = state();
    """  # fmt: skip
    shown = run(script)
    folded = [{"3": True, "4": True}, "Show these settings", "false"]
    assert shown["first"] == shown["closed"] == shown["anew"] == folded
    assert shown["opened"] == [{"3": False, "4": False}, "Hide these settings", "true"]


def test_what_is_searched_for_is_shown():
    script = FOLD + """
        search.listeners.input();
        shown.nothing = state();
        search.value = 'tolerance';
        search.listeners.input();
        shown.sought = state();
    """  # fmt: skip
    shown = run(script)
    assert shown["nothing"] == shown["first"] and shown["sought"][0] == {"3": False, "4": False}


def test_a_page_without_these_settings_is_left_alone():
    assert run("updated.forEach((callback) => callback()); shown.ends = true;") == {"ends": True}
