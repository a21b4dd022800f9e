from __future__ import annotations

import pytest

from benchmarks import marks

BEGIN, END = "<!-- begin -->", "<!-- end -->"


def test_what_is_between_the_marks_is_replaced_and_nothing_else():
    text = f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter {END}.\n"
    for _ in range(2):
        text = marks.replaced(text, BEGIN, END, "new\nlines")
    assert text == f"Before.\n\n{BEGIN}\nnew\nlines\n{END}\n\nAfter {END}.\n"


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}"])
def test_a_page_without_them_is_refused(text):
    with pytest.raises(ValueError, match="the page lacks <!-- "):
        marks.replaced(text, BEGIN, END, "new")
