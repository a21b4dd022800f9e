"""Whether the GPU has room for weights that stay where plans read them after the host moved the model off the GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext import environment, host_gpu
from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.plans import graph_pool
from sfast_ext.report import Report
from sfast_ext.weights.module_walk import modules_of, parameters_of

DECODING_RESERVE = 6 << 30
"""Bytes that decoding and text encoders may need in addition to a UNet, if the host does not say what it runs next."""

IDLE_RESERVE = 4 << 30
"""Bytes left free while the host has the weights on another device, for upscalers, detectors and preprocessors. Weights
that had to be freed for it come back in a fraction of a second: the host copies them in any case."""

NEXT_MODEL_RESERVE = 8 << 30
"""Bytes that the next model may take while its size is unknown: an SDXL model with its text encoders and VAE."""

WORKSPACE = 512 << 20
"""Bytes that a forward needs in addition to its weights, or a convolution to its activations."""

PLANS_WORKSPACE = 256 << 20
"""Bytes that libraries need while a plan runs, in addition to its values."""

OTHERS_PART = 0.28
"""What is left to other programs while a VAE runs, as a part of such a card's memory: 2.2 of 8 GB. Torch then holds at
most 5.5 GB, next to the driver's. With 2.6 GB left an image takes 0.15 s longer: more banks give way."""

GAPS = 1.25
"""A block in which all values of a VAE find a place, as a multiple of what they take: 2.4 GB of 1024x1024 fit into 3.4
and not into 2.8."""

MAX_ROUNDS = 4
"""Times that as many bytes of banks are freed as are missing, before all banks are."""

_LARGE = 256 << 20
"""A need of fewer bytes is met as it comes."""

DECODER_ACTIVATIONS, ENCODER_ACTIVATIONS = 3, 5
"""Full-size activations alive at one time in a VAE: of its second width in the decoder, of its first in the encoder."""
SAFETY_FACTOR = 1.5


def free_bytes() -> float:
    """Bytes that this process may still take on its GPU; infinite if there is none."""
    if not torch.cuda.is_available():
        return math.inf
    # memory reserved by CUDA graphs counts as cached, but nothing else can get it
    gpu = host_gpu.device()
    cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu) - graph_pool.held()
    return torch.cuda.mem_get_info(gpu)[0] + max(0, cached)


def make_room(needed: float, givers: Iterable[Callable[[], object]]) -> bool:
    """Call these one after another until so many bytes are free. Returns whether they are."""
    for give in givers:
        if free_bytes() >= needed:
            return True
        give()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return free_bytes() >= needed


def givers(needed: float, report: Report, why: str) -> list[Callable[[], object]]:
    """What frees memory of plans, for `make_room`: CUDA graphs first, then of banks what is missing."""
    return [
        lambda: graph_pool.make_room(report, why, banks=0),
        lambda: graph_pool.make_room(report, why, banks=needed - free_bytes()),
    ]


def free_pieces(needed: float, report: Report, why: str) -> None:
    """Free further banks until so many bytes are free in whole blocks. Pieces between banks hold no values of a VAE."""
    torch.cuda.empty_cache()
    for _ in range(MAX_ROUNDS):
        missing = needed - torch.cuda.mem_get_info(host_gpu.device())[0]
        if missing <= 0:
            return
        graph_pool.make_room(report, why, banks=missing)
    graph_pool.make_room(report, why)


def give_way(needed: float, in_one: bool, others: Iterable[Callable[[], object]], report: Report, why: str) -> bool:
    """Have plans, and then others, give memory back until so many bytes are free, in whole blocks if asked for. Returns
    whether they are free, in blocks or not."""
    try:
        return make_room(needed, [*givers(needed, report, why), *others])
    finally:
        if in_one:
            free_pieces(needed, report, why)


def left_to_others(needed: float) -> float:
    """Bytes to leave free in addition while a VAE runs that needs so many: on a small card, next to weights in 8 bits
    that come back from system memory, what a desktop and other programs may have. A driver that has no memory left for
    them moves what torch holds to system memory, without an error."""
    tight = needed >= _LARGE and is_tight()
    resident = tight and any(banks.resident() for banks in graph_pool.pool_of(host_gpu.device()).spare)
    total = environment.gpu_memory(host_gpu.device()) or 0
    return OTHERS_PART * total if resident else 0.0


