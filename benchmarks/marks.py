"""Tables that a program writes into a page, between two marks; the words around them are kept."""

from __future__ import annotations


def replaced(text: str, begin: str, end: str, new: str) -> str:
    """The page with `new` between its marks.

    Raises:
        ValueError: it lacks one of them.
    """
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"the page lacks {begin if not begun else end}")
    return f"{before}{begin}\n{new}\n{end}{after}"
