"""Files that the documents name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "tests", "sfast_ext", "sfast_ext/passes", "docs")
NAME = re.compile(r"`([\w/.-]+\.(?:py|cu|h|md))(?:::\w+)?`")


@pytest.mark.parametrize("page", ["features", "techniques", "architecture", "glossary"])
def test_each_file_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    names = sorted(set(NAME.findall(text)))
    missing = [name for name in names if not any((ROOT / folder / name).exists() for folder in FOLDERS)]
    assert len(names) > 5
    assert not missing
