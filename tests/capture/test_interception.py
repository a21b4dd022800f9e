"""Functions taken over for one thread and a while, however their callers got hold of them."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest

from sfast_ext.capture import interception
from sfast_ext.capture.interception import intercepted


def plain(a, b=2, *rest, c=3, **others):
    """Adds up."""
    return a + b + sum(rest) + c + sum(others.values())


def _decorator(function):
    extra = 100

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + extra

    return wrapper


@_decorator
def decorated(a):
    return a


held_by_name = plain
in_a_closure = (lambda function: lambda *args: function(*args))(plain)


def test_every_caller_is_met_and_nothing_is_left():
    code, defaults = plain.__code__, plain.__defaults__
    met = []

    def handler(original, *args, **kwargs):
        met.append((args, kwargs))
        return -original(*args, **kwargs)

    with intercepted({plain: handler}):
        assert plain(1) == held_by_name(1) == in_a_closure(1) == -6
        assert plain(1, 1, 1, c=1, d=1) == -5
    assert met == [((1,), {})] * 3 + [((1, 1, 1), {"c": 1, "d": 1})]
    assert plain(1) == 6 and plain.__code__ is code and plain.__defaults__ is defaults


def test_a_function_with_a_closure_is_met():
    assert len(decorated.__code__.co_freevars) == 2
    with intercepted({decorated: lambda original, a: original(a) * 2}):
        assert decorated(1) == 202
    assert decorated(1) == 101


def test_an_unbound_cell_is_nobodys_concern():
    def outer():
        def inner():
            return later

        with intercepted({inner: lambda original: "taken"}):
            assert inner() == "taken"
        with pytest.raises(NameError):
            inner()
        later = 1
        return inner

    assert outer()() == 1


def test_errors_pass_and_leave_nothing():
    code = plain.__code__

    def handler(original, *args):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), intercepted({plain: handler}):
        plain(1)
    with pytest.raises(TypeError), intercepted({plain: lambda original, *args: original(*args)}):
        plain()
    assert plain.__code__ is code and plain(1) == 6 and not interception._detours


def test_other_threads_run_the_original():
    inside, done = threading.Event(), threading.Event()
    found = []

    def other():
        inside.wait(300)
        found.append(plain(1))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with intercepted({plain: lambda original, *args: "taken"}):
        inside.set()
        assert done.wait(300)
        assert plain(1) == "taken"
    thread.join()
    assert found == [6]


def test_two_threads_at_once_each_have_their_own():
    code = plain.__code__
    barrier = threading.Barrier(2, timeout=300)
    found = {}

    def run(name, leave_first):
        with intercepted({plain: lambda original, *args: name}):
            barrier.wait()
            first = plain(1)
            barrier.wait()
            if not leave_first:
                barrier.wait()
                found[name] = first, plain(1)
        if leave_first:
            found[name] = first, plain(1)
            barrier.wait()

    threads = [threading.Thread(target=run, args=(name, name == "a")) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    # the one that left meets the original while the other still intercepts
    assert found == {"a": ("a", 6), "b": ("b", "b")}
    assert plain.__code__ is code and not interception._detours


def test_the_innermost_counts():
    with intercepted({plain: lambda original, *args: "outer"}):
        with intercepted({plain: lambda original, *args: "inner"}):
            assert plain(1) == "inner"
        assert plain(1) == "outer"
    assert plain(1) == 6


def test_a_handler_may_call_what_is_intercepted():
    with intercepted({plain: lambda original, *args: decorated(*args), decorated: lambda original, a: original(a)}):
        assert plain(5) == 105


def test_code_that_somebody_exchanged_meanwhile_stays():
    def victim():
        return 1

    def other():
        return 2

    with intercepted({victim: lambda original: original()}):
        assert victim() == 1
        victim.__code__ = other.__code__
    assert victim() == 2


def test_nothing_stays_of_an_interception():
    # code is not searched by Python's garbage collection, and the stub's code leads to its detour
    def victim():
        return 1

    with intercepted({victim: lambda original: original() + 1}):
        detour = weakref.ref(interception._detours[victim])
        assert victim() == 2
    gc.collect()
    assert detour() is None and victim() == 1
    gone = weakref.ref(victim)
    del victim
    gc.collect()
    assert gone() is None


def test_nothing_stays_of_a_function_that_cannot_be_intercepted(monkeypatch):
    def victim():
        return 1

    made, stub = [], interception._stub

    def with_a_cell_too_many(cells, call):
        made.append(weakref.ref(call.__self__))
        return stub(cells + 1, call)

    monkeypatch.setattr(interception, "_stub", with_a_cell_too_many)
    with intercepted({victim: lambda original: 2}):
        assert victim() == 1
    gc.collect()
    assert made and made[0]() is None
