"""The blocks of OpenCLIP's text encoders as one module.

ldm and sgm call the blocks one by one, in a method of the embedder that is no module's forward. A tower is a module
that has those blocks, and that method as its forward. It is called in place of the method, so it can be accelerated.
What is around it, such as the embeddings of tokens and the choice of the pooled token, stays the host's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from sfast_ext.behaviour.foreign_code import PLAIN, names_in, package, written_by
from sfast_ext.hosts.attachment import wrap

METHOD = "text_transformer_forward"
_PACKAGES = ("ldm", "sgm")


class Tower(nn.Module):
    """The blocks of one text encoder. A class derived from it has the method of its embedder as the forward."""

    model: _Model
    read_of_embedder: tuple[str, ...]
    """The plain attributes of the embedder that the method reads."""


class _Model(nn.Module):
    """What a tower has in the place of OpenCLIP's model: the blocks alone."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer


class Towers:
    """Makes towers, and has them called."""

    def __init__(self) -> None:
        self._towers: weakref.WeakKeyDictionary[nn.Module, Tower] = weakref.WeakKeyDictionary()
        # of each class: its method, and what removes the wrapper around it
        self._wrapped: dict[type, tuple[FunctionType, Callable[[], None]]] = {}

    def tower_of(self, embedder: nn.Module) -> Tower | None:
        """The tower of an embedder, from now on called in place of its method. None if the embedder has no such method,
        or one that is not known."""
        owner = _owner(type(embedder))
        if owner is None or not is_embedder(embedder):
            return None
        method = self._wrapped[owner][0] if owner in self._wrapped else vars(owner)[METHOD]
        tower = self._towers.get(embedder)
        if tower is None or not _follow(tower, embedder):
            tower = _make(embedder, method)
            if tower is None:
                self._towers.pop(embedder, None)
                return None
            self._towers[embedder] = tower
        if owner not in self._wrapped:
            self._wrapped[owner] = method, wrap(owner, METHOD, self._around)
        return tower

    def release(self) -> None:
        """The hosts' own methods are called again."""
        self._towers = weakref.WeakKeyDictionary()
        while self._wrapped:
            self._wrapped.popitem()[1][1]()

    def _around(self, original: Callable[..., Any], embedder: Any, *args: Any, **kwargs: Any) -> Any:
        tower = self._towers.get(embedder)
        if tower is None or not _follow(tower, embedder):
            return original(embedder, *args, **kwargs)
        # not the module itself: hooks on all modules would be called once more
        return tower.forward(*args, **kwargs)


def is_embedder(module: nn.Module) -> bool:
    """Whether a module is an embedder of ldm's or sgm's around OpenCLIP."""
    transformer = getattr(getattr(module, "model", None), "transformer", None)
    blocks = getattr(transformer, "resblocks", None)
    return isinstance(blocks, nn.ModuleList) and len(blocks) > 0 and _owner(type(module)) is not None


def _owner(kind: type) -> type | None:
    """The class of ldm's or sgm's that defines the method of an embedder; None if another one does."""
    owner = next((each for each in kind.__mro__ if METHOD in vars(each)), None)
    return owner if owner is not None and package(owner.__module__) in _PACKAGES else None


def _make(embedder: Any, method: Any) -> Tower | None:
    """A tower; None if the method is another package's, or reads more of the embedder than blocks and plain values."""
    if not isinstance(method, FunctionType) or written_by(method) not in _PACKAGES:
        return None
    model, names = embedder.model, names_in(method.__code__)
    held = {*_tensors_and_modules(embedder), *_tensors_and_modules(model)} - {"model", "transformer"}
    methods = {name for name in names if callable(getattr(type(embedder), name, None)) and not hasattr(nn.Module, name)}
    if names & held or methods:
        return None
    tower = _class_of(method)()
    tower.training = embedder.training
    tower.model = _Model(model.transformer)
    tower.read_of_embedder = tuple(name for name in vars(embedder) if name in names)
    return tower if _follow(tower, embedder) else None


def _tensors_and_modules(module: nn.Module) -> set[str]:
    return {*module._modules, *module._parameters, *module._buffers}


@functools.lru_cache(maxsize=16)
def _class_of(method: FunctionType) -> type[Tower]:
    return type("TextTower", (Tower,), {"forward": method, "__module__": method.__module__})


def _follow(tower: Tower, embedder: Any) -> bool:
    """Bring a tower up to date with its embedder. False if it has the blocks of another model."""
    if tower.model.transformer is not getattr(embedder.model, "transformer", None):
        return False
    values = vars(tower)
    for name in tower.read_of_embedder:
        value = getattr(embedder, name, None)
        if not (isinstance(value, PLAIN) or value is None):
            return False
        if name not in values or values[name] is not value:
            setattr(tower, name, value)
    return True
