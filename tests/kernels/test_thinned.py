"""Tests of which a part of the cases runs on a CPU: each pair of parameters is in one that runs."""

from __future__ import annotations

import inspect
import itertools

import conftest
import pytest

from kernels.eight_bits import test_mma_gemm8
from kernels.linear import test_mma_gemm

THINNED = [
    function
    for module in (test_mma_gemm, test_mma_gemm8)
    for _, function in inspect.getmembers(module, inspect.isfunction)
    if any(mark.name == "thinned" for mark in getattr(function, "pytestmark", ()))
]


@pytest.fixture
def halved(request):
    return request.param / 2


@pytest.mark.parametrize(("one", "two"), [(1, 2), pytest.param(1, 3, id="other"), (2, 2)])
@pytest.mark.parametrize("halved", [4, 8], indirect=True)
def test_numbered(one, two, halved, request):
    place = [(1, 2), (1, 3), (2, 2)].index((one, two))
    assert conftest.number_of(request.node) == 2 * place + (halved == 4)


@pytest.mark.parametrize("function", THINNED)
def test_each_pair_of_parameters_runs(function):
    marks = {mark.name: mark for mark in function.pytestmark if mark.name == "thinned"}
    given = [mark.args for mark in function.pytestmark if mark.name == "parametrize"]
    names = [(name,) if isinstance(name, str) else name for name, _ in given]
    weights, counts = list(map(len, names)), [len(values) for _, values in given]
    step = marks["thinned"].args[0]
    cases = itertools.product(*map(range, counts))
    kept = [case for case in cases if sum(map(int.__mul__, case, weights)) % step == 0]
    assert len(kept) < 0.5 * len(list(itertools.product(*map(range, counts))))
    for i, j in itertools.combinations(range(len(counts)), 2):
        assert len({(case[i], case[j]) for case in kept}) == counts[i] * counts[j]
