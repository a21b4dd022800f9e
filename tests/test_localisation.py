"""Texts of the page are constant and stand by themselves, so that a localisation of the host finds them.

AUTOMATIC1111 translates text nodes, each as a whole, and dumps those that it has seen (javascript/localization.js). A
text that is put together of words and of numbers or names is another one each time.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from test_javascript import PLAN, STATUS, run
from test_javascript_jobs import JOB, KEPT, ROW

from sfast_ext.hosts.reasons import HYPERNETWORK
from sfast_ext.report import Report
from sfast_ext.ui import settings_table, words

ROOT = Path(__file__).resolve().parents[1]
WORD = re.compile("[A-Za-z]{3,}")
DRAW = """
    observers.forEach((each) => each([{isIntersecting: true}]));
    await settle();
    shown.texts = body.all().map((each) => String(each.text)).filter(Boolean);
"""


def dumped(status):
    """What the host would dump: the text nodes with words."""
    return {text.strip() for text in run(DRAW, status)["texts"] if WORD.search(text)}


def other(value):
    """The same data with other words and numbers. What code asks for stays."""
    if isinstance(value, dict):
        kept = ("kind", "state", "code", "name")
        labels = {key: re.sub(r"\d+", lambda found: f"{found[0]}8", value[key]) for key in value if key == "label"}
        return {**{key: each if key in kept else other(each) for key, each in value.items()}, **labels}
    if isinstance(value, list):
        return [other(each) for each in value]
    if isinstance(value, str):
        return f"other {value[::-1]}"
    return value if value is None or isinstance(value, bool) else value + 1.5


def strings(value):
    if isinstance(value, dict):
        return {text for each in value.values() for text in strings(each)}
    if isinstance(value, list):
        return {text for each in value for text in strings(each)}
    return {value} if isinstance(value, str) else set()


def typeset(text):
    """As stable_fast.js does."""
    text = re.sub(r"(\d)x(?=\d|\b)", r"\1×", text, flags=re.ASCII).replace("->", "→")
    return re.sub(r"× *, ", "× · ", text)


REASON = {"reason": "a reason", "code": "other", "calls": 3, "calls_last": 1, "seconds_ago": 5}
NO_TIMES = {**PLAN, "speedup": None, "last_pass": False}
PAGES = {
    "plans and reasons": {
        **STATUS,
        "reasons_listed": [REASON, {**REASON, "seconds_ago": 1000.0}, {**REASON, "seconds_ago": 90000.0}],
        "accelerators": [{"name": "unet", "plans": [PLAN, NO_TIMES], "graph_pool": {"memory_mb": 120.0}}],
    },
    "nothing": {**STATUS, "accelerators": [], "model": None, "environment": {"gpu": None, "torch": "2.7"}},
    "no GPU": {**STATUS, "no_gpu": "torch finds no GPU", "accelerators": []},
    **{
        state: {**STATUS, "job": {**JOB, "state": state, "message": "a message"}, "measurements": [KEPT]}
        for state in ("waiting", "running", "done", "cancelled", "failed")
    },
    "prepare": {**STATUS, "job": {**JOB, "kind": "prepare", "rows": [ROW, {**ROW, "ready": False, "reason": None}]}},
}


@pytest.mark.long(but=[0, 4, 7])
@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_adds_to_data_is_the_same_whatever_the_data(page):
    status = PAGES[page]
    data = {typeset(text) for text in strings(status)} | strings(status)
    # dates are cut
    data |= {text[:16].replace("T", " ") for text in strings(status)}
    constant = dumped(status) - data
    assert len(constant) > 5, constant
    assert constant <= dumped(other(status)), "put together of words and data"


def test_words_of_a_plan_s_name_stand_by_themselves():
    status = {**PAGES["plans and reasons"], "job": {**JOB, "label": PLAN["label"]}, "measurements": [KEPT]}
    texts = dumped(status)
    assert {"image,", "tokens", "image"} <= texts and not any("512" in text for text in texts)
    accelerators = [
        {"name": f"VAE {part}", "plans": [{**PLAN, "label": f"VAE {part}, 512x512{more}"}], "graph_pool": None}
        for part, more in (("decoder", ""), ("encoder", ", 2 images"))
    ]
    texts = dumped({**status, "accelerators": accelerators})
    assert {"VAE decoder,", "VAE encoder,", "images"} <= texts and not any("512" in text for text in texts)


def test_a_text_that_is_put_together_would_be_found():
    """The comparison above on a page that does it."""
    script = "stableFast.add(body, 'p', `The model is ${status.model}`);" + DRAW
    found = [
        {text for text in run(script, status)["texts"] if text.startswith("The model")}
        for status in (STATUS, other(STATUS))
    ]
    assert found[0] and not found[0] <= found[1]


def bypassed(name, steps):
    """A page after an image with this hypernetwork, as a session gives it."""
    report = Report()
    report.bypassed(HYPERNETWORK(name))
    rows = [{**row, "calls_last": steps} for row in report.as_dict()["reasons_listed"]]
    last = {"accelerated": 9 if steps < 9 else 0, "bypassed": steps, "prepared": 0}
    status = {**STATUS, "last_pass": last, "reasons_listed": rows}
    return {**status, "badge": words.badge(status)}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (12, {"original:", "The last image was not accelerated:"}),
        (3, {"partly,", "steps of the last image were not accelerated:"}),
    ],
)
def test_names_and_numbers_in_sentences_are_texts_of_their_own(steps, said):
    one, other = (dumped(bypassed(name, number)) for name, number in (("anime", steps), ("<b>x</b> is on", steps + 1)))
    # a name may have a phrase in it
    names = {"anime", "anime;", "<b>x</b>", "is on"}
    assert one - names == other - names
    assert {*said, "a hypernetwork is active:", "remove it from the prompt to accelerate"} <= one


def constants(node):
    """Whether an expression is a constant text, or a choice among such."""
    if isinstance(node, ast.IfExp):
        return constants(node.body) and constants(node.orelse)
    return isinstance(node, (ast.Constant, ast.Name, ast.Attribute))


def test_the_tab_s_own_texts_are_constants():
    tree = ast.parse((ROOT / "sfast_ext" / "ui" / "tab.py").read_text(encoding="utf-8"))
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(getattr(node.func, "value", None), "id", "") == "gradio"
    ]
    texts = [*(arg for each in made for arg in each.args)]
    texts += [key.value for each in made for key in each.keywords if key.arg in ("label", "info", "placeholder")]
    assert len(texts) > 12 and all(constants(text) for text in texts)
    # and what buttons answer has its words in elements of their own
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.Constant) and WORD.search(re.sub("<[^>]*>", "", part.value)):
                    assert re.search("</?span>", part.value), part.value


def test_settings_are_short_enough_to_be_translated_and_named_once():
    labels = [setting.label for setting in settings_table.ALL]
    assert len(set(labels)) == len(labels) and all(len(label) <= 60 for label in labels)
    assert all(len(setting.info) <= 300 for setting in settings_table.ALL)
    assert json.dumps([setting.info for setting in settings_table.ALL]).isascii()
