"""The lists and dictionaries of a caller end as the original forward leaves them, whatever runs in its place."""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn

from sfast_ext import Config, accelerate

CALLS = 4


class Root(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.use = use

    def forward(self, x, *args, **kwargs):
        return self.use(self.linear(x), *args, **kwargs)


@dataclasses.dataclass
class Extra:
    maps: list
    scale: float = 1.0


Pair = collections.namedtuple("Pair", "left right")


def tensors(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, generator=generator) for _ in range(n)]


def empties(x, given):
    while given:
        x = x + given.pop(0)
    return x


def clears(x, given):
    for each in given:
        x = x + each
    given.clear()
    return x


def deletes(x, given):
    x = x * given[1]
    del given[1]
    return x


def takes(x, **given):
    return x + given["control"]["middle"].pop() + given["control"].pop("first")


KEPT = {
    "pop": (lambda x, given: x + given.pop(), lambda s: ((tensors(3, s),), {})),
    "pop of the first": (lambda x, given: x + given.pop(0), lambda s: ((tensors(3, s),), {})),
    "by keyword": (lambda x, given=None: x + given.pop(0), lambda s: ((), {"given": tensors(3, s)})),
    "all": (empties, lambda s: ((tensors(3, s),), {})),
    "clear": (clears, lambda s: ((tensors(3, s),), {})),
    "del": (deletes, lambda s: ((tensors(3, s),), {})),
    "reverse": (lambda x, given: given.reverse() or x + given[0] * 2, lambda s: ((tensors(3, s),), {})),
    "a slice": (lambda x, given: given.__setitem__(slice(0, 2), []) or x + given[0], lambda s: ((tensors(3, s),), {})),
    "swap": (
        lambda x, given: given.__setitem__(slice(0, 2), [given[1], given[0]]) or x + given[0],
        lambda s: ((tensors(3, s),), {}),
    ),
    "popitem": (lambda x, given: x + given.popitem()[1], lambda s: ((dict(zip("abc", tensors(3, s))),), {})),
    "pop by key": (lambda x, given: x + given.pop("b"), lambda s: ((dict(zip("abc", tensors(3, s))),), {})),
    "del by key": (
        lambda x, given: x * given["a"] + (given.__delitem__("a") or 0),
        lambda s: ((dict(zip("abc", tensors(3, s))),), {}),
    ),
    "to the end": (
        lambda x, given: x + given["a"] + (given.__setitem__("a", given.pop("a")) or 0),
        lambda s: ((dict(zip("abc", tensors(3, s))),), {}),
    ),
    "nested": (takes, lambda s: ((), {"control": {"middle": tensors(2, s), "first": tensors(1, s + 9)[0]}})),
    "a list in a list": (lambda x, given: x + given[1].pop(), lambda s: (([tensors(2, s), tensors(2, s + 9)],), {})),
    "an outer and an inner": (
        lambda x, given: x + given[1].pop() + given.pop(0)[0], lambda s: (([tensors(2, s), tensors(2, s + 9)],), {})
    ),
    "in a tuple": (lambda x, given: x + given[0].pop(), lambda s: (((tensors(2, s), 1.0),), {})),
    "in a named tuple": (lambda x, given: x + given.left.pop(), lambda s: ((Pair(tensors(2, s), 1.0),), {})),
    "in a dataclass": (lambda x, given: x + given.maps.pop(), lambda s: ((Extra(tensors(2, s)),), {})),
    "numbers": (lambda x, given: x * given.pop(), lambda s: (([1.0, 2.0, 2.0],), {})),
}  # fmt: skip
BYPASSED = {
    "append": (lambda x, given: given.append(x) or x * 2, lambda s: ((tensors(2, s),), {})),
    "append of a number": (lambda x, given: given.append(1.0) or x * len(given), lambda s: ((tensors(2, s),), {})),
    "extend": (lambda x, given: given.extend([x, x]) or x * 2, lambda s: ((tensors(2, s),), {})),
    "insert": (lambda x, given: given.insert(0, x) or x * 2, lambda s: ((tensors(2, s),), {})),
    "an item": (lambda x, given: given.__setitem__(0, x) or x * 2, lambda s: ((tensors(2, s),), {})),
    "a key": (lambda x, given: given.__setitem__("new", x) or x * 2, lambda s: (({"a": tensors(1, s)[0]},), {})),
    "setdefault": (lambda x, given: x + given.setdefault("new", x), lambda s: (({"a": tensors(1, s)[0]},), {})),
    "a key's value": (lambda x, given: given.__setitem__("a", x) or x * 2, lambda s: (({"a": tensors(1, s)[0]},), {})),
    "update": (lambda x, given: given.update(a=x, b=x) or x * 2, lambda s: (({"a": tensors(1, s)[0]},), {})),
    "nested": (lambda x, given: given["a"].append(x) or x * 2, lambda s: (({"a": tensors(1, s)},), {})),
    "a field": (lambda x, given: setattr(given, "scale", 5.0) or x * 2, lambda s: ((Extra(tensors(2, s)),), {})),
    "a field's list": (lambda x, given: given.maps.append(x) or x * 2, lambda s: ((Extra(tensors(2, s)),), {})),
    "an attribute": (lambda x, given: setattr(given, "seen", 5.0) or x * 2, lambda s: ((Extra(tensors(2, s)),), {})),
    "from one to another": (
        lambda x, given: given[0].append(given[1].pop()) or x * 2, lambda s: (([tensors(2, s), tensors(2, s + 9)],), {})
    ),
    "an OrderedDict": (
        lambda x, given: x + given.pop("a"), lambda s: ((collections.OrderedDict(zip("ab", tensors(2, s))),), {})
    ),
}  # fmt: skip
UNTOUCHED = {
    "copied": (lambda x, given: x + [*given].pop(), lambda s: ((tensors(2, s),), {})),
    "read": (lambda x, given: x + sum(given), lambda s: ((tensors(2, s),), {})),
    "put and taken": (lambda x, given: (given.append(x), given.pop())[1] + given[0], lambda s: ((tensors(2, s),), {})),
    "a dict that is copied": (lambda x, given: x * dict(given).pop("s"), lambda s: (({"s": 2.0},), {})),
}


