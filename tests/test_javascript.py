"""The badge, in node with as much of a browser as it touches."""

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
        Object.assign(this, {tag, style: {}, dataset: {}, children: [], listeners: {}, hidden: false, text: ''});
    }
    set textContent(text) { this.text = text; this.children = []; }
    get textContent() {
        return [this.text, ...this.children.map((child) => child.textContent)].filter(Boolean).join('|');
    }
    appendChild(child) { this.children.push(child); }
    append(...children) { this.children.push(...children); }
    addEventListener(name, listener) { this.listeners[name] = listener; }
    getBoundingClientRect() { return {top: 770}; }
}
const body = new Element('body');
globalThis.document = {createElement: (tag) => new Element(tag), body, hidden: false};
globalThis.gradioApp = () => document;
globalThis.window = {innerHeight: 800};
// what the browser makes of the theme's colour
globalThis.getComputedStyle = () => ({backgroundColor: process.argv[2]});
const loaded = [];
globalThis.onUiLoaded = (callback) => loaded.push(callback);
globalThis.onOptionsChanged = () => {};
const timers = new Set();
globalThis.setInterval = () => { const timer = {}; timers.add(timer); return timer; };
globalThis.clearInterval = (timer) => timers.delete(timer);
const status = JSON.parse(process.argv[1]);
const fetched = [];
globalThis.fetch = async(url) => {
    fetched.push(url);
    return {ok: typeof status === 'object' && status !== null, status: status ?? 404, json: async() => status};
};
const settle = () => new Promise((resolve) => setImmediate(resolve));
"""

SCRIPT = """
(async() => {
    loaded.forEach((callback) => callback());
    loaded.forEach((callback) => callback());
    await settle();
    const [panel, badge] = body.children;
    const shown = {badge: badge.textContent, state: badge.dataset.state};
    Object.assign(shown, {elements: body.children.length, idle: timers.size});
    badge.listeners.click();
    await settle();
    shown.panel = panel.textContent;
    Object.assign(shown, {style: badge.style, above: panel.style.bottom, panelStyle: panel.style});
    shown.open = timers.size;
    badge.listeners.click();
    await settle();
    shown.closed = timers.size;
    shown.urls = [...new Set(fetched)];
    console.log(JSON.stringify(shown));
})();
"""

STATUS = {
    "version": "0.1.0",
    "enabled": True,
    "model": "<b>model</b>",
    "environment": {"gpu": "a card", "torch": "2.7"},
    "accelerators": [
        {
            "plans": [
                {
                    "signature": "f16[2,4,64,64]",
                    "state": "replaying",
                    "ms_before": 24.61,
                    "ms_after": None,
                    "replays": 30,
                    "captures": 1,
                }
            ]
        }
    ],
    "reasons": {"a hypernetwork is active": 3},
    "last_error": None,
}


def show(status, background="rgb(17, 24, 39)"):
    if NODE is None:
        pytest.skip("node is not installed")
    source = BROWSER + (ROOT / "javascript" / "stable_fast.js").read_text(encoding="utf-8") + SCRIPT
    result = subprocess.run(
        [NODE, "-e", source, json.dumps(status), background], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_badge_and_panel():
    shown = show(STATUS)
    assert (shown["badge"], shown["state"], shown["elements"]) == ("Stable Fast: accelerated", "on", 2)
    for text in ("a card", "torch 2.7", "<b>model</b>", "24.6 ms → –", "30 calls", "3 × a hypernetwork is active"):
        assert text in shown["panel"]
    assert shown["urls"] == ["./sfast/v1/status"]


def test_it_asks_again_only_while_the_panel_is_open():
    shown = show(STATUS)
    assert (shown["idle"], shown["open"], shown["closed"]) == (0, 1, 0)


@pytest.mark.parametrize(
    ("change", "badge"),
    [
        ({"enabled": False}, "Stable Fast: off"),
        ({"accelerators": [], "reasons": {}}, "Stable Fast: ready"),
        ({"accelerators": []}, "Stable Fast: bypassed"),
        (
            {"accelerators": [{"plans": [{"signature": "x", "state": "running without a graph"}]}]},
            "Stable Fast: accelerated, no CUDA graph",
        ),
    ],
)
def test_words(change, badge):
    assert show({**STATUS, **change})["badge"] == badge


def test_it_is_on_while_the_host_has_the_memory_of_the_weights():
    accelerator = {"plans": [{"signature": "x", "state": "running without a graph"}], "weights": {"away": True}}
    assert show({**STATUS, "accelerators": [accelerator]})["badge"] == "Stable Fast: accelerated"


@pytest.mark.parametrize("background", ["rgba(0, 0, 0, 0)", "rgba(32, 32, 32, 0.25)", "rgb(17, 24, 39)"])
def test_nothing_shines_through(background):
    shown = show(STATUS, background)
    for style in (shown["style"], shown["panelStyle"]):
        assert (style["background"] == "#2b2b2b") == background.startswith("rgba")
        assert "opacity" not in style and 999 < int(style["zIndex"]) < 1001
    assert shown["above"] == "34px"


def test_blocks_that_run_one_by_one():
    parts = [{"name": f"unet.{i}", "plans": plans, "replays": 30 * plans} for i, plans in enumerate((1, 0, 2))]
    shown = show({**STATUS, "accelerators": [{"name": "unet", "plans": [], "parts": parts}]})
    assert shown["badge"] == "Stable Fast: accelerated, block by block"
    assert "unet: 2 blocks, one by one · 90 calls" in shown["panel"]


def test_what_another_forward_runs_past_is_not_on():
    part = {"name": "unet.0", "plans": 1, "calls": 3, "replays": 2}
    accelerator = {"name": "unet", "parts": [part], "idle": "cached.forward calls no blocks"}
    shown = show({**STATUS, "accelerators": [{**STATUS["accelerators"][0], **accelerator}]})
    assert shown["badge"] == "Stable Fast: bypassed"
    assert "unet: cached.forward calls no blocks" in shown["panel"]


def test_without_an_answer():
    assert show(None)["badge"] == "Stable Fast: no status"


def test_who_is_not_logged_in_is_told_so():
    assert show(401)["badge"] == "Stable Fast: log in for status"
