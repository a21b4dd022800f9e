"""Which Python numbers of a call are inputs of a plan, and which are constants of it.

A number that is itself an argument is an input: it changes at each step. One inside a list, a dict or a dataclass
is a constant until it changes, and an input from then on: it may be a size, which no input can be. A forward that
branches on numbers cannot take them as inputs. Then they are constants again, and `CaptureBackoff` sees to it that no
plan is made for each value.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfast_ext.call_signature import Call, Signature, flatten_call, open_numbers

MAX_INPUTS = 16
"""Numbers of one call that become inputs because they change; with more of them all stay constants."""
_MAX_KNOWN = 256


@dataclass(frozen=True)
class _Roles:
    static: bool = False
    """Whether numbers that are themselves arguments are constants."""
    inputs: frozenset[int] = frozenset()
    """The nested numbers that are inputs, by their order in the call."""
    closed: bool = False
    """Whether nested numbers stay constants, whatever changes."""


class ArgumentRoles:
    """The roles of numbers, by signature."""

    def __init__(self) -> None:
        self.known: OrderedDict[Signature, _Roles] = OrderedDict()
        """Only of signatures with other roles than those of a new one."""
        self._last: OrderedDict[Signature, list[Any]] = OrderedDict()

    def flatten(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Call:
        """A call as `flatten_call` gives it, or flattened again by the roles of its numbers."""
        roles = self.known.get(open_numbers(call.signature))
        if roles is None or roles == _Roles(closed=True):
            return call
        return flatten_call(args, kwargs, device, static_numbers=roles.static, inputs=roles.inputs)

    def open_changed(self, call: Call) -> bool:
        """There is no plan of this call: let the nested numbers that changed since the last such call be inputs.

        Returns:
            Whether some became inputs: the call is to be flattened again.
        """
        if not call.nested:
            return False
        signature = open_numbers(call.signature)
        roles, last = self.known.get(signature, _Roles()), self._last.get(signature)
        _keep(self._last, signature, call.nested)
        if roles.closed or last is None:
            return False
        changed = {i for i, (now, then) in enumerate(zip(call.nested, last)) if now != then}
        inputs = roles.inputs | changed
        if inputs == roles.inputs or len(inputs) > MAX_INPUTS:
            return False
        _keep(self.known, signature, replace(roles, inputs=inputs))
        return True

    def close_nested(self, call: Call) -> bool:
        """A plan that takes nested numbers of this call as inputs is no good: they are constants from now on.

        Returns:
            False if the call has no such input.
        """
        if not call.inputs:
            return False
        signature = open_numbers(call.signature)
        _keep(self.known, signature, replace(self.known.get(signature, _Roles()), inputs=frozenset(), closed=True))
        return True

    def close_own(self, call: Call) -> bool:
        """The forward may branch on a number that is itself an argument: those are constants from now on.

        Returns:
            False if the call has no such input.
        """
        if call.inputs or all(isinstance(leaf, torch.Tensor) for leaf in call.leaves):
            return False
        signature = open_numbers(call.signature)
        _keep(self.known, signature, replace(self.known.get(signature, _Roles()), static=True))
        return True


def _keep(known: OrderedDict[Signature, Any], signature: Signature, value: Any) -> None:
    known[signature] = value
    known.move_to_end(signature)
    while len(known) > _MAX_KNOWN:
        known.popitem(last=False)
