"""Tests that are `long` run in `make test-long`."""

from __future__ import annotations

import conftest
import pytest

pytestmark = pytest.mark.long("test_some_of_a_file", but=[0, 2])


@pytest.mark.long
def test_as_a_whole():
    pass


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("case", "abc")
def test_but_for_a_case(case):
    pass


@pytest.mark.parametrize("case", "abc")
def test_some_of_a_file(case):
    pass


@pytest.mark.parametrize("asked", ["", "1"])
def test_which_are_left_out(asked, request, monkeypatch):
    monkeypatch.setenv("SFAST_ALL_CASES", asked)
    items = request.node.getparent(pytest.Module).collect()
    long = {"test_as_a_whole", "test_but_for_a_case[a]", "test_but_for_a_case[c]", "test_some_of_a_file[b]"}
    assert {item.name for item in items if conftest.is_long(item)} == long
    assert {item.name for item in items if conftest.left_out(item)} == (set() if asked else long)