def summary(value):
    if isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor
        return round(float(value.sum()), 4)
    if isinstance(value, dict):
        return [(key, summary(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [summary(each) for each in value]
    return [(k, summary(v)) for k, v in vars(value).items()] if dataclasses.is_dataclass(value) else value


def twins(use, given, **options):
    ours, twin = Root(use).eval(), Root(use).eval()
    accelerator = accelerate(ours, Config(allow_cpu=True, drop_slower=False, **options))
    for seed in range(CALLS):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        (mine, mine_named), (theirs, theirs_named) = given(seed), given(seed)
        with torch.no_grad():
            torch.testing.assert_close(ours(x, *mine, **mine_named), twin(x, *theirs, **theirs_named))
        assert summary([mine, mine_named]) == summary([theirs, theirs_named])
    plans, reasons = dict(accelerator.plans), accelerator.report.as_dict()["reasons"]
    accelerator.release()
    return plans, reasons


@pytest.mark.parametrize("check", ["first", "always", "never"])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_taken_out_of_a_container_is_taken_out_by_a_plan(name, check):
    plans, reasons = twins(*KEPT[name], check=check)
    (plan,) = plans.values()
    assert plan.replays == CALLS - 1 and plan.edits, reasons


@pytest.mark.parametrize("name", BYPASSED)
def test_what_is_put_into_a_container_is_put_there_by_the_original(name):
    plans, reasons = twins(*BYPASSED[name])
    assert not plans
    assert any("one of its arguments" in reason for reason in reasons) or any("cannot take" in r for r in reasons)


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_container_that_is_left_alone_costs_nothing(name):
    plans, _ = twins(*UNTOUCHED[name])
    (plan,) = plans.values()
    assert plan.replays == CALLS - 1 and not plan.edits


def test_a_list_that_is_there_twice_is_changed_by_the_original():
    def both(x, left, right):
        return x + left.pop() + right.pop() * 2

    def given(seed):
        same = [1.0, 2.0, 3.0]
        return (same, same if seed == 2 else [*same]), {}

    plans, reasons = twins(both, given)
    assert len(plans) == 1 and any("twice among its arguments" in reason for reason in reasons)


def test_a_list_of_tensors_that_is_there_twice_is_changed_by_the_original():
    def given(seed):
        one, two = tensors(3, seed), tensors(3, seed + 9)
        return (one, one if seed == 2 else two), {}

    plans, _ = twins(lambda x, left, right: x + left.pop() + right.pop() * 2, given)
    assert len(plans) == 1


def test_a_tensor_that_is_there_twice_is_taken_out_at_its_place():
    def given(seed):
        one, two = tensors(2, seed)
        return ([one, one, two] if seed % 2 else [one, two, one],), {}

    plans, _ = twins(lambda x, given: x + given.pop(1), given)
    assert len(plans) == 2 and all(plan.edits and plan.replays for plan in plans.values())


def test_the_second_use_of_a_list_finds_it_as_the_first_left_it():
    ours, twin = Root(empties).eval(), Root(empties).eval()
    accelerator = accelerate(ours, Config(allow_cpu=True, drop_slower=False))
    for seed in range(3):
        x, mine, theirs = torch.ones(2, 4), tensors(2, seed), tensors(2, seed)
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(ours(x, mine), twin(x, theirs))
            assert len(mine) == len(theirs)
    assert len(accelerator.plans) == 2
    accelerator.release()


def test_further_shapes_take_out_as_much():
    use, _ = KEPT["pop of the first"]
    ours, twin = Root(use).eval(), Root(use).eval()
    accelerator = accelerate(ours, Config(allow_cpu=True, drop_slower=False))
    for rows in (2, 3, 5, 2, 3, 5):
        given = [torch.randn(rows, 4) for _ in range(3)]
        x, mine, theirs = torch.randn(rows, 4), copy.copy(given), copy.copy(given)
        with torch.no_grad():
            torch.testing.assert_close(ours(x, mine), twin(x, theirs))
        assert [id(each) for each in mine] == [id(each) for each in theirs]
    assert len(accelerator.plans) == 3
    accelerator.release()


def test_the_original_that_runs_again_after_memory_was_freed_gets_its_lists_back(monkeypatch):
    runs = []

    def short_of_memory(x, given):
        x = x + given.pop() + torch.rand(4)
        runs.append(len(given))
        if len(runs) == 1:
            raise torch.cuda.OutOfMemoryError("no memory")
        return x

    model = Root(short_of_memory).eval()
    accelerator = accelerate(model, Config(allow_cpu=True, drop_slower=False))
    monkeypatch.setattr(accelerator._server._failures, "freed_memory_for", lambda exc: True)
    given = tensors(3, 0)
    torch.manual_seed(5)
    with torch.no_grad():
        expected = model.linear(torch.ones(2, 4)) + given[-1] + torch.rand(4)
    torch.manual_seed(5)
    with torch.no_grad():
        found = accelerator.run_original(torch.ones(2, 4), given)
    assert runs == [2, 2] and len(given) == 2
    # as without the extension, whose memory was in the way
    assert torch.equal(found, expected)
    accelerator.release()