def hold_one_block(needed: float) -> None:
    """On a small card, have the allocator hold one block for what comes next, and nothing else that is free. Blocks of
    all the sizes of a VAE's values, into which others do not fit, take nearly twice the memory."""
    if needed >= _LARGE and is_tight():
        torch.cuda.empty_cache()
        for factor in (GAPS, 1.0):
            # an error would count as one of the host's, and pieces of blocks in use are no block
            if factor * needed <= torch.cuda.mem_get_info(host_gpu.device())[0]:
                with contextlib.suppress(torch.cuda.OutOfMemoryError):
                    torch.empty(int(factor * needed), dtype=torch.uint8, device=host_gpu.device())
                    break


def is_tight() -> bool:
    """Whether the card is small."""
    return torch.cuda.is_available() and environment.is_small_card(host_gpu.device())


def load_bytes(module: nn.Module) -> int:
    """Bytes that a module is about to take on the GPU: its weights that are elsewhere, and some to run it."""
    return sum(_bytes(p) for p in parameters_of(module) if not p.is_cuda) + WORKSPACE


def decoder_bytes(widths: Sequence[int], latent: torch.Tensor) -> float:
    """Bytes that a VAE's decoder needs for its activations.

    Args:
        widths: channels of its blocks, from the image inwards; each but the last halves the size.
        latent: its input.
    """
    pixels = latent[:, 0].numel() << 2 * (len(widths) - 1)
    return (
        SAFETY_FACTOR * DECODER_ACTIVATIONS * widths[min(1, len(widths) - 1)] * pixels * latent.element_size()
        + WORKSPACE
    )


def planned_bytes(module: nn.Module, args: tuple[Any, ...]) -> float | None:
    """Bytes that a call of a VAE's part needs for its activations if its plan serves it; None if none does."""
    accelerator, planned = accelerator_of(module), None
    # in a forward pre-hook an error would end the image, and without a plan's need there is an estimate
    with contextlib.suppress(Exception):
        planned = None if accelerator is None else accelerator.planned_bytes(*args)
    return None if planned is None else planned + PLANS_WORKSPACE


def encoder_bytes(widths: Sequence[int], image: torch.Tensor) -> float:
    """Bytes that a VAE's encoder needs for its activations; see `decoder_bytes`."""
    return SAFETY_FACTOR * ENCODER_ACTIVATIONS * widths[0] * image[:, 0].numel() * image.element_size() + WORKSPACE


def spared(found: Accelerator, module: nn.Module) -> int:
    """How many bytes less a module takes with its weights in 8 bits. Plans may have those of layers as well that were
    in the place of others before: they give way."""
    resident, here = found.arena.resident, {id(p): p for p in parameters_of(module)}
    banks = [bank for bank in resident.banks if any(id(each.now) in here for each, _ in bank.sources)]
    aside = {id(each.now) for bank in banks for each, _ in bank.sources} | set(map(id, resident.elsewhere()))
    return sum(p.nbytes for key, p in here.items() if key in aside) - sum(bank.bytes for bank in banks)


def has_room_to_stay(module: nn.Module) -> bool:
    """Whether a module's weights fit on the GPU next to what the host runs after it.

    CUDA graphs count as free, as they give way, and so does what the module's plans hold while it is off the GPU. Calls
    would be bypassed otherwise because of their own plan.
    """
    free = free_bytes() + graph_pool.held()
    if not on_gpu(module):
        found = accelerator_of(module)
        free += (0 if found is None else found.arena.held_bytes) - _size(module)
    return free >= DECODING_RESERVE


def has_room_to_wait(module: nn.Module) -> bool:
    """Whether the memory of a module's plans fits on the GPU next to the host's next model, which may be larger."""
    return free_bytes() >= max(1.5 * _size(module), NEXT_MODEL_RESERVE)


def has_room_for_second(module: nn.Module) -> bool:
    """Whether a second module of this size fits next to the first."""
    return free_bytes() >= 1.5 * _size(module)


def _size(module: nn.Module) -> int:
    return sum(map(_bytes, parameters_of(module)))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def on_gpu(module: nn.Module | Iterable[nn.Module]) -> bool:
    """Whether any weights are on a GPU: those of a module, or those that modules hold themselves."""
    modules = modules_of(module) if isinstance(module, nn.Module) else module
    held = (value for each in modules for value in each._parameters.values())
    return any(p is not None and p.is_cuda for p in held)
