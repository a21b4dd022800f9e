"""Which Python numbers of a call are inputs of a plan, and which are constants of it.

A number that is itself an argument is an input: it changes at each step. One inside a list, a dict or a dataclass
is a constant until it changes, and an input from then on: it may be a size, which no input can be. A forward that
branches on numbers cannot take them as inputs. Then they are constants again, and `CaptureBackoff` sees to it that no
plan is made for each value.

The content of a tensor becomes part of the signature if the forward reads values that follow from it, such as the
lengths of prompts from a mask.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfast_ext.argument_contents import Contents, readable
from sfast_ext.call_signature import Call, Signature, flatten_call, open_numbers, without_sizes

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
    values: frozenset[int] = frozenset()
    """The tensors whose content is part of the signature, by their order in the call."""


class ArgumentRoles:
    """The roles of numbers, by signature."""

    def __init__(self) -> None:
        self.known: OrderedDict[Signature, _Roles] = OrderedDict()
        """Only of signatures with other roles than those of a new one."""
        self._last: OrderedDict[Signature, list[Any]] = OrderedDict()
        self._read: OrderedDict[Signature, tuple[Any, ...]] = OrderedDict()
        self._forms: OrderedDict[Signature, frozenset[int]] = OrderedDict()
        self._resolved: dict[Signature, _Roles | None] = {}
        self._contents = Contents()

    def flatten(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, *, trust: bool = False
    ) -> Call:
        """A call as `flatten_call` gives it, or flattened again by the roles of its numbers.

        Args:
            trust: whether contents may be those of before, see `Call.pending`.
        """
        if call.signature not in self._resolved:
            self._resolved[call.signature] = self._resolve(call.signature)
        roles = self._resolved[call.signature]
        if roles is None:
            return call
        if roles.static or roles.inputs:
            call = flatten_call(args, kwargs, device, static_numbers=roles.static, inputs=roles.inputs)
        return self._with_contents(call, roles.values, trust) if roles.values else call

    def _resolve(self, signature: Signature) -> _Roles | None:
        """The roles of a call with this signature; None if they are those of a new one."""
        if len(self._resolved) > _MAX_KNOWN:
            self._resolved.clear()
        opened = open_numbers(signature)
        roles = self.known.get(opened, _Roles())
        # what is read of a mask is read of one of another size
        roles = replace(roles, values=roles.values | self._forms.get(without_sizes(opened), frozenset()), closed=False)
        return None if roles == _Roles() else roles

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
        self._set(signature, replace(roles, inputs=inputs))
        return True

    def close_nested(self, call: Call) -> bool:
        """A plan that takes nested numbers of this call as inputs is no good: they are constants from now on.

        Returns:
            False if the call has no such input.
        """
        if not call.inputs:
            return False
        signature = open_numbers(call.signature)
        self._set(signature, replace(self.known.get(signature, _Roles()), inputs=frozenset(), closed=True))
        return True

    def close_own(self, call: Call) -> bool:
        """The forward may branch on a number that is itself an argument: those are constants from now on.

        Returns:
            False if the call has no such input.
        """
        if call.inputs or all(isinstance(leaf, torch.Tensor) for leaf in call.leaves):
            return False
        signature = open_numbers(call.signature)
        self._set(signature, replace(self.known.get(signature, _Roles()), static=True))
        return True

    def read_values(self, call: Call, places: frozenset[int]) -> bool | None:
        """The forward reads values that follow from these leaves: their content is part of the signature from now on.

        Content of one number or row may be another at each call, as a timestep is. It has to be the same in two calls.

        Returns:
            Whether it is; None if that is to be asked again, and False if the leaves are too large, or no integers.
        """
        order = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        tensors = frozenset(order.index(i) for i in places if i in order)
        if len(tensors) < len(places) or not all(readable(call.leaves[i]) for i in places):
            return False
        signature = open_numbers(call.signature)
        contents = self._with_contents(call, tensors).signature.contents
        if any(call.leaves[i].dim() < 2 for i in places):
            last = self._read.get(signature)
            if last != contents:
                _keep(self._read, signature, contents)
                return None if last is None else False
        roles = self.known.get(signature, _Roles())
        self._set(signature, replace(roles, values=roles.values | tensors))
        form = without_sizes(signature)
        _keep(self._forms, form, self._forms.get(form, frozenset()) | tensors)
        return True

    def _with_contents(self, call: Call, tensors: frozenset[int], trust: bool = False) -> Call:
        """A call with the content of tensors, given by their order, as part of its signature."""
        places = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        found = [(order, places[order]) for order in sorted(tensors) if readable(call.leaves[places[order]])]
        read = [self._contents.read(call.leaves[place], trust) for _, place in found]
        contents = tuple((order, content) for (order, _), (content, _) in zip(found, read))
        return replace(
            call,
            signature=call.signature._replace(contents=contents),
            values=frozenset(place for _, place in found),
            pending=tuple(pending for _, pending in read if pending is not None),
        )

    def _set(self, signature: Signature, roles: _Roles) -> None:
        _keep(self.known, signature, roles)
        self._resolved.clear()


def _keep(known: OrderedDict[Signature, Any], signature: Signature, value: Any) -> None:
    known[signature] = value
    known.move_to_end(signature)
    while len(known) > _MAX_KNOWN:
        known.popitem(last=False)
