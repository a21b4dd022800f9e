"""Reads the behaviour key of a module tree: all that changes what a forward computes without being an argument.

Two fingerprints of a module tree are equal as long as nobody patches a forward or a class, adds a hook, replaces a
processor or a submodule, or changes a scalar attribute (the factors of FreeU, the scale of an adapter). The values of
weights are not part of it: the weight arena follows them.

Foreign patches are listed as well: a forward, another method or a hook that was put on an instance, and a class or an
attention processor of an extension of the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour import surroundings
from sfast_ext.behaviour.contents import Contents
from sfast_ext.behaviour.foreign_code import Patch
from sfast_ext.behaviour.reader import ClassReading, Reader, Vouch
from sfast_ext.behaviour.snapshot import Snapshot
from sfast_ext.behaviour.value_types import MECHANICS
from sfast_ext.behaviour.values import Unknown


@dataclass
class Fingerprint:
    """The behaviour key of a module tree.

    `key` identifies objects by address. `alive` and `snapshot` hold references to them, so that no address is reused
    while the fingerprint exists. `patches` are the patches on instances below the root. `tensors` are those whose
    addresses are in the key, by address; no references are held to them.
    """

    key: tuple[Hashable, ...]
    alive: list[object]
    patches: list[Patch]
    snapshot: Snapshot
    classes: dict[type, ClassReading]
    names: frozenset[str]
    around: surroundings.Surroundings
    torch_check: surroundings.TorchQuickCheck
    contents: Contents
    unknown: list[Unknown]
    tensors: dict[int, weakref.ref[torch.Tensor]]

    def unchanged(self) -> bool:
        """Whether everything that was read of instances, and of torch, is still the same object.

        Takes a fraction of a reading's time. True means that a reading would give the same. False may be a false alarm.
        """
        if not self.snapshot.unchanged() or not self.contents.unchanged() or surroundings.look() != self.around:
            return False
        if not self.torch_check.unchanged():
            # a change without influence, as of a tracer
            self.torch_check = surroundings.TorchQuickCheck(self.names, self.classes, self.around)
        return True

    def unchanged_quick(self) -> bool:
        """The check for each call; see `Snapshot.unchanged_quick`."""
        return self.snapshot.unchanged_quick() and self.contents.unchanged() and self.torch_check.unchanged()

    def classes_unchanged(self, root: nn.Module) -> bool:
        """Whether a reading of the classes of all modules, and of what their methods call, would give the same."""
        reader = Reader(frozenset(), root)
        reader.names = self.names
        return all(reader.read_class(kind) == known for kind, known in self.classes.items())


def fingerprint(
    root: nn.Module,
    ignored: frozenset[str] = frozenset(),
    transparent: Vouch | None = None,
    below: Callable[..., Any] | None = None,
    ignored_globals: frozenset[tuple[str, str]] = frozenset(),
) -> Fingerprint:
    """Read the behaviour key of a module tree. Takes some milliseconds for SDXL.

    Args:
        root: the module. Wrappers and hooks that were put on the root after our forward run around it, and are not part
        of the key. ignored: names of attributes without influence on behaviour (a host's bookkeeping of weights).
        transparent: see `Hooks.transparent`. The identity of such a forward is not part of the key. below: the
        forward of the root that our forward replaced. None for that of the class. ignored_globals: see
        `Hooks.ignored_globals`.
    """
    reader = Reader(MECHANICS | ignored, root, transparent, below, ignored_globals)
    around = surroundings.look()
    reader.surroundings(around, root)
    reader.read_all(root)
    reader.values.contents.seal()
    return Fingerprint(
        key=tuple(reader.key),
        alive=reader.alive,
        patches=reader.patches,
        snapshot=reader.snapshot.seal(reader.names, reader.run),
        classes=reader.classes,
        names=reader.names,
        around=around,
        torch_check=surroundings.TorchQuickCheck(reader.names, reader.classes, around),
        contents=reader.values.contents,
        unknown=reader.values.values.unknown,
        tensors=reader.tensors,
    )
