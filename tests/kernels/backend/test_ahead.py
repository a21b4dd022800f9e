from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfast_ext.kernels.backend import ahead, health, launch_log

DEVICE = torch.device("cpu")


def some() -> list[Tensor]:
    return [torch.empty(8, dtype=torch.int8)]


@pytest.fixture
def log() -> list[str]:
    return []


def handed(log: list[str], name: str, rows: list[Tensor], size: int = 100) -> bool:
    return ahead.hand_over(rows, [name], size, lambda part: log.append(f"rest of {part.entries[0]}"))


def test_what_is_joined_is_finished_alone_and_once(log: list[str]) -> None:
    one, two = some(), some()
    with ahead.following(DEVICE):
        assert handed(log, "one", one) and handed(log, "two", two)
        joined = ahead.join(one)
        assert joined == one and joined[0] is one[0]
        ahead.join(one)
        assert log == ["rest of one"]
        ahead.join(two)
    assert log == ["rest of one", "rest of two"]


def test_all_is_finished_at_the_end(log: list[str]) -> None:
    with ahead.following(DEVICE):
        handed(log, "one", some())
    assert log == ["rest of one"]


def test_launches_that_are_joined_at_once(log: list[str]) -> None:
    rows = some()
    with ahead.following(DEVICE):
        handed(log, "float16", rows)
        handed(log, "bfloat16", rows)
        ahead.join(rows)
    assert log == ["rest of float16", "rest of bfloat16"]


def test_products_carry_the_next_part_that_is_not_compared(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_RATE", 10.0)
    one, two = some(), some()
    with ahead.following(DEVICE):
        assert ahead.carried(5) is None
        handed(log, "one", one)
        handed(log, "two", two)
        carried = [ahead.carried(6) for _ in range(5)]
        assert [part and part.entries[0] for part in carried] == ["one", "one", "two", "two", None]
        ahead.join(two)
    assert ahead.carried(5) is None and log == ["rest of two", "rest of one"]


def test_what_is_joined_is_not_carried(log: list[str]) -> None:
    one = some()
    with ahead.following(DEVICE):
        handed(log, "one", one)
        ahead.join(one)
        assert ahead.carried(1) is None


def test_each_part_has_a_counter_that_is_zero(log: list[str]) -> None:
    rows = [some() for _ in range(3)]
    with ahead.following(DEVICE):
        for i, each in enumerate(rows):
            handed(log, str(i), each, size=1)
        taken = [part.taken for _ in rows if (part := ahead.carried(1)) is not None]
        assert len({each.data_ptr() for each in taken}) == len(rows)
        assert all(each.dtype == torch.int32 and int(each) == 0 for each in taken)


def test_outside_nothing_is_handed_over(log: list[str]) -> None:
    rows = some()
    assert not handed(log, "one", rows) and ahead.join(rows) == rows and ahead.carried(1) is None
    with ahead.following(DEVICE):
        assert not handed(log, "one", [])
    assert log == []


def test_more_parts_than_counters(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PARTS", 2)
    with ahead.following(DEVICE):
        assert [handed(log, str(i), some()) for i in range(3)] == [True, True, False]


def test_an_error_ends_it(log: list[str]) -> None:
    rows = some()
    with pytest.raises(ZeroDivisionError), ahead.following(DEVICE):
        handed(log, "one", rows)
        raise ZeroDivisionError
    assert ahead.carried(1) is None and log == []


def test_what_fails_is_a_fault_of_the_kernel_that_handed_it_over() -> None:
    def fails(part: ahead.Part) -> None:
        raise RuntimeError("a launch")

    rows = some()
    with ahead.following(DEVICE), pytest.raises(RuntimeError) as caught:
        token = launch_log.kernel.set("quantise_weights")
        ahead.hand_over(rows, [], 1, fails)
        launch_log.kernel.reset(token)
        ahead.join(rows)
    assert list(health.culprits(caught.value)) == ["quantise_weights"]
