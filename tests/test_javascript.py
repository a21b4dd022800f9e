"""The badge and the tab, in node with as much of a browser as they touch."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NODE = shutil.which("node")

BROWSER = """
class Element {
    constructor(tag) {
        Object.assign(this, {tag, style: {}, dataset: {}, children: [], listeners: {}, attributes: {}});
        Object.assign(this, {text: '', className: '', id: ''});
        this.classList = {toggle: (name, on) => { this.pinned = on; }};
        this.offsetParent = {};
        this.hidden = false;
    }
    set textContent(text) { this.text = String(text); this.children = []; }
    get textContent() {
        // style.css shows labels on narrow pages alone
        const seen = this.children.filter((child) => child.className !== 'sfast-label');
        return [this.text, ...seen.map((child) => child.textContent)].filter((each) => each.trim()).join('|');
    }
    set innerHTML(text) { throw new Error('innerHTML is never set'); }
    get parentElement() { return this.parent || null; }
    get clientWidth() { return 400; }
    get isConnected() { return this === body || Boolean(this.parent && this.parent.isConnected); }
    get previousElementSibling() {
        const all = this.parent ? this.parent.children : [];
        return all[all.indexOf(this) - 1] || null;
    }
    appendChild(child) {
        child.remove();
        child.parent = this;
        this.children.push(child);
    }
    get firstChild() { return this.children[0] || null; }
    insertBefore(child, other) {
        child.parent = this;
        this.children.splice(other ? this.children.indexOf(other) : this.children.length, 0, child);
    }
    remove() {
        if (this.parent) this.parent.children = this.parent.children.filter((each) => each !== this);
        this.parent = null;
    }
    after(other) {
        other.remove();
        other.parent = this.parent;
        this.parent.children.splice(this.parent.children.indexOf(this) + 1, 0, other);
    }
    closest(selector) {
        for (let each = this; each; each = each.parent) {
            if (selector.split(',').includes('#' + each.id)) return each;
        }
        return null;
    }
    all() { return [this, ...this.children.flatMap((child) => child.all())]; }
    querySelectorAll(selector) {
        const tags = selector.split(',').map((each) => each.trim().split(' ').pop());
        return this.all().filter((each) => tags.includes(each.tag));
    }
    setAttribute(name, value) { this.attributes[name] = value; }
    getAttribute(name) { return this.attributes[name]; }
    addEventListener(name, listener) { this.listeners[name] = listener; }
    getBoundingClientRect() {
        const {left, top, width, height} = this.box || {left: 0, top: 0, width: 0, height: 0};
        const x = left + (parseFloat(this.style.left) || 0);
        const y = top + (parseFloat(this.style.top) || 0);
        return {left: x, top: y, right: x + width, bottom: y + height, width, height};
    }
    focus() { document.activeElement = this; focused.push(this.textContent); }
    blur() {}
    click() { this.clicked = true; }
}
const focused = [];
const body = new Element('body');
const on = {};
globalThis.document = {
    createElement: (tag) => new Element(tag),
    createElementNS: (space, tag) => new Element(tag),
    createTextNode: (text) => Object.assign(new Element('#text'), {text}),
    getElementById: (id) => body.all().find((each) => each.id === id) || null,
    querySelectorAll: (selector) => body.querySelectorAll(selector),
    querySelector: () => null,
    addEventListener: (name, listener) => { on[name] = listener; },
    body, hidden: false
};
function put(parent, tag, id, text) {
    const element = new Element(tag);
    Object.assign(element, {id, text: text || ''});
    parent.appendChild(element);
    return element;
}
const actions = ['txt2img', 'img2img'].map((tab) => put(body, 'div', tab));
const boxes = actions.map((column) => put(column, 'div', column.id + '_generate_box'));
const buttons = boxes.map((box) => put(box, 'button', box.id.replace('_box', '')));
const tables = put(body, 'div', 'stable_fast_tables');
put(tables, 'div', 'stable_fast_view');
put(put(body, 'div', 'stable_fast_progress'), 'div', 'stable_fast_job');
globalThis.gradioApp = () => document;
globalThis.window = globalThis;
const seen = {};
Object.assign(window, {innerWidth: 400, innerHeight: 800});
window.addEventListener = (name, listener) => { seen[name] = listener; };
Object.defineProperty(globalThis, 'navigator', {value: {}, configurable: true});
globalThis.IntersectionObserver = class {
    constructor(callback) { this.callback = callback; }
    observe() { observers.push(this.callback); }
};
const observers = [];
// what the browser makes of the theme's colour
const colour = (element) => (element.tag === 'body' ? 'rgb(1, 2, 3)' : process.argv[2]);
globalThis.getComputedStyle = (element) => ({backgroundColor: colour(element)});
const loaded = [];
const updated = [];
globalThis.onUiLoaded = (callback) => loaded.push(callback);
globalThis.onAfterUiUpdate = (callback) => updated.push(callback);
globalThis.onOptionsChanged = () => {};
const timers = new Map();
globalThis.setInterval = (callback) => { const timer = {}; timers.set(timer, callback); return timer; };
globalThis.clearInterval = (timer) => timers.delete(timer);
let status = JSON.parse(process.argv[1]);
const fetched = [];
globalThis.fetch = async(url) => {
    fetched.push(url);
    const ok = typeof status === 'object' && status !== null;
    const part = ['measurements', 'comparison'].find((name) => url.endsWith(name));
    const answer = part === 'comparison' ? {comparison: status.comparison || null} : part ? status[part] : status;
    return {ok, status: status ?? 404, json: async() => answer};
};
const settle = () => new Promise((resolve) => setImmediate(resolve));
const badges = () => body.all().filter((each) => each.className === 'sfast-badge');
const byClass = (name, root) => (root || body).all().find((each) => each.className === name);
const byTag = (tag, root) => root.all().filter((each) => each.tag === tag);
const tick = async() => { [...timers.values()].forEach((callback) => callback()); await settle(); };
async function start() {
    loaded.forEach((callback) => callback());
    loaded.forEach((callback) => callback());
    await settle();
}
"""

PLAN = {
    "label": "512x512, 1 image, 77 tokens",
    "signature": "f16[2,4,64,64]",
    "state": "replaying",
    "ms_before": 31.0,
    "ms_after": 14.8,
    "speedup": 2.1,
    "replays": 30,
    "last_pass": True,
    "used_at": 1e9,
    "memory_mb": 120.0,
    "error": 0.0012,
}
EVIL = "<img src=x onerror=alert(1)>"
STATUS = {
    "version": "0.1.0",
    "enabled": True,
    "busy": False,
    "no_gpu": None,
    "preparing": None,
    "job": None,
    "measurements": [],
    "model": EVIL,
    "badge": {"state": "on", "text": "2.1x, 23 it/s", "detail": "The last image was accelerated."},
    "environment": {"gpu": "a card", "torch": "2.7"},
    "accelerators": [{"name": "unet", "plans": [PLAN], "graph_pool": {"graphs": 1, "memory_mb": 120.0}}],
    "reasons_listed": [],
    "last_error": None,
}


def run(script, status=STATUS, background="rgb(17, 24, 39)"):
    """What a script reports of the page, once its files are loaded into it."""
    if NODE is None:
        pytest.skip("node is not installed")
    files = [f"stable_fast{name}.js" for name in ("", "_charts", "_comparison", "_jobs", "_names", "_settings", "_tab")]
    sources = "".join((ROOT / "javascript" / file).read_text(encoding="utf-8") for file in files)
    told = f"(async() => {{ const shown = {{}}; await start(); {script}; console.log(JSON.stringify(shown)); }})();"
    result = subprocess.run(
        [NODE, "-e", BROWSER + sources + told, json.dumps(status), background],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


READ = """
    const [first] = badges();
    Object.assign(shown, {
        badge: byClass('sfast-text', first).textContent, state: byClass('sfast-state', first).dataset.state,
        sign: byClass('sfast-sign', first).textContent, details: byClass('sfast-details', first).textContent
    });
