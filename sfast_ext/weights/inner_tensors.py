"""The plain tensors that a weight of a derived class is made of.

The weights of a checkpoint in 8 bits are, in Forge Neo, comfy_kitchen's `QuantizedTensor`: integers and a scale in its
attributes, without memory that a parameter shows. Plans read those tensors. A slot of a module holds the outer tensor
alone, so `InnerTensors` stands for the slots of the inner ones, and follows the outer one when it is replaced. No
library is imported here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from sfast_ext.weights.original_layout import is_plain

_PACKAGE, _CLASS = "comfy_kitchen", "QuantizedTensor"
_COMMON = frozenset({"scale", "orig_dtype", "orig_shape"})
_LAYOUTS = {
    "TensorWiseINT8Layout": _COMMON | {"is_weight", "convrot", "convrot_groupsize", "transposed"},
    "TensorCoreFP8Layout": _COMMON,
    "TensorCoreFP8E4M3Layout": _COMMON,
    "TensorCoreFP8E5M2Layout": _COMMON,
}
"""The fields of each layout whose products are known. A layout with other fields is another one."""
_CODES, _SCALE = "_qdata", "scale"
_STORED = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}

Watched = tuple[dict, str, Any]
"""A dictionary, a name in it, and what it held."""


class InnerTensors(dict):
    """The tensors that the weight in a slot of a module is made of, by name.

    It stays the same when the weight is replaced by one of the same format. With another format, it is empty from then
    on.

    Args:
        container: the dictionary of the module.
        name: that of the weight in it.
        form: what the weight has in addition to tensors: its class, layout, shape and dtype.
    """

    def __init__(self, container: dict[str, Any], name: str, form: tuple[Any, ...]) -> None:
        super().__init__()
        self._container, self.name, self.form = container, name, form
        self.watched: list[Watched] = []
        """What tells whether anything was replaced."""
        self.refresh()

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of this name, as the module holds it now."""
        self.refresh()
        return dict.get(self, name, default)

    def __getitem__(self, name: str) -> Any:
        self.refresh()
        return dict.__getitem__(self, name)

    def refresh(self) -> None:
        """Follow the weight in the slot, if it was replaced."""
        if self.watched and all(home.get(name) is held for home, name, held in self.watched):
            return
        outer = self._container.get(self.name)
        found = _read(outer)
        self.watched = [(self._container, self.name, outer)]
        if found is None or found[1] != self.form:
            dict.clear(self)
            return
        tensors, _, watched = found
        self.watched += watched
        dict.update(self, tensors)

    def let_go(self) -> None:
        """Hold no tensor until the next look."""
        self.watched = []
        dict.clear(self)


# as long as a weight has such a slot
_known: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[tuple[int, str], InnerTensors]]
_known = weakref.WeakKeyDictionary()


def inner_tensors(module: nn.Module, container: dict[str, Any], name: str) -> InnerTensors | None:
    """Those of the weight in a slot of a module, the same object each time; None if it is not made of others, or of a
    format that is not known."""
    found = _read(container.get(name))
    if found is None:
        return None
    known = _known.setdefault(module, weakref.WeakValueDictionary())
    inner = known.get((id(container), name))
    if inner is None or inner.form != found[1]:
        inner = known[id(container), name] = InnerTensors(container, name, found[1])
    inner.refresh()
    return inner


def all_within(module: nn.Module) -> Iterator[InnerTensors]:
    """Those of the weights of one module that the weight arena knows."""
    yield from list(_known.get(module, {}).values())


def form_of(container: dict[str, Any]) -> tuple[Any, ...] | None:
    """The form of the weight that this is a slot of; None for the dictionary of a module."""
    return container.form if isinstance(container, InnerTensors) else None


def inner_of(module: nn.Module) -> dict[str, InnerTensors]:
    """Those of all weights of a module and its parts, by the path of the weight."""
    found = {}
    for prefix, part in module.named_modules():
        for name, value in part._parameters.items():
            if is_made_of_others(value) and (inner := inner_tensors(part, part._parameters, name)) is not None:
                found[f"{prefix}.{name}" if prefix else name] = inner
    return found


def ids_within(root: nn.Module | None) -> frozenset[int]:
    """The ids of the tensors that weights of a module are made of."""
    inner = {} if root is None else inner_of(root)
    return frozenset(id(tensor) for each in inner.values() for tensor in each.values())


def is_made_of_others(value: Any) -> bool:
    """Whether a tensor is of a class whose operations are those of the tensors that it is made of."""
    kind = type(value)
    return kind.__name__ == _CLASS and kind.__module__.partition(".")[0] == _PACKAGE


def is_followed(value: Any) -> bool:
    """Whether a weight is made of tensors that plans can read."""
    return _read(value) is not None


def watched(inner: list[InnerTensors]) -> tuple[list[dict], list[str], list[Any]]:
    """What tells whether any of these was replaced: dictionaries, names, and what they held."""
    homes, names, held = zip(*chain.from_iterable(each.watched for each in inner))
    return list(homes), list(names), list(held)


def _read(outer: Any) -> tuple[dict[str, torch.Tensor], tuple[Any, ...], list[Watched]] | None:
    """The tensors by name, the form, and what to watch."""
    if not is_made_of_others(outer):
        return None
    held = outer.__dict__
    codes, layout, params = held.get(_CODES), held.get("_layout_cls"), held.get("_params")
    fields = getattr(params, "__dict__", None)
    if not isinstance(layout, str) or not isinstance(fields, dict):
        return None
    known, scale = _LAYOUTS.get(layout), fields.get(_SCALE)
    if known is None or not _COMMON <= fields.keys() <= known or fields.get("transposed"):
        return None
    if not isinstance(codes, torch.Tensor) or not isinstance(scale, torch.Tensor):
        return None
    if not is_plain(codes) or not is_plain(scale) or codes.dtype not in _STORED or scale.dtype != torch.float32:
        return None
    form = type(outer), layout, type(params), tuple((name, value) for name, value in fields.items() if name != _SCALE)
    looked = [(held, _CODES, codes), (held, "_layout_cls", layout), (held, "_params", params), (fields, _SCALE, scale)]
    return {_CODES: codes, _SCALE: scale}, form, looked
