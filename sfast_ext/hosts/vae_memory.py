"""Makes room on the GPU before a VAE decodes or encodes, which takes more memory than its weights.

A decoder's values double at each level. Blocks of the allocator that smaller ones have left hold none of the larger
ones: next to a peak of 2.4 GB it keeps 4.3 (SDXL, 1024x1024). On a small card `FreeCached` gives them back before
the last, largest ones are made.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.forward_slot import OwnHook
from sfast_ext.hosts import gpu_room

_LARGE = 64 << 20
"""Bytes of what a block of a decoder is given, from which it matters."""


class FreeCached(OwnHook):
    """A forward pre-hook: gives back what the allocator holds for nobody, if the input is large."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, torch.Tensor) and x.is_cuda and x.nbytes >= _LARGE:
            # torch 2.1 refuses while a CUDA graph is captured
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


class MakeRoom(OwnHook):
    """A forward pre-hook of a decoder or an encoder.

    Args:
        make_room: see `VaeMemory`.
        need: the bytes that the original takes for an input.
        frees_cached: whether `FreeCached` is on its largest steps.
    """

    def __init__(
        self, make_room: Callable[[float, bool], None], need: Callable[[torch.Tensor], float], frees_cached: bool
    ) -> None:
        self._make_room, self._need, self._frees_cached = make_room, need, frees_cached

    def __call__(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
            planned = gpu_room.planned_bytes(module, args)
            needed = self._need(args[0]) if planned is None else planned
            others = gpu_room.left_to_others(needed)
            self._make_room(needed + others, others > 0)
            # a plan gives cached memory back by itself
            if planned is None and not self._frees_cached:
                gpu_room.hold_one_block(needed)


def largest_steps(decoder: nn.Module) -> list[nn.Module]:
    """What makes the largest values of a decoder, one after another. Empty if it is neither diffusers' nor ldm's."""
    levels: Any = getattr(decoder, "up_blocks", None)
    if levels is not None:
        found = [*(levels[-2].upsamplers or ()), *levels[-1].resnets] if len(levels) > 1 else []
    else:
        # the first is the largest
        levels = getattr(decoder, "up", None)
        found = [levels[1].upsample, *levels[0].block] if levels is not None and len(levels) > 1 else []
    return [each for each in found if isinstance(each, nn.Module)]


class VaeMemory:
    """Forward hooks on the decoders and encoders of VAEs.

    Args:
        make_room: called before one runs on the GPU, with the bytes that it needs, and whether they must not be free
            in pieces.
    """

    def __init__(self, make_room: Callable[[float, bool], None]) -> None:
        self._make_room = make_room
        self._vaes: dict[int, tuple[weakref.ref[nn.Module], list[Any]]] = {}

    def watch(self, vaes: Iterable[Any]) -> None:
        """Put hooks on these VAEs, and remove those on others."""
        found = {id(vae): vae for vae in vaes if isinstance(vae, nn.Module)}
        for key in [key for key, (vae, _) in self._vaes.items() if vae() is None or key not in found]:
            self._unwatch(key)
        for key, vae in found.items():
            if key not in self._vaes:
                self._vaes[key] = weakref.ref(vae), self._hooks(vae)

    def release(self) -> None:
        """Remove every hook."""
        for key in list(self._vaes):
            self._unwatch(key)

    def _unwatch(self, key: int) -> None:
        for handle in self._vaes.pop(key)[1]:
            handle.remove()

    def _hooks(self, vae: nn.Module) -> list[Any]:
        widths = widths_of(vae)
        decoder, encoder = getattr(vae, "decoder", None), getattr(vae, "encoder", None)
        if not widths or not isinstance(decoder, nn.Module) or not isinstance(encoder, nn.Module):
            return []
        steps: list[nn.Module] = []
        if gpu_room.is_tight():
            # another decoder is left alone
            with contextlib.suppress(AttributeError, IndexError, TypeError):
                steps = largest_steps(decoder)
        decodes = MakeRoom(self._make_room, functools.partial(gpu_room.decoder_bytes, widths), bool(steps))
        encodes = MakeRoom(self._make_room, functools.partial(gpu_room.encoder_bytes, widths), False)
        return [
            decoder.register_forward_pre_hook(decodes),
            encoder.register_forward_pre_hook(encodes),
            *(step.register_forward_pre_hook(FreeCached()) for step in steps),
        ]


def widths_of(vae: nn.Module) -> Sequence[int]:
    """Channels of a VAE's blocks, from the image inwards. Empty if the VAE is neither diffusers' nor ldm's."""
    widths = getattr(getattr(vae, "config", None), "block_out_channels", None)
    if widths:
        return tuple(widths)
    encoder: Any = getattr(vae, "encoder", None)
    first, factors = getattr(encoder, "ch", None), getattr(encoder, "in_ch_mult", None)
    if not isinstance(first, int) or not factors:
        return ()
    # the first factor belongs to the convolution in front of the blocks
    return tuple(first * factor for factor in tuple(factors)[1:])
