"""Terms that were replaced: docs/glossary.md has the words in use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXEMPT = ("CHANGELOG.md", "benchmarks/results/", "tests/test_old_terms.py")
"""A changelog names what was removed, and recorded results keep the words they were recorded with."""

TERMS = """
stand_aside _STAND_ASIDE report.fallback stepped_around has_xformers
Planner _runs_ahead _still_so _wary_of_weights _wary_of_behaviour Shelf pardon LAPSES _asked_in_vain _made_room
_refuse_what_is_too_far uncollected too_far _hand_out _lay_out _unwritten
_Watching capture_watched _GivenUp _Remembering _Copier Unrepeatable functionalise
ArenaPart lend_home lay_back must_fit read_by_others _make_way when_alone
NoScene looks_alike classes_hold home_of strangers _KEEPS_BOOKS
untouchable common_subexpressions linear_onto sum_group_norm plain_convolutions replace_by_product takes_patches
begin_early beginning_early begins_early beginnings_are_kept are_collected further_sizes
copied_back after_previous next_may_begin show_to_copies shared_rows from_registers
of_the_host look_at_parts _beneath AT_REST may_stay may_wait may_be_joined UnetHooks HostMemory LEFT_BEHIND
standing_reason passing_reason _come_beside hosts_standin sdnext_standin
""".split()  # noqa: SIM905
PHRASES = ("group_sums.h", "stands aside", "standing aside", "stand aside", "stepped around", "copy engine")


def occurrences(text: str) -> list[str]:
    """The replaced terms in a text."""
    words = set(re.findall(r"[\w.]+", text)) | set(re.findall(r"\w+", text))
    lowered = " ".join(text.lower().split())
    return [term for term in TERMS if term in words] + [phrase for phrase in PHRASES if phrase in lowered]


def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if not name.startswith(EXEMPT) and (ROOT / name).is_file()]


def test_no_file_has_a_term_that_was_replaced():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    found = []
    for name in files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {term}" for term in occurrences(f"{name} {text}")]
    assert not found, "\n".join(found)


def test_a_replaced_term_is_noticed():
    assert occurrences("x = arena.lend_home()") == ["lend_home"]
    assert occurrences("the host\n    stands aside") == ["stands aside"]
    assert occurrences("a word untouched, and_linear_onto_more") == []
