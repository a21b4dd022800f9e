"""AUTOMATIC1111's GPU memory: plans must not hold what the WebUI frees or is about to use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.moves import Moves
from sfast_ext.hosts.session import guarded
from sfast_ext.hosts.text_encoders import TextEncoders
from sfast_ext.hosts.vae import Vaes
from sfast_ext.hosts.vae_memory import VaeMemory
from sfast_ext.report import Report
from sfast_ext.weights.defragmentation import defragment

_WHY = "the WebUI needs the GPU memory"

_MOVED = ("model", "cond_stage_model", "cond_stage_model.wrapped", "conditioner", "first_stage_model")
"""What leaves the GPU with --medvram, of a model: the module around the UNet, the text encoder, which the WebUI wraps
after it was told to move it, those of SDXL, and the VAE."""
UNET_BLOCKS = ("time_embed", "input_blocks", "middle_block", "output_blocks")
"""What comes to the GPU block by block with --lowvram, of the UNet."""


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


class A1111Memory:
    """Frees the memory that the WebUI relies on.

    The WebUI moves its model to the CPU, or drops it, before it loads another. Plans are kept for a checkpoint of the
    same architecture; the weights that they read are copied again at the next call, when the model is back. Before a
    VAE decodes or encodes, and before an upscaler runs, CUDA graphs are freed if there is no room next to them; they
    are captured again. With --medvram the UNet leaves the GPU within each image; the weights that plans read stay
    if the others have room next to them, and are freed otherwise. Those of the plans of the VAE and of text encoders
    are freed whenever these leave. With --lowvram the UNet has no plans, but its blocks, which come and leave at each
    step, are moved faster.

    Args:
        attachment: has the accelerators of the UNets.
        rare: those of what runs about once for each image: the VAEs and the text encoders.
        unet_of: gives the UNet of one of the WebUI's models.
    """

    def __init__(
        self,
        attachment: Attachment,
        rare: Sequence[Vaes | TextEncoders],
        unet_of: Callable[[Any], nn.Module | None],
        report: Report,
    ) -> None:
        self._attachment, self._unet_of, self._report = attachment, unet_of, report
        self._rare = rare
        self._vaes = VaeMemory(self._make_room)
        self._moves = Moves(attachment.among, self._make_room, report, "the WebUI", self._rare_among)

    def install(self, host: Installation) -> None:
        """Wrap functions of the WebUI."""
        for name in ("send_model_to_cpu", "send_model_to_trash"):
            host.wrap(name, self._send_away)

    def install_upscaling(self, host: Installation) -> None:
        """Make room for upscalers."""
        host.wrap("Upscaler.upscale", self._upscale)

    def release(self) -> None:
        """Follow and keep nothing any more."""
        self._vaes.release()
        self._moves.release()

    def watch(self, model: Any, accelerated: bool) -> None:
        """Make room for the VAE of the model that is used, and for no other; follow its modules if it moves them."""
        if torch.cuda.is_available():
            self._vaes.watch([getattr(model, "first_stage_model", None)])
            moved = accelerated and getattr(model, "lowvram", False)
            self._moves.watch(self._moved(model) if moved else ())

    def leave_early(self, model: Any) -> None:
        """The WebUI has loaded a model to the GPU, or it is accelerated from now on: see `Accelerator.leave_early`."""
        unet = self._unet_of(model)
        found = None if unet is None or not self._attachment.holds(unet) else accelerator_of(unet)
        if found is None or not found.leave_early():
            return
        attachments = (self._attachment, *(each for rare in self._rare for each in rare.attachments))
        # plans read weights where they are
        if not any(each.plans for attachment in attachments for each in attachment.accelerators()):
            defragment(self._parts(model))

    def _moved(self, model: Any) -> Iterator[nn.Module]:
        """What the WebUI moves of a model with --medvram or --lowvram."""
        from modules import shared

        parts: list[Any] = list(self._parts(model))
        if getattr(shared.cmd_opts, "lowvram", False):
            unet = self._unet_of(model)
            parts += [_attribute(unet, name) for name in UNET_BLOCKS]
        for part in parts:
            if isinstance(part, nn.Module):
                yield from part if isinstance(part, nn.ModuleList) else [part]

    def _parts(self, model: Any) -> Iterator[nn.Module]:
        parts = (functools.reduce(_attribute, name.split("."), model) for name in _MOVED)
        return (part for part in parts if isinstance(part, nn.Module))

    def _send_away(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        unet = self._unet_of(model)
        was_there = unet is not None and gpu_room.on_gpu(unet)
        parts = [getattr(model, name, None) for name in ("first_stage_model", "cond_stage_model")]
        there = [part for part in parts if isinstance(part, nn.Module) and gpu_room.on_gpu(part)]
        result = original(model, *args, **kwargs)
        self._moves.copies.sweep()
        if unet is not None and was_there and not gpu_room.on_gpu(unet):
            self._guarded(lambda: self._attachment.suspend(unet))
        for part in there:
            if not gpu_room.on_gpu(part):
                for rare in self._rare:
                    self._guarded(functools.partial(rare.suspend, part))
        return result

    def _rare_among(self, modules: Container[int]) -> list[Accelerator]:
        return [each for rare in self._rare for each in rare.among(modules)]

    def _upscale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._make_room(gpu_room.IDLE_RESERVE)
        return original(*args, **kwargs)

    def _make_room(self, needed: float, in_one: bool = False) -> None:
        # the weights that plans read are the model's own, except with --medvram and --lowvram
        others = [*(rare.give_memory_back for rare in self._rare), self._attachment.give_memory_back]
        self._guarded(lambda: gpu_room.give_way(needed, in_one, others, self._report, _WHY))

    def _guarded(self, action: Callable[[], object]) -> None:
        guarded(self._report, "memory", action)
