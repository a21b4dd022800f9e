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


DEFINITIONS = {
    "sfast_ext/": "Planner Found Shelf Homes Watch Watched Recipe Scene Later WARY BARREN EARLY KEEPS",
    "sfast_ext/runtime/": "_take _fill _hand_out _lay_out enter leave discard refuse ahead",
    "sfast_ext/capture/": "settle copied _again _Unlike",
    "sfast_ext/weights/": "bring at_home note let_go stale _adopt Slot",
    "sfast_ext/behaviour/": "tick due sure now holds brought shadows described",
    "sfast_ext/passes/": "peel same fake tail forth few operands fits summands halves",
    "sfast_ext/kernels/": "_kernel _whole _taps start runs multiplies collecting takes reads pays siblings further",
    "csrc/": "copy_back open close await pin wait arrive expect initialise initialised meet slot given",
}
"""By folder, terms that are words elsewhere: nothing is defined by these names there."""
_DEFINED = re.compile(r"^ *(?:async )?(?:def|class) (\w+)|^([A-Z]\w*)\b *[:=]", re.MULTILINE)
_DECLARED = re.compile(r"\b(?:void|int|u32|u64|float|bool|auto|[A-Z]\w*)[&* ]+(\w+)(?=[ (=,;)\[])")
_COMMENT = re.compile(r"//.*")


def definitions(name: str, text: str) -> list[str]:
    """The replaced terms that a file defines."""
    gone = {term for folder, terms in DEFINITIONS.items() if name.startswith(folder) for term in terms.split()}
    found = (
        _DECLARED.findall(_COMMENT.sub("", text))
        if name.startswith("csrc/")
        else sum(map(list, _DEFINED.findall(text)), [])
    )
    return sorted(gone.intersection(found))


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
        found += [f"{name} defines {term}" for term in definitions(name, text)]
    assert not found, "\n".join(found)


def test_a_replaced_term_is_noticed():
    assert occurrences("x = arena.lend_home()") == ["lend_home"]
    assert occurrences("the host\n    stands aside") == ["stands aside"]
    assert occurrences("a word untouched, and_linear_onto_more") == []


def test_a_definition_by_a_replaced_term_is_noticed():
    assert definitions("sfast_ext/passes/cse.py", "def same(a, b):\n    pass\n") == ["same"]
    assert definitions("sfast_ext/runtime/plan.py", "class Plan:\n    def _fill(self):\n        pass\n") == ["_fill"]
    assert definitions("sfast_ext/runtime/plan.py", "KEEPS = True\n") == ["KEEPS"]
    assert definitions("csrc/mma.h", "__device__ void wait(int slot) {\n  int stage = 0;\n") == ["slot", "wait"]
    # words elsewhere, and names that only begin so
    assert definitions("sfast_ext/ui/tab.py", "def same(a, b):\n    pass\n") == []
    assert definitions("csrc/mma.h", "// wait for the void slot\n__device__ void mbarrier_wait(u32 stage);\n") == []
