"""Digests: equal for equal memory, different for any change that a weight may see."""

from __future__ import annotations

import pytest
import torch

from sfast_ext.weights import digest
from sfast_ext.weights.digest import COLUMNS, Digests

ROW = COLUMNS * 8 // 2
"""Elements of a row in half precision."""

SIZES = [1, 2, 3, 4, 5, 7, 8, ROW - 1, ROW, ROW + 1, 2 * ROW, 2 * ROW + 3, 5 * ROW + 4, 40_000]


def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).half() for size in SIZES]


def changed(tensors: list[torch.Tensor], number: int, change) -> list[bool]:
    before = Digests(tensors)
    change(tensors[number])
    return before.unchanged(tensors)


def test_equal_tensors_are_the_same():
    assert Digests(weights()).unchanged(weights()) == [True] * len(SIZES)


@pytest.mark.parametrize("number", range(len(SIZES)))
@pytest.mark.parametrize("where", [0, -1, 0.5])
def test_one_bit_of_one_element_is_seen(number, where):
    def flip(tensor: torch.Tensor) -> None:
        at = where if isinstance(where, int) else int(where * len(tensor))
        tensor.view(torch.int16)[at] ^= 1

    assert changed(weights(), number, flip) == [i != number for i in range(len(SIZES))]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.neg_(),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.copy_(x.roll(1)),
        lambda x: x.copy_(x.roll(320)),
        lambda x: x.copy_(x.view(100, 400)[torch.randperm(100)].flatten()),
        lambda x: x.copy_(x.view(100, 400).t().flatten()),
        lambda x: x.zero_(),
        lambda x: x.add_(1e-3),
        lambda x: x.mul_(1.001),
        lambda x: x[0].fill_(float("nan")),
        lambda x: x.view(100, 400)[:2].copy_(x.view(100, 400)[:2].flip(0)),
    ],
)
def test_changes_of_the_whole_are_seen(change):
    assert changed(weights(), len(SIZES) - 1, change)[-1] is False


def test_zero_is_told_from_negative_zero():
    assert changed([torch.zeros(9)], 0, lambda x: x.neg_()) == [False]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("begin", [0, 1, 3])
def test_any_place_in_memory_and_any_dtype(dtype, begin):
    memory = torch.arange(16 * COLUMNS + begin).to(dtype)
    before = Digests([memory[begin:]])
    assert before.unchanged([memory[begin:]]) == [True]
    memory[-1] = 3
    assert before.unchanged([memory[begin:]]) == [False]


def test_layouts_without_gaps():
    image = torch.randn(8, 16, 3, 3).contiguous(memory_format=torch.channels_last)
    before = Digests([image])
    image[7, 15, 2, 2] += 1
    assert before.unchanged([image]) == [False]


def test_some_of_them():
    tensors = weights()
    before = Digests(tensors)
    tensors[3] += 1
    some = [tensor if i in (1, 3, 5) else None for i, tensor in enumerate(tensors)]
    assert before.unchanged(some) == [i in (1, 5) for i in range(len(SIZES))]


def test_another_place_in_memory_counts_as_a_change():
    # its words are narrower there, and more of them are left over
    memory = torch.zeros(16 * COLUMNS + 9, dtype=torch.float16)
    assert Digests([memory[:-1]]).unchanged([memory[1:]]) == [False]
    assert Digests([memory[:-1], memory[:8]]).unchanged([memory[1:], memory[:8]]) == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8])
def test_by_threads_and_by_torch_it_is_the_same(dtype, monkeypatch):
    monkeypatch.setattr(digest, "_ALONE_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 3), (64, 64), (33, 77), (320, 1280), (5,), (1281, 7)]
    least = -127 if dtype.is_floating_point else 0
    tensors = [torch.randint(least, 127, shape, generator=generator).to(dtype) for shape in shapes]
    tensors.append(torch.randn(128, 96, generator=generator).to(dtype)[:, ::2])
    tensors.append(torch.randn(4097, generator=generator).to(dtype)[1:])
    groups = digest._groups(tensors, sum(x.nbytes for x in tensors) // 12)
    assert 1 < len(groups) < len(tensors)
    for some in (tensors, tensors[:1], []):
        found = digest.digests_of(some)
        assert all(torch.equal(a, digest.digest_of(b)) for a, b in zip(found, some, strict=True))
