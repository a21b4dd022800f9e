"""The plain tensors that a weight of a derived class is made of.

The weights of a checkpoint in 8 bits are, in Forge Neo, comfy_kitchen's `QuantizedTensor`: integers and a scale in its
attributes, without memory that a parameter shows. Plans read those tensors. A slot of a module holds the outer tensor
alone, so `InnerTensors` stands for the slots of the inner ones, and follows the outer one when it is replaced. No
library is imported here.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

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
_ATTRIBUTES = operator.attrgetter("__dict__")
_STORED = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}


class Found(NamedTuple):
    """What a weight is made of.

    Attributes:
        tensors: by name.
        form: what the weight has in addition: its class, layout, shape and dtype.
        places: dictionaries, a name in each, and what it held.
        attributes: those of the weight.
        fields: those of its parameters.
    """

    tensors: dict[str, torch.Tensor]
    form: tuple[Any, ...]
    places: list[tuple[dict, str, Any]]
    attributes: dict[str, Any]
    fields: dict[str, Any]


class Watch:
    """What tells whether weights of this kind were replaced, or written to in Python.

    There is one list for each property, so that hundreds of weights are looked at in a handful of calls.
    """

    def __init__(self) -> None:
        self._homes, self._names, self._held = list[dict](), list[str](), list[Any]()
        self._outer, self._attributes = list[Any](), list[dict]()
        self._fields, self._were = list[dict](), list[dict]()

    def add(self, container: dict, name: str, outer: Any, found: Found | None) -> None:
        """Watch another slot, which holds `outer`; `found` is None if it is of another form."""
        for home, key, held in ((container, name, outer), *(() if found is None else found.places)):
            self._homes.append(home)
            self._names.append(key)
            self._held.append(held)
        if found is not None:
            # `torch.utils.swap_tensors` gives a tensor another dictionary
            self._outer.append(outer)
            self._attributes.append(found.attributes)
            # comfy_kitchen's `copy_from` writes into parameters that are frozen
            self._fields.append(found.fields)
            self._were.append(dict(found.fields))

    def extend(self, other: Watch) -> None:
        """Watch what another one watches."""
        for mine, its in zip(vars(self).values(), vars(other).values()):
            mine.extend(its)

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            all(map(operator.is_, map(dict.get, self._homes, self._names), self._held))
            and all(map(operator.is_, map(_ATTRIBUTES, self._outer), self._attributes))
            # tensors among them are the same objects, and are not compared by value
            and all(map(operator.eq, self._fields, self._were))
        )


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
        self.watch: Watch | None = None
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
        if self.watch is not None and self.watch.holds():
            return
        outer = self._container.get(self.name)
        found = _read(outer)
        if found is not None and found.form != self.form:
            found = None
        self.watch = Watch()
        self.watch.add(self._container, self.name, outer, found)
        if found is None:
            dict.clear(self)
        else:
            dict.update(self, found.tensors)

    def let_go(self) -> None:
        """Hold no tensor until the next look."""
        self.watch = None
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
    if inner is None or inner.form != found.form:
        inner = known[id(container), name] = InnerTensors(container, name, found.form)
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


def watch_of(inner: list[InnerTensors]) -> Watch:
    """What tells whether any of these was replaced since its last `refresh`."""
    watch = Watch()
    for each in inner:
        if each.watch is not None:
            watch.extend(each.watch)
    return watch


def _read(outer: Any) -> Found | None:
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
    return Found({_CODES: codes, _SCALE: scale}, form, looked, held, fields)
