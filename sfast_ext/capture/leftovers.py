"""Fake tensors that outlive a capture in a place that nobody knows.

What a forward can reach is put back, see `state`. It may reach more: by a library in C, by another thread. There each
fake tensor that is left is found by who refers to it, and taken out.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections import deque
from types import CellType, FrameType

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import gc_pause

Made = list[weakref.ref[FakeTensor]]


def take_out(made: Made, graph_module: fx.GraphModule | None) -> str | None:
    """Take fake tensors out of whatever holds them. Returns a description of the first holder, or None.

    Args:
        made: those of the capture.
        graph_module: the record, which holds some as metadata.
    """
    known = _of_graph(graph_module)
    if not _left(made, known):
        return None
    # those in a cycle of references
    gc.collect()
    left = _left(made, known)
    if not left:
        return None
    found = _taken_out(left, "a place that is not known")
    # referrers are not looked for among frozen objects, and to thaw and freeze all of a process takes a second
    left = _left(made, known)
    if not left or not gc.get_freeze_count():
        return found
    frozen = gc_pause.some_are_frozen()
    gc_pause.thaw()
    try:
        found = _taken_out(left, found)
    finally:
        if frozen:
            # not with a network that was loaded meanwhile
            gc_pause.freeze()
    return found


def forget_locals(exc: BaseException | None) -> None:
    """Let go of what the functions that an exception went through had in their variables."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__


def _left(made: Made, known: set[int]) -> list[FakeTensor]:
    return [x for reference in made if (x := reference()) is not None and id(x) not in known]


def _of_graph(graph_module: fx.GraphModule | None) -> set[int]:
    if graph_module is None:
        return set()
    found = {id(x) for x in (*graph_module.parameters(), *graph_module.buffers(), *vars(graph_module).values())}
    for node in graph_module.graph.nodes:
        val = node.meta.get("val")
        found.update(map(id, val if isinstance(val, (list, tuple)) else (val,)))
    return found


def _taken_out(left: list[FakeTensor], found: str) -> str:
    while left:
        # popped: this list must not be among those that refer to it
        found = _take_out(left.pop()) or found
    return found


def _take_out(tensor: torch.Tensor) -> str | None:
    # a comprehension that names the tensor would hold it in a cell
    found, address = None, id(tensor)
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, FrameType):
            continue
        found = f"a {type(holder).__name__}"
        if isinstance(holder, dict):
            for key in [key for key, value in holder.items() if id(value) == address]:
                dict.pop(holder, key, None)
        elif isinstance(holder, (list, deque)):
            kept = [each for each in holder if id(each) != address]
            holder.clear()
            holder.extend(kept)
        elif isinstance(holder, set):
            set.discard(holder, tensor)
        elif isinstance(holder, CellType):
            holder.cell_contents = None
    return found
