"""What small tensors of integers among the arguments hold, as part of a signature.

To read one on a GPU, the CPU waits until the step before is done, and the GPU is idle until the next is launched. A
mask is the same object in all steps of an image. So a call that may be served speculatively takes what the object held
before, and sends a copy of what it holds now to the CPU before the launch. It is looked at while the GPU works.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

MAX_VALUES = 4096
"""Numbers of a tensor whose content can be part of a signature."""
_MAX_REMEMBERED = 16

Content = tuple[Any, ...]


class Pending(NamedTuple):
    """A content that was taken to be what it was before.

    Attributes:
        copy: what the tensor holds, once `done` has happened.
    """

    copy: torch.Tensor
    done: Any
    expected: Content


class Contents:
    """Reads contents, and remembers what objects on a GPU held."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[weakref.ref[torch.Tensor], Content]] = OrderedDict()

    def read(self, leaf: torch.Tensor, trust: bool) -> tuple[Content, Pending | None]:
        """What a tensor holds, or held when it was read last, to be confirmed by `settled`.

        Args:
            trust: whether it may be what it was before.
        """
        if leaf.device.type != "cuda":
            return content_of(leaf), None
        reference, known = self._known.get(id(leaf), (None, None))
        if trust and known is not None and reference is not None and reference() is leaf:
            return known, _pending(leaf, known)
        found = content_of(leaf)
        self._known[id(leaf)] = weakref.ref(leaf), found
        self._known.move_to_end(id(leaf))
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found, None


def content_of(leaf: torch.Tensor) -> Content:
    """The numbers in a tensor. For one on a GPU the CPU waits."""
    return tuple(leaf.flatten().tolist())


def readable(leaf: torch.Tensor) -> bool:
    """Whether the content of a tensor can be part of a signature."""
    whole = not leaf.is_floating_point() and not leaf.is_complex()
    return whole and leaf.numel() <= MAX_VALUES


def of_one_value(leaf: torch.Tensor) -> bool:
    """Whether an image of a batch (N, C, H, W) has one value in each channel. For one on a GPU the CPU waits."""
    if leaf.dim() != 4 or not leaf.is_floating_point() or leaf.shape[2:].numel() < 2:
        return False
    with torch.no_grad():
        return bool((leaf == leaf[:, :, :1, :1]).flatten(1).all(dim=1).any())


def settled(pending: Sequence[Pending]) -> bool:
    """Whether all contents are what they were taken for. The CPU waits for copies that were sent before the launch."""
    for each in pending:
        each.done.synchronize()
    return all(content_of(each.copy) == each.expected for each in pending)


def _pending(leaf: torch.Tensor, expected: Content) -> Pending:
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
        copy.copy_(leaf.detach(), non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(leaf.device))
    return Pending(copy, done, expected)
