"""Tests of which a part of the cases runs on a CPU: each pair of parameters is in one that runs."""

from __future__ import annotations

import inspect
import itertools
import math

import conftest
import pairs
import pytest

from kernels import test_portable
from kernels.backend import test_nvrtc
from kernels.eight_bits import (
    test_add_layer_norm8,
    test_conv2d8,
    test_group_norm8,
    test_layer_norm8,
    test_mma_attention8,
    test_mma_gemm8,
    test_modulated_norm8,
    test_quantise_rows,
    test_wgmma_conv8,
)
from kernels.group_norm import test_in_place_portable
from kernels.linear import test_mma_gemm
from kernels.pointwise import test_modulated_norm, test_norm_rotary

MODULES = (
    test_portable, test_nvrtc, test_add_layer_norm8, test_conv2d8, test_group_norm8, test_layer_norm8,
    test_mma_attention8, test_mma_gemm8, test_modulated_norm8, test_quantise_rows, test_wgmma_conv8,
    test_in_place_portable, test_mma_gemm, test_modulated_norm, test_norm_rotary,
)  # fmt: skip
THINNED = [
    function
    for module in MODULES
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


def chosen(function):
    """The first name and the count of each parametrisation, and which cases run."""
    given = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    names, counts = [conftest.names_of(mark)[0] for mark in given], tuple(len(mark.args[1]) for mark in given)
    (thinned,) = (mark for mark in function.pytestmark if mark.name == "thinned")
    return names, counts, pairs.places(counts, **conftest.together(thinned, function)), thinned.args


@pytest.mark.parametrize("function", THINNED)
def test_each_pair_of_parameters_runs(function):
    names, counts, found, together = chosen(function)
    assert len(found) <= 0.5 * math.prod(counts) and set(together) <= set(names)
    for i, j in itertools.combinations(range(len(counts)), 2):
        # each value of those that change together, if not each pair
        both = max if {names[i], names[j]} <= set(together) else math.prod
        assert len({(case[i], case[j]) for case in found}) >= both((counts[i], counts[j]))


def test_what_changes_together_in_one_product_does_so_in_another_way_in_the_next():
    found = set()
    for function in (test_mma_gemm.test_linear, test_mma_gemm.test_linear_onto_a_residual, test_mma_gemm.test_conv2d):
        names, counts, cases, _ = chosen(function)
        tile, kind = names.index("tile"), names.index("dtype")
        found |= {(case[tile], case[kind]) for case in cases}
    assert len(found) == counts[tile] * counts[kind]


def test_as_often_as_is_said():
    assert pairs.places((2, 3), (1, 0)) == {(0, 0), (1, 1), (0, 2)}
    assert pairs.places((2, 3), (1, 0), turn=1) == {(1, 0), (0, 1), (1, 2)}
    assert pairs.places((2, 3), (1, 0), rounds=2) == set(itertools.product(range(2), range(3)))
    assert len(pairs.places((2, 3, 4), (0, 1))) == 12


def test_each_pair_that_is_possible_runs():
    found = pairs.covering("abc", range(4), [False, True], when=lambda letter, number, flag: letter != "a" or not flag)
    assert len(found) == len(set(found)) < 16 and all(letter != "a" or not flag for letter, _, flag in found)
    assert {each[:2] for each in found} == set(itertools.product("abc", range(4)))
    assert {each[1:] for each in found} == set(itertools.product(range(4), [False, True]))
    assert {each[::2] for each in found} == set(itertools.product("abc", [False, True])) - {("a", True)}


def test_each_so_manieth_runs(monkeypatch):
    for asked, cases in (("", "ad"), ("1", "abcd")):
        monkeypatch.setenv("SFAST_ALL_CASES", asked)
        assert pairs.every(3, *"abcd") == list(cases)


@pytest.mark.parametrize("values", [["ab"], ["ab", "c"], ["", "ab"]], ids=str)
def test_of_fewer_than_two_that_vary_all_run(values):
    assert pairs.covering(*values) == list(itertools.product(*values))
