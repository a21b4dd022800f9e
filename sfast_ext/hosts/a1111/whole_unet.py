"""AUTOMATIC1111's --lowvram for a UNet in 8 bits: it comes to the GPU as a whole, as with --medvram.

With --lowvram the WebUI runs a function before each block of a UNet, which sends that block to the GPU and the one
before it back. Before the module around the UNet, the same function sends all of it. A plan calls no blocks, and what
it reads in half precision is on the GPU then.

The original forward needs the whole UNet in half precision there for the first image of a size. On a card without that
room the WebUI's blocks stay as they are, and they are put back if memory runs out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import accelerator_of
from sfast_ext.eight_bits import SMALL, refusal_of
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.moves import place_of
from sfast_ext.report import Report

SENDS = "send_me_to_gpu"
"""The WebUI's function."""


class WholeUnet:
    """Whether the UNet of the model that is used comes as a whole.

    Args:
        blocks: names of what comes block by block.
    """

    def __init__(self, report: Report, blocks: Callable[[], Sequence[str]]) -> None:
        self._report, self._blocks = report, blocks
        self._taken: tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], Any, Any] | None = None
        # a model has no use for it a second time if memory ran out once
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def holds(self, unet: nn.Module | None) -> bool:
        """Whether this UNet comes as a whole."""
        return self._taken is not None and unet is not None and self._taken[1]() is unet

    def follow(self, wrapper: nn.Module | None, unet: nn.Module | None, device: Any, wanted: bool) -> None:
        """Have a UNet come as a whole if it is wanted and fits, and no other.

        Args:
            wrapper: the module around it.
            device: where the WebUI computes.
        """
        if self.holds(unet) and wanted:
            return
        self.release()
        place = place_of(device)
        if not wanted or wrapper is None or unet is None or unet in self._refused or not _fits(unet, place):
            return
        blocks = list(self._blocks_of(unet))
        senders = [[(key, each) for key, each in block._forward_pre_hooks.items() if _sends(each)] for block in blocks]
        if not blocks or any(len(found) != 1 for found in senders):
            # another --lowvram than the one that is known
            return
        sends = senders[0][0][1]
        for block, ((key, _),) in zip(blocks, senders):
            del block._forward_pre_hooks[key]

        def come(module: nn.Module, args: Any) -> None:
            try:
                sends(module, args)
                return
            except torch.cuda.OutOfMemoryError:
                if not self.holds(unet):
                    raise
            # after the handler, which keeps what had come
            self.gave_way(unet)

        handle = wrapper.register_forward_pre_hook(come, prepend=True)
        self._taken = weakref.ref(wrapper), weakref.ref(unet), sends, handle

    def release(self) -> None:
        """The WebUI moves blocks again."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        wrapper, unet = taken[0](), taken[1]()
        _, _, sends, handle = taken
        handle.remove()
        if wrapper is None or unet is None:
            return
        blocks = list(self._blocks_of(unet))
        for block in blocks:
            block.register_forward_pre_hook(sends, prepend=True)
        if any(p.is_meta for p in unet.parameters()):
            # the WebUI has dropped it
            return
        # it may have come in part; then what is on the GPU leaves, and a block comes, as the WebUI notes it
        wrapper.to("cpu")
        sends(blocks[0], None)
        device = next(blocks[0].parameters()).device
        mine = set(map(id, blocks))
        for child in (*(c for c in wrapper.children() if c is not unet), *unet.children()):
            inner = list(child) if isinstance(child, nn.ModuleList) else [child]
            if not any(id(each) in mine for each in inner):
                # the rest is always there
                child.to(device)
        accelerator = accelerator_of(unet)
        if accelerator is not None:
            # a forward that finds weights in system memory leaves them as plans laid them
            accelerator.arena.restore_layout_temporarily()

    def gave_way(self, unet: nn.Module | None) -> bool:
        """The original forward of a UNet is short of memory, which it would not be block by block. Whether it may run
        again."""
        if unet is None or not self.holds(unet):
            return False
        self._refused.add(unet)
        accelerator = accelerator_of(unet)
        try:
            if accelerator is not None:
                why = "the UNet comes to the GPU block by block again: there is no room for all of it"
                accelerator.forget_plans(why)
                accelerator.arena.resident.forget()
        finally:
            self.release()
        return True

    def _blocks_of(self, unet: nn.Module) -> Iterator[nn.Module]:
        for name in self._blocks():
            part = getattr(unet, name, None)
            if isinstance(part, nn.Module):
                yield from part if isinstance(part, nn.ModuleList) else [part]


def _sends(function: Any) -> bool:
    return getattr(function, "__name__", None) == SENDS


def _fits(unet: nn.Module, place: torch.device | None) -> bool:
    """Whether a card is small for a UNet in half precision, and has room for it when all else has left."""
    if place is None or place.type != "cuda" or refusal_of(place) is not None:
        return False
    size = sum(p.nbytes for p in unet.parameters())
    free, total = torch.cuda.mem_get_info(place)
    return size + gpu_room.WORKSPACE <= free + torch.cuda.memory_reserved(place) and total < SMALL * size