"""


def test_a_badge_stands_below_each_generate_button():
    shown = run(READ + "shown.after = badges().map((each) => each.previousElementSibling.id);")
    assert shown["after"] == ["txt2img_generate_box", "img2img_generate_box"]
    assert (shown["badge"], shown["state"]) == ("2.1× · 23 it/s", "on")
    for text in (
        "The last image",
        "512×512,|1|image,|77|tokens|2.1×|31.0 → 14.8|ms a step",
        "a card|·|torch|2.7",
    ):
        assert text in shown["details"]
    assert "f16" not in shown["details"]


def test_it_follows_a_button_that_the_theme_moves():
    script = """
        const elsewhere = put(body, 'div', 'elsewhere');
        elsewhere.appendChild(buttons[0]);
        updated.forEach((callback) => callback());
        shown.where = badges().map((each) => each.previousElementSibling.id);
        shown.count = badges().length;
    """
    shown = run(script)
    assert sorted(shown["where"]) == ["img2img_generate_box", "txt2img_generate"] and shown["count"] == 2


def test_in_a_button_of_the_theme_it_stands_last_in_the_group():
    script = """
        const group = put(body, 'div', 'txt2img_generate_group');
        put(group, 'button', 'around').appendChild(buttons[0]);
        put(group, 'button', 'stop');
        const move = () => updated.forEach((callback) => callback());
        move();
        shown.first = group.children.map((each) => each.className || each.id);
        put(group, 'button', 'late');
        move();
        move();
        shown.then = group.children.map((each) => each.className || each.id);
    """
    shown = run(script)
    assert shown["first"] == ["around", "stop", "sfast-badge"]
    assert shown["then"] == ["around", "stop", "late", "sfast-badge"]


@pytest.mark.parametrize(
    ("button", "moved", "panel"),
    [
        # left and top of the button; how far off an ancestor puts what is fixed; left and top of the panel
        ((200, 100), (0, 0), (60, 120)),
        ((20, 770), (0, 0), (8, 680)),
        ((360, 770), (30, 40), (192, 680)),
        ((20, 60), (0, 0), (8, 80)),
    ],
)
def test_details_are_within_the_window(button, moved, panel):
    script = f"""
        const [first] = badges();
        const [button, panel] = ['sfast-state', 'sfast-details'].map((name) => byClass(name, first));
        button.box = {{left: {button[0]}, top: {button[1]}, width: 60, height: 20}};
        panel.box = {{left: {moved[0]}, top: {moved[1]}, width: 200, height: 90}};
        first.listeners.mouseenter();
        const at = () => [panel.getBoundingClientRect().left, panel.getBoundingClientRect().top];
        shown.at = at();
        seen.scroll();
        shown.again = at();
        button.box.top = 300;
        seen.scroll();
        shown.scrolled = at()[1];
    """
    assert run(script) == {"at": list(panel), "again": list(panel), "scrolled": 320}


@pytest.mark.parametrize(("own", "clicked"), [(True, [True, False]), (False, [False, True])])
def test_the_link_opens_the_tab_by_the_theme_s_own_button(own, clicked):
    script = """
        const tabs = [put(body, 'button', 'st', 'stableFast'), put(body, 'button', 'tab', 'Stable Fast ')];
        body.querySelectorAll = (selector) => (selector.includes('tabitemid') ? OWN : [tabs[1]]);
        byClass('sfast-link').listeners.click();
        shown.clicked = tabs.map((tab) => Boolean(tab.clicked));
    """.replace("OWN", "[tabs[0]]" if own else "[]")
    assert run(script) == {"clicked": clicked}


def test_a_screen_reader_hears_of_states_and_not_of_numbers():
    script = """
        const heard = [];
        const live = byClass('sfast-live');
        const states = [['on', '2.1x, 23 it/s'], ['on', '2.1x, 24 it/s'], ['off', 'off'], ['off', 'off']];
        for (const [state, text] of states) {
            status.badge = {...status.badge, state, text};
            await stableFast.refresh();
            if (heard[heard.length - 1] !== live.textContent) heard.push(live.textContent);
        }
        Object.assign(shown, {heard, role: live.attributes.role});
    """
    assert run(script) == {"heard": ["Stable Fast|2.1× · 23 it/s", "Stable Fast|off"], "role": "status"}


def test_states_differ_by_sign_and_word():
    signs = {}
    for state in ("on", "partly", "preparing", "ready", "original", "off"):
        shown = run(READ, {**STATUS, "badge": {"state": state, "text": state, "detail": "."}})
        signs[state] = shown["sign"]
    assert len(set(signs.values())) == len(signs)


def test_details_open_by_keyboard_and_close_without_interrupting_the_image():
    script = """
        const [first] = badges();
        const button = byClass('sfast-state', first);
        button.listeners.click();
        shown.open = button.attributes['aria-expanded'];
        let stopped = false;
        first.listeners.keydown({key: 'Escape', stopPropagation: () => { stopped = true; }});
        // who closes them by keyboard stays there
        const stays = document.activeElement === button;
        Object.assign(shown, {closed: button.attributes["aria-expanded"], stopped, stays});
        shown.described = byClass('sfast-details', first).id === button.attributes['aria-describedby'];
    """
    expected = {"open": "true", "closed": "false", "stopped": True, "stays": True, "described": True}
    assert run(script) == expected


@pytest.mark.parametrize("background", ["rgba(0, 0, 0, 0)", "rgba(32, 32, 32, 0.25)", "transparent", "rgb(17, 24, 39)"])
def test_nothing_shines_through(background):
    script = """
        const [first] = badges();
        first.listeners.mouseenter();
        shown.colour = byClass('sfast-details', first).style.backgroundColor;
    """
    # an opaque colour is left to the theme, which may come after the page
    below = "" if background.startswith("rgb(") else "rgb(1, 2, 3)"
    assert run(script, background=background) == {"colour": below}


@pytest.mark.parametrize(
    "name", [EVIL, "\"quoted\" 'twice' </td>&amp;`${1}", "\u202eright-to-left \u05e9\u05dc\u05d5\u05dd", "x" * 300]
)
def test_names_are_text(name):
    reason = {"reason": name + " 4x", "code": "a b", "calls": 3, "calls_last": 1, "seconds_ago": 5}
    badge = {"state": "original", "text": f"original: {name} 4x", "detail": name}
    rows = [{"label": name, "size": "512x512", "images": 1, "ready": False, "reason": name}]
    job = {"kind": "measure", "state": "failed", "done": 1, "total": 1, "message": name, "rows": rows}
    kept = [{"when": name, "model": name, "gpu": name, "driver": name, "torch": name, "version": name, "rows": rows}]
    environment, unet = {"gpu": name, "torch": name}, {"name": name, "plans": [{**PLAN, "label": name}]}
    more = {"model": name, "environment": environment, "accelerators": [unet], "job": job, "measurements": kept}
    script = """
        observers.forEach((each) => each([{isIntersecting: true}]));
        await settle();
        shown.tab = document.getElementById('stable_fast_view').textContent;
        shown.job = document.getElementById('stable_fast_job').textContent;
    """
    shown = run(READ + script, {**STATUS, "badge": badge, "reasons_listed": [reason], **more})
    # the stand-in of the page raises if HTML is set
    assert shown["badge"] == f"original: {name} 4x" and name in shown["details"]
    assert name + " 4x" in shown["tab"] and shown["tab"].count(name) >= 5
    assert shown["job"].count(name) >= 7


def test_without_an_answer():
    assert run(READ, None)["badge"] == "no status"


@pytest.mark.parametrize("code", ["hypernetwork", None])
def test_the_details_link_to_what_can_be_done_if_something_can(code):
    script = READ + "shown.links = byTag('a', byClass('sfast-details')).map((each) => each.href);"
    shown = run(script, {**STATUS, "badge": {**STATUS["badge"], "help": code}})
    assert shown["links"] == ([] if code is None else ["./sfast/v1/help#hypernetwork"])


def test_a_link_keeps_the_focus_while_the_details_are_drawn_anew():
    script = """
        const panel = byClass('sfast-details', badges()[0]);
        const before = byTag('a', panel)[0];
        before.focus();
        await stableFast.refresh();
        const after = byTag('a', panel)[0];
        Object.assign(shown, {anew: after !== before, focused: document.activeElement === after});
    """
    status = {**STATUS, "badge": {**STATUS["badge"], "help": "hypernetwork"}}
    assert run(script, status) == {"anew": True, "focused": True}


def test_who_is_not_logged_in_is_told_so():
    assert run(READ, 401)["badge"] == "log in for status"


VIEW = "const view = document.getElementById('stable_fast_view'); shown.text = view.textContent;"


def test_the_tab_shows_what_runs_what_is_ready_and_why_not():
    old = {"reason": "Hypertile is on", "code": "hypertile", "calls": 90, "calls_last": 0, "seconds_ago": 7200}
    new = {"reason": "a hypernetwork is active", "code": "hypernetwork", "calls": 3, "calls_last": 3, "seconds_ago": 4}
    script = VIEW + "shown.links = byTag('a', view).map((each) => each.href);"
    shown = run(script, {**STATUS, "reasons_listed": [new, old]})
    first = "Stable Fast|0.1.0|·|on|·|Settings|2.1×|faster|The last image was accelerated."
    assert shown["text"].startswith(first)
    for text in ("Original|31.0 ms", "Stable Fast|14.8 ms", "512×512,|1|image,|77|tokens|(last image)|image model"):
        assert text in shown["text"]
    reasons = ("a hypernetwork is active|What to do|3|3|4|s ago", "Hypertile is on|What to do|0|90|2|h ago")
    for text in (*reasons, "0.12 %"):
        assert text in shown["text"]
    assert shown["links"] == ["./sfast/v1/help#hypernetwork", "./sfast/v1/help#hypertile"]


def test_plans_are_sorted_by_any_column_and_the_focus_stays():
    other = {**PLAN, "label": "768x512", "ms_before": 40.0, "speedup": None, "last_pass": False, "used_at": 5.0}
    status = {**STATUS, "accelerators": [{"name": "unet", "plans": [other, PLAN]}]}
    script = """
        const view = document.getElementById('stable_fast_view');
        const sizes = () => byTag('tr', view).slice(1).map((row) => row.children[0].textContent.slice(0, 7));
        const head = (name) => byTag('button', view).find((each) => each.textContent.startsWith(name));
        shown.used = sizes();
        head('Before').listeners.click();
        shown.before = sizes();
        head('Before').listeners.click();
        shown.turned = sizes();
        head('Times').focus();
        head('Times').listeners.click();
        shown.unknown_last = sizes();
        shown.sort = byTag('th', view).map((each) => each.attributes['aria-sort']).filter((each) => each !== 'none');
        shown.focused = focused.pop();
    """
    shown = run(script, status)
    assert shown["used"] == ["512×512", "768×512"] and shown["before"] == ["768×512", "512×512"]
    assert shown["turned"] == ["512×512", "768×512"] and shown["unknown_last"] == ["512×512", "768×512"]
    assert shown["sort"] == ["descending"] and shown["focused"].startswith("Times faster")


def test_the_tab_asks_when_it_is_opened():
    shown = run("observers.forEach((each) => each([{isIntersecting: true}])); await settle(); shown.urls = fetched;")
    assert shown["urls"] == [
        "./sfast/v1/status", "./sfast/v1/measurements", "./sfast/v1/status", "./sfast/v1/comparison"
    ]  # fmt: skip


def test_without_a_gpu_that_is_said_and_no_number():
    badge = {"state": "none", "text": "no supported NVIDIA GPU", "detail": "torch finds no NVIDIA GPU."}
    status = {**STATUS, "no_gpu": "torch finds no NVIDIA GPU", "badge": badge}
    shown = run(READ + VIEW, status)
    assert shown["badge"] == "no supported NVIDIA GPU" and "31.0" not in shown["details"]
    assert "Original|31.0" not in shown["text"]
