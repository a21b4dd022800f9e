"""Allocations that fail in the extension, next to those that fail in a host. On a pretended GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from pretended_card import GPU, Card, pretended_card

from sfast_ext.report import Report
from sfast_ext.runtime import shortages

DEVICE = torch.device(GPU)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with pretended_card(monkeypatch, 1 << 20) as card:
        yield card


def fail() -> None:
    torch.empty(2 << 20, dtype=torch.uint8, device=DEVICE)


def caught() -> None:
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        fail()


def test_what_is_caught_is_counted(card: Card) -> None:
    report = Report()
    with shortages.counted(report, DEVICE):
        caught()
        caught()
    assert report.counter("out_of_memory") == card.refused == 2 and shortages.of_host(report, DEVICE) == 0


def test_what_fails_outside_is_the_hosts(card: Card) -> None:
    report = Report()
    caught()
    with shortages.counted(report, DEVICE):
        pass
    assert report.counter("out_of_memory") == 0 and shortages.of_host(report, DEVICE) == 1


@pytest.mark.parametrize("counts", [False, True])
def test_an_error_that_is_raised_is_left_to_what_catches_it(card: Card, counts: bool) -> None:
    report = Report()
    with contextlib.suppress(torch.cuda.OutOfMemoryError), shortages.counted(report, DEVICE):
        caught()
        fail()
    report.count("out_of_memory", int(counts))
    assert shortages.of_host(report, DEVICE) == (not counts)


def test_other_errors_say_nothing_of_memory(card: Card) -> None:
    report = Report()
    with pytest.raises(ValueError, match="other"), shortages.counted(report, DEVICE):
        caught()
        raise ValueError("other")
    assert shortages.of_host(report, DEVICE) == 0


def test_what_is_counted_within_is_counted_once(card: Card) -> None:
    report = Report()
    with shortages.counted(report, DEVICE), shortages.counted(report, DEVICE):
        caught()
        report.count("out_of_memory")
    assert report.counter("out_of_memory") == 1


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_without_a_gpu_nothing_is_asked(device: torch.device | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", None)
    with shortages.counted(Report(), device):
        pass
