"""Makes room on the GPU before a VAE decodes or encodes, which takes more memory than its weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.hosts import gpu_room


class VaeMemory:
    """Forward hooks on the decoders and encoders of VAEs.

    Args:
        make_room: called before one runs on the GPU, with the bytes that it needs.
    """

    def __init__(self, make_room: Callable[[float], None]) -> None:
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
        parts = getattr(vae, "decoder", None), getattr(vae, "encoder", None)
        if not widths or not all(isinstance(part, nn.Module) for part in parts):
            return []
        needs = (functools.partial(gpu_room.decoder_bytes, widths), functools.partial(gpu_room.encoder_bytes, widths))
        return [part.register_forward_pre_hook(self._before(need)) for part, need in zip(parts, needs)]  # type: ignore[union-attr]

    def _before(self, need: Callable[[torch.Tensor], float]) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
                needed = need(args[0])
                self._make_room(needed + gpu_room.left_to_others(needed))
                gpu_room.hold_one_block(needed)

        return hook


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
