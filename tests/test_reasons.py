"""The tables of reasons, and the page of their entries; the texts, pieces and identities of reasons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Formatter

import pytest
import torch

from sfast_ext import reasons
from sfast_ext.call_signature import NotOurs
from sfast_ext.hosts import reasons as of_hosts
from sfast_ext.reasons import MAX_LENGTH, Detail, Private, Reason, given

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
TABLE = (*reasons.TABLE, *of_hosts.TABLE)
WORD = re.compile("[A-Za-z]{2,}")
FORMER = {"different-picture": "different-image"}
"""Anchors that links from outside may name, with the codes that they are now."""


def made(kind):
    """A reason of a kind; its numbers are those of a template with a form."""
    fields = [form for _, field, form, _ in Formatter().parse(kind.template) if field is not None]
    return kind(*(0.25 if form else "thing" for form in fields))


def _imports_re(file):
    return re.search(r"^import re$", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def anchors():
    return re.findall(r'^<a id="([a-z0-9-]+)"></a>$', PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_tables_are_whole():
    # fewer would mean that rows are not in a table
    assert len(reasons.TABLE) > 65 and len(of_hosts.TABLE) > 35
    assert len(set(TABLE)) == len(TABLE)


def test_each_reason_has_an_entry_and_each_entry_of_reasons_has_a_reason():
    page, codes = anchors(), {kind.code for kind in TABLE}
    assert len(page) == len(set(page)) and codes <= set(page)
    of_reasons = PAGE.read_text(encoding="utf-8").partition("## Reasons in the report")[2]
    assert [entry for entry in page if f'id="{entry}"' in of_reasons and entry not in {*codes, *FORMER}] == []


@pytest.mark.parametrize(("former", "code"), FORMER.items())
def test_an_anchor_that_had_another_name_is_still_there(former, code):
    assert f'<a id="{former}"></a>\n<a id="{code}"></a>\n### ' in PAGE.read_text(encoding="utf-8")
    assert code in {kind.code for kind in TABLE} and former not in {kind.code for kind in TABLE}


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.template[:60])
def test_a_reason_is_a_sentence_in_pieces(kind):
    reason = made(kind)
    pieces = reason.pieces()
    assert "".join(pieces) == str(reason) and all(pieces)
    # nothing is put together of words and of what is put in
    constant = [piece for piece in pieces if piece not in ("thing", "0.25", str(0.25))]
    assert not [piece for piece in constant if "thing" in piece]
    assert all(piece == piece.strip() for piece in constant if WORD.search(piece))
    # a full stop and a capital are the report's; what to do stands by itself
    assert not str(reason).endswith(".") and reasons.BREAK not in reason.template
    assert str(reason).isascii() and (not kind.remedy or pieces[-2:] == [reasons.BREAK, kind.remedy])


def test_a_reason_of_the_core_names_no_host():
    told = " ".join(f"{kind.template} {kind.remedy}" for kind in reasons.TABLE)
    assert not re.search("WebUI|Settings|Forge|SD.Next|A1111|Extensions|Lora|Hypertile", told)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            reasons.INACCURATE(0.03, 0.02),
            "the accelerated step differs from the original by 0.03, more than the tolerance of 0.02",
        ),
        (
            reasons.UNEXPLAINED(float("inf"), 1e-5),
            "the accelerated step differs from the original by inf, more than rounding explains (1e-05)",
        ),
        (reasons.SLOWER(5.04, 4.9), "the accelerated step is slower than the original (5.0 ms against 4.9 ms)"),
        (reasons.READS_TENSOR([2, 77]), "its forward reads a tensor [2, 77] that is neither an argument nor a weight"),
        (reasons.READS_TENSOR("Foo"), "its forward reads a tensor Foo that is neither an argument nor a weight"),
        (reasons.WEIGHTS_SPLIT("cpu", torch.device("cuda", 1)), "some weights are on cpu, others on cuda:1"),
        (reasons.NOT_RECORDED("KeyError", ""), "its forward cannot be recorded: KeyError"),
        (reasons.NOT_RECORDED("KeyError", " (x.py:3 in f)"), "its forward cannot be recorded: KeyError (x.py:3 in f)"),
        (
            reasons.DIMENSIONS("xformers' f", 5),
            "xformers' f is called with tensors of 5 dimensions; 3 and 4 can be recorded",
        ),
        (
            of_hosts.HYPERNETWORK(Private("one; two")),
            "a hypernetwork is active: one; two; remove it from the prompt to accelerate",
        ),
        (of_hosts.INSIDE("{} {0}"), "{} {0} works inside the UNet; turn it off to accelerate"),
        (reasons.WEIGHT_GONE("a\n b"), "a b is gone"),
        (reasons.NOT_ON_GPU(torch.device("xpu")).of("VAE decoder"), "VAE decoder: the model is on xpu, not on a GPU"),
    ],
)
def test_texts(reason, text):
    assert str(reason) == text == "".join(reason.pieces())
    assert json.loads(json.dumps(reason.as_dict()))["text"] == text and hash(reason) == hash(given(reason))


def test_words_and_marks_are_apart():
    assert of_hosts.HYPERNETWORK("one; two").pieces() == [
        "a hypernetwork is active:", " ", "one; two", "; ", "remove it from the prompt to accelerate"
    ]  # fmt: skip
    assert reasons.INACCURATE(0.5, 0.25).pieces() == [
        "the accelerated step differs from the original by", " ", "0.5", ", ", "more than the tolerance of", " ", "0.25"
    ]  # fmt: skip
    assert reasons.READS_WEIGHT("q.weight").pieces() == [
        "its forward reads the value of a weight", " (", "q.weight", ") ", "as a number"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (reasons.SLOWER(5.0, 4.0), reasons.SLOWER(7.0, 6.0), True),
        (reasons.READS_TENSOR([2, 77]), reasons.READS_TENSOR([4, 154]), True),
        (reasons.BUILD_FAILED("capture", Detail("a")), reasons.BUILD_FAILED("capture", Detail("b")), True),
        (reasons.BUILD_FAILED("capture", Detail("a")), reasons.BUILD_FAILED("check", Detail("a")), False),
        (reasons.BUILD_FAILED("capture", Detail("a")), reasons.BUILD_NO_MEMORY("capture", Detail("a")), False),
        (reasons.WEIGHT_GONE("blocks.1"), reasons.WEIGHT_GONE("blocks.2"), False),
        (reasons.WEIGHT_GONE("x"), reasons.TORCH_GONE("x"), False),
        (reasons.OLD_GPU("6.1", "7.0"), reasons.OLD_GPU("5.2", "7.0"), False),
        (of_hosts.HYPERNETWORK(Private("a")), of_hosts.HYPERNETWORK("a"), True),
        (of_hosts.HYPERNETWORK(Private("a")), of_hosts.HYPERNETWORK(Private("b")), False),
        (of_hosts.LORA_IN_FP16(), of_hosts.LORA_OLD_METHOD(), False),
    ],
)
def test_numbers_and_messages_do_not_tell_reasons_apart(one, other, same):
    assert (one.identity() == other.identity()) is same


@pytest.mark.parametrize("kind", [of_hosts.HYPERNETWORK, of_hosts.SD_UNET])
def test_a_name_that_belongs_to_the_user_can_be_left_out(kind):
    reason = kind(Private("secret; face"))
    assert "secret" in str(reason) and "secret" not in str(reason.anonymous()) + repr(reason.anonymous())
    assert str(reason.anonymous()) == str(kind("<name>")) and reason.anonymous().code == reason.code
    assert "secret" not in str(reason.of("unet").anonymous())


def test_a_text_of_foreign_code_is_a_reason():
    reason = given("no: <Net object at 0x7fA0>\n  again")
    assert (reason.code, str(reason)) == ("other", "no: <Net object> again")
    assert given(reason) is reason and len(str(given(1000 * "x"))) == MAX_LENGTH
    with pytest.raises(NotOurs, match="^a text$") as raised:
        raise NotOurs("a text")
    assert raised.value.reason == given("a text")


def test_values_are_kept_as_json_has_them():
    class Odd:
        def __str__(self) -> str:
            return f"an <object at 0x7f1>{2000 * 'x'}"

    reason = Reason("other", "{} {} {}", reasons.OTHER(Odd()).values + (3, (1, 2)))
    assert len(reason.values[0]) == MAX_LENGTH and "0x" not in reason.values[0]
    assert json.loads(json.dumps(reason.as_dict()))["values"] == [reason.values[0], 3, [1, 2]]


def test_no_part_of_the_package_reads_the_sentence_of_a_reason():
    # addresses in foreign texts, paths, Markdown, sizes that a user types, names of models; the others are of code
    may = {
        "reasons.py", "ui/bug_report.py", "ui/help_page.py", "ui/requests.py", "capture/quantised.py",
        "behaviour/reach.py", "behaviour/value_types.py", "kernels/backend/cuda_libraries.py", "cli/parsers.py",
        "cli/values.py", "hosts/eight_bits.py",
    }  # fmt: skip
    package = ROOT / "sfast_ext"
    assert {file.relative_to(package).as_posix() for file in package.rglob("*.py") if _imports_re(file)} <= may
