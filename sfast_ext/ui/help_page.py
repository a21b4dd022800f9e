"""docs/troubleshooting.md as a page that the WebUI serves: there without a network, and of the version that runs."""

from __future__ import annotations

import functools
import html as escapes
import itertools
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"

STYLE = (
    "body{max-width:46em;margin:2em auto;padding:0 1em;font:16px/1.5 system-ui,sans-serif;color-scheme:light dark}"
    "code{font-size:.9em}:target+h3{text-decoration:underline}"
)
_ANCHOR = re.compile(r'<a id="[a-z0-9-]+"></a>')
_INLINE = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<b>\1</b>"),
    (re.compile(r"\*([^*]+)\*"), r"<i>\1</i>"),
)


@functools.lru_cache(maxsize=1)
def html() -> str:
    """The page. If the file is missing, a sentence that says so."""
    try:
        text = PAGE.read_text(encoding="utf-8")
    except OSError:
        text = "# Troubleshooting\n\nThe file docs/troubleshooting.md of the extension is missing."
    body = "\n".join(_block(block) for block in re.split(r"\n{2,}", text.strip()))
    head = f'<meta charset="utf-8"><title>Stable Fast: troubleshooting</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _block(block: str) -> str:
    """A heading, with its anchors before it, or a paragraph: that page has nothing else."""
    lines = block.splitlines()
    anchors = list(itertools.takewhile(_ANCHOR.fullmatch, lines))
    anchor, rest = "".join(anchors), lines[len(anchors) :]
    level = len(rest[0]) - len(rest[0].lstrip("#")) if rest else 0
    if level:
        return f"{anchor}<h{level}>{_inline(rest[0][level:].strip())}</h{level}>"
    return f"{anchor}<p>{_inline(' '.join(rest))}</p>"


def _inline(text: str) -> str:
    text = escapes.escape(text, quote=False)
    for pattern, form in _INLINE:
        text = pattern.sub(form, text)
    return text
