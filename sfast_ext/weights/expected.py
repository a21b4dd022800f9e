"""Weights that a plan with 8-bit integers is expected to read, before there is one."""

from __future__ import annotations

import torch
from torch import nn

from sfast_ext.weights.aside import Aside, is_there
from sfast_ext.weights.original_layout import is_plain
from sfast_ext.weights.weight import tensors_of

_HALF = (torch.float16, torch.bfloat16)
LEAST = 64 << 10
"""Bytes of a weight that is set aside before it is known if it can be."""


def expected(root: nn.Module, device: torch.device | None = None) -> dict[str, Aside]:
    """The weights of layers, in half precision and in system memory, that are large enough to matter, by path. Not the
    first parameter of the module, which tells hosts where it is.

    Args:
        device: those on this device are among them.
    """
    first, found = next(root.parameters(), None), {}
    for value, paths, slots in tensors_of(root).values():
        layers = isinstance(value, nn.Parameter) and value.dim() in (2, 4) and all(n == "weight" for _, n in slots)
        there = is_there(value) or value.device == device and is_plain(value)
        if layers and value is not first and value.dtype in _HALF and value.nbytes >= LEAST and there:
            found[paths[0]] = Aside(paths[0], slots, value.shape, value.dtype)
    return found
