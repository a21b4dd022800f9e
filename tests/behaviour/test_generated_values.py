from __future__ import annotations

import collections
import copy
import functools

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from settings_models import NAMESPACE, Data, Holder, Levels, Mode, Model, Processor, Slots, use

from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.behaviour.structure import structure

PLAIN = st.one_of(
    st.integers(-2, 2), st.booleans(), st.floats(), st.sampled_from(["", "a", "b"]), st.none(), st.binary(max_size=2),
    st.complex_numbers(), st.decimals(allow_nan=False), st.fractions(),
    st.sampled_from([*Mode, torch.float16, np.float32(1.5)]),
)  # fmt: skip
# a copy of a larger set may have another order
HASHABLE = st.recursive(PLAIN, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=1)))


def deeper(inner):
    return st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.lists(inner, max_size=3).map(collections.deque),
        st.builds(Holder, inner),
        st.builds(Slots, inner),
        st.builds(Data, inner),
        st.builds(lambda level: NAMESPACE(level=level), inner),
        st.builds(lambda level: functools.partial(use, levels=level), inner),
        st.builds(lambda level: Levels([level]), inner),
        st.lists(st.floats(width=32), max_size=3).map(lambda items: np.array(items, np.float32)),
    )


GENERATED = st.recursive(PLAIN, deeper, max_leaves=12)


def leaves(value, found):
    """What can be changed in place: functions that do it."""
    if isinstance(value, (list, collections.deque)):
        found += [lambda i=i: value.__setitem__(i, object) for i in range(len(value))]
        found += [lambda: value.append("new")]
    elif isinstance(value, dict):
        found += [lambda key=key: value.__setitem__(key, object) for key in value]
        found += [lambda: value.__setitem__("new", 1), *([value.popitem] if value else [])]
    elif isinstance(value, np.ndarray):
        found += [lambda i=i: value.__setitem__(i, 12345.0) for i in range(len(value))]
    elif hasattr(value, "level"):
        found.append(lambda: setattr(value, "level", object))
    elif isinstance(value, functools.partial):
        found.append(lambda: value.keywords.update(levels=object))
    if isinstance(value, functools.partial):
        inside = [value.keywords["levels"]]
    elif hasattr(value, "level"):
        inside = [value.level]
    else:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for each in inside:
        leaves(each, found)
    return found


def in_a_closure(value):
    return lambda x: x * use(value)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(GENERATED, st.sampled_from([Processor, in_a_closure]), st.data())
def test_a_change_anywhere_is_seen_and_none_is_seen_if_nothing_changes(value, place, data):
    twin = copy.deepcopy(value)
    model = Model(place(value))
    before = fingerprint(model)
    assert before.unknown == [] and before.unchanged() and before.unchanged_quick()
    assert fingerprint(model).key == before.key
    assert structure(Model(Processor(value))) == structure(Model(Processor(twin)))
    changes = leaves(value, [])
    if changes:
        data.draw(st.sampled_from(changes))()
        assert not before.unchanged_quick() and fingerprint(model).key != before.key
        assert structure(Model(Processor(value))) != structure(Model(Processor(twin)))
