"""The forward hooks with which transformers, from 5 on, notes the results of layers, for `output_hidden_states`.

Such a hook stays on its layer once it was asked for. It writes to a list that the forward of the model around it makes
at each call and returns. So a capture of that forward has all that its hooks do. A capture of something inside that
forward has not: a replay would leave the list empty.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

from sfast_ext.behaviour.foreign_code import layers

_HOME = "transformers.utils.output_capturing"


def written_there(function: Any) -> bool:
    """Whether a function is of the file of transformers that records results."""
    return isinstance(function, FunctionType) and function.__globals__.get("__name__") == _HOME


def collects(module: nn.Module) -> bool:
    """Whether the forward of a module's class makes the list that hooks on its layers write to."""
    forward = getattr(type(module), "forward", None)
    return forward is not None and any(map(written_there, layers(forward)))


def inside_collectors(root: nn.Module) -> frozenset[int]:
    """The identities of the modules in `root` whose hooks write to a list that a forward in `root` makes."""
    found: set[int] = set()
    for module in root.modules():
        if id(module) not in found and collects(module):
            found |= {id(inner) for inner in module.modules()}
    return frozenset(found)
