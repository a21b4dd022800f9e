"""What Forge, Forge Neo and reForge are told of the memory that a VAE needs.

Forge estimates what the original takes, and moves models to system memory until so much is free: 4.6 GB for SDXL at
1024x1024. A plan takes about a fourth of that. With the plan's need, text encoders and the UNet stay on a small card.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.session import guarded
from sfast_ext.report import Report


class _Call(threading.local):
    """The call of a VAE in this thread. A preview may be decoded at the same time as an image.

    Attributes:
        needs: the patcher of the VAE that is about to run, and the bytes that its plan needs.
        withheld: frees what Forge was not asked for.
    """

    needs: tuple[Any, float] | None = None
    withheld: Callable[[], object] | None = None


class VaeRoom:
    """Lowers the memory that Forge frees for a call of a VAE which a plan serves. If the original runs all the same and
    is short of memory, Forge frees what it would have freed at first.

    Args:
        make_room: has plans of other networks give memory back until so many bytes are free, in one block if asked for.
    """

    def __init__(self, make_room: Callable[[float, bool], None], report: Report) -> None:
        self._make_room, self._report = make_room, report
        self._loaded: Callable[[], Sequence[Any]] = list
        self._free: Callable[..., Any] | None = None
        self._call = _Call()

    def install(self, host: Installation) -> None:
        """Wrap functions of Forge."""
        management = host.found.place("current_loaded_models").owner
        self._free = lambda *args: management.free_memory(*args)
        self._loaded = lambda: management.current_loaded_models
        host.wrap("load_models_gpu", self._load)
        host.wrap("VAE.decode", self._decode)
        host.wrap("VAE.encode", self._encode)

    def gave_way(self) -> bool:
        """The original of a VAE's part is short of memory: whether Forge was told less than it takes, and freed the
        rest now."""
        withheld, self._call.withheld = self._call.withheld, None
        if withheld is None:
            return False
        withheld()
        return True

    def _decode(self, original: Callable[..., Any], vae: Any, samples: Any, *args: Any, **more: Any) -> Any:
        with self._telling(vae, "decoder", samples):
            return original(vae, samples, *args, **more)

    def _encode(self, original: Callable[..., Any], vae: Any, pixels: Any, *args: Any, **more: Any) -> Any:
        # Forge has images with their channels last
        image = pixels.movedim(-1, 1) if isinstance(pixels, torch.Tensor) and pixels.dim() == 4 else pixels
        with self._telling(vae, "encoder", image):
            return original(vae, pixels, *args, **more)

    @contextlib.contextmanager
    def _telling(self, vae: Any, part: str, operand: Any) -> Iterator[None]:
        def ask() -> None:
            planned = self._planned_bytes(vae, part, operand)
            self._call.needs = None if planned is None else (vae.patcher, planned)

        guarded(self._report, "memory", ask)
        try:
            yield
        finally:
            self._call.needs = self._call.withheld = None

    def _planned_bytes(self, vae: Any, part: str, operand: Any) -> float | None:
        """What the plan needs that serves a call; None if none does.

        Args:
            operand: a batch of latents (B, C, H, W), or of images. Forge divides more than one by what is free, so its
                number holds for them.
        """
        module = getattr(vae.first_stage_model, part, None)
        place = torch.device(vae.device)
        if not isinstance(module, nn.Module) or place.type != "cuda":
            return None
        if not isinstance(operand, torch.Tensor) or operand.dim() != 4 or len(operand) != 1:
            return None
        with contextlib.suppress(torch.cuda.OutOfMemoryError), torch.inference_mode(False):
            # on a card that is full before Forge has freed any, Forge's own number holds
            alike = torch.empty_like(operand, dtype=vae.vae_dtype, device=place, requires_grad=False)
            return gpu_room.planned_bytes(module, (alike,))
        return None

    def _load(
        self, original: Callable[..., Any], models: Any, memory_required: float = 0, *args: Any, **more: Any
    ) -> Any:
        # for the first load alone: Forge loads again to decode in tiles, if memory ran out
        needs, self._call.needs = self._call.needs, None
        if needs is None or needs[1] >= memory_required or [*models] != [needs[0]]:
            return original(models, memory_required, *args, **more)
        patcher, planned = needs
        place = patcher.load_device

        def free() -> None:
            kept = [each for each in self._loaded() if each.model is patcher]
            assert self._free is not None
            self._free(memory_required, place, kept)

        self._call.withheld = free
        result = original(models, planned, *args, **more)
        others = gpu_room.left_to_others(planned)
        self._make_room(planned + others, others > 0)
        return result
