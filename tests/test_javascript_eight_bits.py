"""What the badge and the tab say of 8 bits."""

from __future__ import annotations

from test_javascript import EVIL, READ, STATUS, run

PARTS = ["8 bits and", " ", EVIL, ", ", "which"]
NOTE = {"note": "".join(PARTS), "note_parts": PARTS, "note_help": "eight-bits"}
FOUND = {"on": True, "layers": 400, "kept": [[EVIL, 0.0312], ["b.to_out", None]], "bytes": 812 << 20, "note": None}
TAB = "shown.tab = document.getElementById('stable_fast_view').textContent;"


def test_a_note_stands_in_the_badge_and_in_the_tab_with_a_link():
    script = READ + TAB + """
        const link = byClass('sfast-note').all().find((each) => each.tag === 'a');
        Object.assign(shown, {href: link.href, images: byTag('img', body).length});
    """  # fmt: skip
    shown = run(script, {**STATUS, "badge": {**STATUS["badge"], **NOTE}})
    for text in (shown["details"], shown["tab"]):
        assert f"8 bits and|{EVIL}|,|which" in text
    assert shown["href"] == "./sfast/v1/help#eight-bits" and shown["images"] == 0


def test_without_a_note_there_is_none():
    script = "shown.notes = body.all().filter((each) => each.className === 'sfast-note').length;"
    for badge in (STATUS["badge"], {**STATUS["badge"], "note": None, "note_parts": [], "note_help": None}):
        assert run(script, {**STATUS, "badge": badge}) == {"notes": 0}


def test_the_tab_lists_the_layers_that_stay_in_half_precision():
    shown = run(TAB, {**STATUS, "eight_bits": FOUND})
    assert "Layers computed in 8 bits:|400|·|GPU memory for them:|812|MB" in shown["tab"]
    kept = "Layers that stay in half precision:|2|8 bits would change their results too much, by:"
    assert f"{kept}|{EVIL}|3.1 %" in shown["tab"]
    assert "b.to_out|an unknown amount" in shown["tab"]
    for nothing in ({**FOUND, "layers": 0, "kept": []}, None):
        assert "Layers computed in 8 bits" not in run(TAB, {**STATUS, "eight_bits": nothing})["tab"]
    assert "half precision" not in run(TAB, {**STATUS, "eight_bits": {**FOUND, "kept": []}})["tab"]


def test_the_list_stays_open_while_the_tab_is_drawn_anew():
    script = """
        const box = () => byTag('details', document.getElementById('stable_fast_view'))[0];
        shown.before = box().open;
        box().open = true;
        box().listeners.toggle();
        await stableFast.refresh();
        shown.after = box().open;
    """
    assert run(script, {**STATUS, "eight_bits": FOUND}) == {"before": False, "after": True}
