from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sfast_ext.kernels.backend import graph_branch, pdl

DEVICE = torch.device("cpu")


class Stream:
    """Notes what is asked of streams, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device, self.events = name, log, DEVICE, 0

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events}"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, Stream, list[str]]]:
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    with pdl.pdl_capture(()):
        yield main, side, log


def launch(log: list[str], what: str) -> None:
    log.append(f"{torch.cuda.current_stream().name} runs {what}")  # type: ignore[attr-defined]


def some() -> list[torch.Tensor]:
    return [torch.empty(8, dtype=torch.int8)]


def test_what_follows_a_join_waits_for_its_part_alone(streams: Any) -> None:
    _, side, log = streams
    one, two = some(), some()
    with graph_branch.branching(side):
        assert graph_branch.is_open()
        for name, results in (("one", one), ("two", two)):
            with graph_branch.aside(results):
                launch(log, name)
        launch(log, "other work")
        joined = graph_branch.join(one)
        assert joined == one and joined[0] is one[0]
        launch(log, "reader of one")
        graph_branch.join(two)
        graph_branch.join(two)
    assert log == [
        "side waits for main", "side runs one", "side runs two", "main runs other work", "main waits for event 1",
        "main runs reader of one", "main waits for event 2",
    ]  # fmt: skip


def test_all_of_a_branch_is_joined_at_its_end(streams: Any) -> None:
    _, side, log = streams
    with graph_branch.branching(side), graph_branch.aside(some()):
        launch(log, "one")
    assert log == ["side waits for main", "side runs one", "main waits for event 1"]


def test_several_launches_of_one_part_are_waited_for(streams: Any) -> None:
    _, side, log = streams
    results = some()
    with graph_branch.branching(side):
        for name in ("one", "two"):
            with graph_branch.aside(results):
                launch(log, name)
        graph_branch.join(results)
    assert log[-1] == "main waits for event 2" and log.count("main waits for event 1") == 0


def test_without_a_branch_launches_run_where_they_are_called(streams: Any) -> None:
    _, _, log = streams
    results = some()
    with graph_branch.aside(results):
        launch(log, "one")
    assert graph_branch.join(results) == results and not graph_branch.is_open()
    assert log == ["main runs one"]


def test_a_branch_without_launches_is_none(streams: Any) -> None:
    _, side, log = streams
    with graph_branch.branching(side):
        with graph_branch.aside([]):
            launch(log, "nothing of a branch")
        graph_branch.join(some())
    assert log == ["main runs nothing of a branch"]


def test_an_error_on_the_branch_ends_it(streams: Any) -> None:
    _, side, _ = streams
    with pytest.raises(ZeroDivisionError), graph_branch.branching(side), graph_branch.aside(some()):
        raise ZeroDivisionError
    assert not graph_branch.is_open()


def test_what_waits_for_two_streams_is_launched_without_pdl(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, side, _ = streams
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(pdl, "capture_keeps_pdl", lambda: True)
    with pdl.pdl_capture(()):
        assert pdl.allowed(())
        with graph_branch.branching(side):
            results = some()
            with graph_branch.aside(results):
                assert not pdl.allowed(())
            assert pdl.allowed(())
            graph_branch.join(results)
            assert not pdl.allowed(())
            assert pdl.allowed(())
            with graph_branch.aside(results):
                pass
        with pdl.pdl_capture(()):
            # what an earlier capture left
            assert pdl.allowed(())
