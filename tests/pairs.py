"""Some of the cases of a product of parameters, each pair of values of two parameters in one of them."""

from __future__ import annotations

import functools
import heapq
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any


@functools.lru_cache(maxsize=None)
def places(
    counts: tuple[int, ...], together: tuple[int, ...] = (), turn: int = 0, rounds: int = 1
) -> frozenset[tuple[int, ...]]:
    """Of parameters with so many values each: which cases are chosen, as the places of their values. Parameters that
    go `together` are one, whose values are theirs side by side, as often as the longest is gone through in `rounds`.
    At another `turn` others are side by side."""
    cases = itertools.product(*map(range, counts))
    if not together:
        return frozenset(_chosen(list(cases)))
    beside = {
        tuple((step + turn * number) % counts[i] for number, i in enumerate(together))
        for step in range(rounds * max(counts[i] for i in together))
    }
    return frozenset(_chosen([case for case in cases if tuple(case[i] for i in together) in beside]))


def covering(*values: Sequence[Any], when: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """The cases chosen among those of a product that are possible."""
    numbered = itertools.product(*(range(len(some)) for some in values))
    possible = {place: case for place, case in zip(numbered, itertools.product(*values)) if when(*case)}
    return [possible[place] for place in sorted(_chosen(list(possible)))]


def one_of(number: int, *cases: Any) -> list[Any]:
    """One case for a test that takes long, if tests next to it have the others; with SFAST_ALL_CASES all."""
    return list(cases) if os.environ.get("SFAST_ALL_CASES") else [cases[number % len(cases)]]


def every(step: int, *cases: Any) -> list[Any]:
    """Each so manieth of the cases of a test that takes long, from the first on; with SFAST_ALL_CASES all."""
    return list(cases) if os.environ.get("SFAST_ALL_CASES") else list(cases[::step])


def _chosen(cases: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Always the one next that has most pairs which no other has; of several, a diagonal has other triples too."""
    if not cases or len(cases[0]) < 2:
        return cases
    numbers: dict[tuple[int, int, int, int], int] = {}
    masks = []
    for case in cases:
        pairs = itertools.combinations(enumerate(case), 2)
        masks.append(sum(1 << numbers.setdefault((*one, *two), len(numbers)) for one, two in pairs))
    left, found = (1 << len(numbers)) - 1, []
    most = max(max(case) for case in cases) + 1
    heap = [(-mask.bit_count(), sum(case) % most, i) for i, (case, mask) in enumerate(zip(cases, masks))]
    heapq.heapify(heap)
    while left:
        _, diagonal, number = heap[0]
        new = (masks[number] & left).bit_count()
        if -heap[0][0] == new:
            heapq.heappop(heap)
            found.append(cases[number])
            left &= ~masks[number]
        else:
            heapq.heapreplace(heap, (-new, diagonal, number))
    return found
