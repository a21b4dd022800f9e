"""Sentences in pieces: what is the same in each sentence of a kind is a piece of its own."""

from __future__ import annotations

import re

import pytest

from sfast_ext.ui import phrases, words
from ui.test_reasons import FOUND
from ui.test_words import status

WORD = re.compile("[A-Za-z]{2,}")
# what is put in begins with a space where it follows a word
REASONS = sorted({re.sub("(?<=[a-z])thing", " thing", text) for _, text in FOUND})
ROW = {"reason": "a hypernetwork is active: one", "calls_last": 2, "code": "hypernetwork"}
PREPARING = {"label": "512x512, 2 pictures, 77 tokens", "stage": "recording", "seconds": 3.0}
STATES = {
    "on": {},
    "partly": {"last_pass": {"accelerated": 5, "bypassed": 4}, "reasons_listed": [ROW]},
    "original": {"last_pass": {"bypassed": 4}, "reasons_listed": [ROW]},
    "none": {"no_gpu": "torch finds no NVIDIA GPU"},
    "unserved": {"unserved": "this WebUI lacks what Stable Fast relies on: modules.shared has no opts"},
    "preparing": {"preparing": PREPARING},
    "preparing, batch": {"preparing": {**PREPARING, "label": "512x512, batch 3, 77 tokens"}},
    "preparing, one": {"preparing": {**PREPARING, "label": "512x512, 1 picture, 77 tokens"}},
}
SAID = [text for change in STATES.values() for text in (words.badge(status(**change))[k] for k in ("text", "detail"))]


@pytest.mark.parametrize("text", [*REASONS, *SAID, "", ".", "a. b.", "<img onerror=alert(1)>"])
def test_pieces_make_the_sentence(text):
    assert "".join(phrases.pieces(text)) == text and all(phrases.pieces(text))


# "thing" stands for what is put in
@pytest.mark.parametrize("text", [text for text in REASONS if re.search(r"\bthing\b", text)])
def test_what_is_put_into_a_reason_is_a_piece_of_its_own(text):
    others = [piece for piece in phrases.pieces(text) if piece not in phrases.PHRASES and "thing" in piece]
    assert others
    # names of functions that are part of the sentence
    left = re.sub("thing|flex_attention|xformers'|ms", "", " ".join(others))
    assert not WORD.search(left), others


def test_no_phrase_is_missing_from_the_sentences():
    told = [*REASONS, *SAID]
    assert not [phrase for phrase in phrases.PHRASES if not any(phrase in phrases.pieces(text) for text in told)]


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_the_badge_s_words_are_pieces_whatever_its_data(change):
    def constant(**more):
        found = words.badge(status(**change, **more))
        parts = [*phrases.pieces(found["text"]), *phrases.pieces(found["detail"])]
        return {part.strip() for part in parts if WORD.search(part.replace("it/s", ""))}

    again = {"calls_per_s": 7.0, "plans": [{"speedup": 1.3, "replays": 2, "last_pass": True}]}
    assert constant() == constant(accelerators=[again])


def test_a_full_stop_is_no_part_of_the_reason():
    reason = "the WebUI is training"
    parts = phrases.pieces(f"The last picture was not accelerated: {reason}.")
    assert [part.strip() for part in parts] == ["The last picture was not accelerated:", reason, "."]
