"""SD.Next's balanced offload on a card with room for a UNet in half precision, of which SD.Next uses less: with 8 bits the
UNet comes as a whole, on a pretended GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pairs import one_of

from hosts.adapters.test_sdnext_resident import SIZE, Running, on  # noqa: F401
from sfast_ext import accelerator_of
from sfast_ext.hosts import system_memory
from sfast_ext.hosts.sdnext import whole_unet
from sfast_ext.runtime.model_state import ModuleContext

OOM = torch.cuda.OutOfMemoryError
ROOM = 1.5
"""UNets in half precision for which a card has room: SD.Next's high watermark of 0.6 is below one."""
FITS = (ROOM, "july"), (ROOM, "august")


def in_parts(unet: Any) -> bool:
    """Whether layers are brought for each call."""
    return any(getattr(h, "offload", False) for m in unet.modules() for h in _hooks_of(m)) and unet.device.type == "cuda"


def _hooks_of(module: Any) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", (hook,)))


@pytest.fixture
def card(on: Running) -> Iterator[Running]:  # noqa: F811
    on.host.shared.gpu_memory = on.card.capacity / 2**30
    on.host.opts.diffusers_offload_max_gpu_memory = 0.6
    on.load(0)
    gc.collect()
    yield on


def cards(number: int | None = None, *rooms: Any) -> Any:
    rooms = rooms or FITS
    return pytest.mark.parametrize("on", rooms if number is None else one_of(number, *rooms), indirect=True)


def steady(card: Running, **job: Any) -> None:
    """Images in 8 bits, of a UNet that is whole."""
    found = []
    for _ in range(3):
        assert card.picture(**job) < 0.1
        assert not in_parts(card.unet)
        found.append(card.away)
    assert sorted(found)[1] > 20, (found, card.host.reasons())


def parted(card: Running, words: str, **job: Any) -> None:
    """An image by SD.Next's own map, with a reason."""
    runs, reasons = card.host.runs(), card.host.reasons
    assert card.picture(**job) < 1e-3
    assert in_parts(card.unet) and card.host.runs() == runs and words in reasons(), reasons()


OWN = "parts of the UNet do not fit on the GPU"


@cards()
def test_it_comes_as_a_whole(card: Running) -> None:
    assert card.picture() < 0.06
    assert not in_parts(card.unet)
    steady(card)
    assert card.counter("errors") == 0 and card.counter("captures") == 1 and card.counter("replays") > 5
    told = accelerator_of(card.unet).status()["eight_bits"]
    assert told["layers"] > 10 and told["reason"] is None
    # SD.Next's map is as it was
    assert "cpu" in card.unet.balanced_offload_device_map.values()


@cards(0)
def test_without_8_bits_it_comes_in_parts(card: Running) -> None:
    card.host.opts.sfast_eight_bits = False
    parted(card, OWN)
    parted(card, OWN)


@cards(None, (1.05, "july"), (1.05, "august"))
def test_it_comes_in_parts_without_room_for_all_of_it(card: Running) -> None:
    for _ in range(2):
        parted(card, "8 bits need 0.0 GB of GPU memory, and 0.0 are free")
    assert card.counter("out_of_memory") == 0 and card.card.refused == 0


def more_system_memory(card: Running) -> None:
    pass
