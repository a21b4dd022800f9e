"""Contents that a speculative call takes from before, and confirms; events and copies of a GPU are stand-ins here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sfast_ext import argument_contents
from sfast_ext.argument_contents import MAX_VALUES, Contents, Pending, content_of, readable, settled


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:0")


class Event:
    def __init__(self) -> None:
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True


def on_gpu(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).as_subclass(OnGpu)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Pending]:
    found: list[Pending] = []

    def pending(leaf: torch.Tensor, expected: Any) -> Pending:
        found.append(Pending(torch.tensor(content_of(leaf)), Event(), expected))
        return found[-1]

    monkeypatch.setattr(argument_contents, "_pending", pending)
    return found


@pytest.mark.parametrize("trust", [False, True])
def test_on_a_cpu_each_call_reads(sent: list[Pending], trust: bool) -> None:
    contents, mask = Contents(), torch.tensor([1, 1, 0])
    for _ in range(3):
        mask[0] += 1
        assert contents.read(mask, trust) == (tuple(mask.tolist()), None)
    assert not sent


def test_the_same_object_is_taken_to_hold_what_it_held(sent: list[Pending]) -> None:
    contents, mask = Contents(), on_gpu(1, 1, 0)
    assert contents.read(mask, True) == ((1, 1, 0), None)
    content, pending = contents.read(mask, True)
    assert content == (1, 1, 0) and pending is sent[0] and settled([pending]) and pending.done.waited


def test_what_was_written_since_is_noticed_and_read_anew(sent: list[Pending]) -> None:
    contents, mask = Contents(), on_gpu(1, 1, 0)
    contents.read(mask, True)
    for value in (1, 0, 7):
        mask[2] = value
        content, pending = contents.read(mask, True)
        assert pending is not None and not settled([pending])
        assert contents.read(mask, False) == ((1, 1, value), None)
        content, pending = contents.read(mask, True)
        assert content == (1, 1, value) and pending is not None and settled([pending])


def test_another_object_is_read(sent: list[Pending]) -> None:
    contents = Contents()
    for n in range(3 * argument_contents._MAX_REMEMBERED):
        # of the same address perhaps
        assert contents.read(on_gpu(n, 1), True) == ((n, 1), None)
    assert not sent and len(contents._known) <= argument_contents._MAX_REMEMBERED


def test_an_object_at_the_address_of_another_is_read(sent: list[Pending]) -> None:
    contents, one, other = Contents(), on_gpu(1, 1), on_gpu(2, 2)
    contents.read(one, True)
    # as if the first were gone, and this one had its address
    contents._known[id(other)] = contents._known[id(one)]
    assert contents.read(other, True) == ((2, 2), None) and not sent


def test_one_of_several_that_changed_is_enough() -> None:
    good = Pending(torch.tensor([1, 2]), Event(), (1, 2))
    bad = Pending(torch.tensor([1, 3]), Event(), (1, 2))
    assert settled([]) and settled([good, good])
    assert not settled([good, bad]) and not settled([bad, good])


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2, 3, dtype=torch.bool), True),
        (torch.ones((), dtype=torch.int64), True),
        (torch.ones(MAX_VALUES, dtype=torch.uint8), True),
        (torch.ones(MAX_VALUES + 1, dtype=torch.uint8), False),
        (torch.ones(1), False),
        (torch.ones(1).half(), False),
        (torch.ones(1).cfloat(), False),
    ],
)
def test_small_integers_are_readable(tensor: torch.Tensor, expected: bool) -> None:
    assert readable(tensor) is expected
