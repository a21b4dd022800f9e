"""Values that follow from arguments whose content is part of the key.

A transformer reads the lengths of prompts from a mask: `mask.sum(1).tolist()`. While it is recorded there are no
values. They are computed here, by the recorded operations, from the arguments of the recorded call. A plan is only
used for calls with the same content of these arguments, see `argument_roles`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from sfast_ext import reasons
from sfast_ext.call_signature import NotOurs
from sfast_ext.capture.block_reuse import unrecorded
from sfast_ext.reasons import Reason

aten = torch.ops.aten
MAX_NUMBERS = 1 << 16
"""Of a value that is computed while a forward is recorded."""
_LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default})


class ReadsArguments(NotOurs):
    """The forward reads values that follow from arguments alone.

    Attributes:
        arguments: their places among the inputs.
    """

    def __init__(self, reason: Reason, arguments: frozenset[int]) -> None:
        super().__init__(reason)
        self.arguments = arguments


class _Unknown:
    """A value that is not computed. `arguments` are those that it follows from; None if from anything else as well."""

    def __init__(self, arguments: frozenset[int] | None) -> None:
        self.arguments = arguments


_ELSEWHERE = _Unknown(None)


class KnownValues:
    """Computes values of a graph while it is recorded.

    Args:
        inputs: the arguments of the recorded call.
        known: the places of those whose content is part of the key.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], known: frozenset[int]) -> None:
        self._inputs, self._known = inputs, known
        self._values: dict[fx.Node, Any] = {}
        self._placeholders = 0
        self._last: fx.Node | None = None
        self._lost: dict[int, _Unknown] = {}
        """The memory of known values to which an unknown one was written."""

    def read(self, tracer: Any, node: fx.Node) -> torch.Tensor:
        """The tensor that a node of the recorded graph stands for, whose values are about to be read.

        Raises:
            NotOurs: it is not known.
        """
        self._follow(tracer)
        found = self._of(node)
        refusal = reasons.READS_VALUE("")
        if isinstance(found, _Unknown) and found.arguments:
            raise ReadsArguments(refusal, found.arguments)
        if not isinstance(found, torch.Tensor):
            raise NotOurs(refusal)
        return found

    def _of(self, node: fx.Node) -> Any:
        found = self._values.get(node, _ELSEWHERE)
        return self._lost.get(found.untyped_storage()._cdata, found) if isinstance(found, torch.Tensor) else found

    def _follow(self, tracer: Any) -> None:
        """Compute what was recorded since the last time."""
        node = self._last._next if self._last is not None else tracer.graph._root._next
        while node.op != "root":
            self._values[node] = self._value(tracer, node)
            self._last, node = node, node._next

    def _value(self, tracer: Any, node: fx.Node) -> Any:
        if node.op == "placeholder":
            place = self._placeholders
            self._placeholders += 1
            known = place in self._known
            return real_value(torch.clone, self._inputs[place]) if known else _Unknown(frozenset({place}))
        if node.op == "get_attr":
            held = getattr(tracer.root, str(node.target), None)
            # weights and tables may change; a literal of the forward is copied first
            literal = isinstance(held, torch.Tensor) and node.users and all(u.target in _LIFTS for u in node.users)
            return held if literal else _ELSEWHERE
        if node.op != "call_function":
            return _ELSEWHERE
        given = [self._of(each) for each in node.all_input_nodes]
        unknown = [each for each in given if isinstance(each, _Unknown)]
        if unknown or not _computable(node):
            if node.target is not operator.getitem and getattr(_schema(node), "is_mutable", True):
                written = _together(unknown) if _follows(node) else _ELSEWHERE
                self._lost |= {x.untyped_storage()._cdata: written for x in given if isinstance(x, torch.Tensor)}
            return _together(unknown) if _follows(node) else _ELSEWHERE
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
        return real_value(node.target, *args, **kwargs)


def real_value(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function gives for real tensors, seen by no mode."""
    with unrecorded(), torch._C.DisableTorchFunction(), torch.no_grad():
        return function(*args, **kwargs)


def _together(unknown: Sequence[_Unknown]) -> _Unknown:
    found: frozenset[int] = frozenset()
    for each in unknown:
        if each.arguments is None:
            return _ELSEWHERE
        found |= each.arguments
    return _Unknown(found) if unknown else _ELSEWHERE


def _follows(node: fx.Node) -> bool:
    """Whether the result of an operation follows from its arguments."""
    if node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", ())
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in tags


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _computable(node: fx.Node) -> bool:
    vals = node.meta.get("val")
    for val in vals if isinstance(vals, (list, tuple)) else (vals,):
        if not isinstance(val, torch.Tensor) or val.numel() > MAX_NUMBERS:
            return False
    return _follows(node)
