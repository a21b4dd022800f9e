"""Tests of which a part of the cases runs on a CPU: each pair of parameters is in one that runs."""

from __future__ import annotations

import inspect
import itertools
import math

import conftest
import pairs
import pytest

from kernels.eight_bits import test_conv2d8, test_group_norm8, test_mma_gemm8
from kernels.linear import test_mma_gemm

THINNED = [
    function
    for module in (test_mma_gemm, test_mma_gemm8, test_conv2d8, test_group_norm8)
    for _, function in inspect.getmembers(module, inspect.isfunction)
    if any(mark.name == "thinned" for mark in getattr(function, "pytestmark", ()))
]


@pytest.fixture
def halved(request):
    return request.param / 2


@pytest.mark.parametrize(("one", "two"), [(1, 2), pytest.param(1, 3, id="other"), (2, 2)])
@pytest.mark.parametrize("halved", [4, 8], indirect=True)
def test_places(one, two, halved, request):
    place = [(1, 2), (1, 3), (2, 2)].index((one, two))
    assert conftest.place_of(request.node) == ((halved == 4, place), (2, 3))


@pytest.mark.parametrize("function", THINNED)
def test_each_pair_of_parameters_runs(function):
    counts = [len(mark.args[1]) for mark in function.pytestmark if mark.name == "parametrize"]
    chosen = pairs.places(tuple(counts))
    assert len(chosen) < 0.5 * math.prod(counts)
    for i, j in itertools.combinations(range(len(counts)), 2):
        assert len({(case[i], case[j]) for case in chosen}) == counts[i] * counts[j]


def test_each_pair_that_is_possible_runs():
    found = pairs.covering("abc", range(4), [False, True], when=lambda letter, number, flag: letter != "a" or not flag)
    assert len(found) == len(set(found)) < 16 and all(letter != "a" or not flag for letter, _, flag in found)
    assert {each[:2] for each in found} == set(itertools.product("abc", range(4)))
    assert {each[1:] for each in found} == set(itertools.product(range(4), [False, True]))
    assert {each[::2] for each in found} == set(itertools.product("abc", [False, True])) - {("a", True)}


@pytest.mark.parametrize("values", [["ab"], ["ab", "c"], ["", "ab"]], ids=str)
def test_of_fewer_than_two_that_vary_all_run(values):
    assert pairs.covering(*values) == list(itertools.product(*values))
