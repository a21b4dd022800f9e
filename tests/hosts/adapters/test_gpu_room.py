"""How much memory a host is going to want, and who gives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_card import pretended_card
from torch import nn

from sfast_ext.environment import TORCH
from sfast_ext.hosts import gpu_room
from sfast_ext.hosts.moves import place_of
from sfast_ext.plans import graph_pool

diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 32, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_vae_takes_is_known(widths, dtype, monkeypatch):
    vae = diffusers.AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=2,
        norm_num_groups=4,
        latent_channels=4,
    ).eval()
    side = 8
    size = side << len(widths) - 1
    with torch.no_grad(), pretended_card(monkeypatch, 1 << 30) as card:
        vae.to("cuda", dtype)
        for run, part, x, told in (
            (vae.decode, vae.decoder, torch.randn(2, 4, side, side), lambda x: gpu_room.decoder_bytes(widths, x)),
            (vae.encode, vae.encoder, torch.randn(2, 3, size, size), lambda x: gpu_room.encoder_bytes(widths, x)),
        ):
            expected = []
            hook = part.register_forward_pre_hook(lambda _, args, told=told, to=expected: to.append(told(args[0])))
            x = x.to("cuda", dtype)
            before = card.peak = card.used
            run(x)
            hook.remove()
            # what comes with the largest activations is small, but for what torch 2.1 widens of halves on a CPU
            most = 1.1 if TORCH >= (2, 2) or dtype == torch.float32 else gpu_room.SAFETY_FACTOR
            assert 0.95 < (card.peak - before) / ((expected[0] - gpu_room.WORKSPACE) / gpu_room.SAFETY_FACTOR) < most


def test_what_graphs_set_aside_is_not_free(monkeypatch):
    with pretended_card(monkeypatch, 1000) as card:
        held = torch.empty(100, dtype=torch.uint8, device="cuda")
        card.graph_bytes = 300
        # memory that the allocator keeps for the next tensor
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: card.used + 50)
        pool = graph_pool.pool_of(held.device)
        pool._reserved = 300
        assert gpu_room.free_bytes() == 650


def test_room_is_made_by_one_after_the_other_until_there_is_enough(monkeypatch):
    free, called = [10], []
    monkeypatch.setattr(gpu_room, "free_bytes", lambda: free[0])

    def giver(size):
        def give():
            called.append(size)
            free[0] += size

        return give

    assert gpu_room.make_room(10, [giver(5)]) and not called
    assert gpu_room.make_room(16, [giver(5), giver(3), giver(7)]) and called == [5, 3]
    assert not gpu_room.make_room(100, [giver(1)]) and called == [5, 3, 1]


def test_places_in_a_device_map():
    cuda = torch.device("cuda", 0)
    assert place_of("cpu") is place_of("disk") is place_of(None) is place_of(torch.float16) is None
    assert place_of(torch.device("cpu")) is None
    assert [place_of(place) for place in (0, "cuda", "cuda:0", torch.device("cuda"))] == [cuda] * 4
    assert place_of(1) == torch.device("cuda", 1)


@pytest.mark.parametrize("there", [False, True])
def test_weights_stay_if_decoding_finds_room_beside_them(there, monkeypatch):
    net = nn.Linear(1000, 1000)
    held = 4 * 1001000
    # an SD 1.5 VAE takes more than 5 GiB at 1024x1024 without tiling
    room = held + (6 << 30)
    with pretended_card(monkeypatch, room) as card:
        if there:
            net.to("cuda")
        assert gpu_room.has_room_to_stay(net)
        card.capacity -= 1
        assert not gpu_room.has_room_to_stay(net)


class Holder:
    """What a graph pool has of a model."""

    def __init__(self, resident: bool) -> None:
        self._resident = resident

    def resident(self) -> list[int]:
        return [1] * self._resident

    def vacate(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("total", "needed", "resident", "left", "held"),
    [
        (8, 3 << 30, True, int(0.28 * (8 << 30)), [15 << 28]),
        (6, 1 << 30, True, int(0.28 * (6 << 30)), [5 << 28, 1 << 30]),
        (8, 3 << 30, False, 0, [15 << 28]),
        (8, 1 << 20, True, 0, []), (12, 3 << 30, True, 0, []), (24, 6 << 30, True, 0, []),
    ],
)  # fmt: skip
def test_a_vae_on_a_small_card_leaves_memory_to_others_and_takes_one_block(
    monkeypatch: pytest.MonkeyPatch, total: int, needed: int, resident: bool, left: int, held: list[int]
) -> None:
    gpu = torch.device("cuda", 0)
    taken: list[int] = []

    def empty(size: int, *, dtype: Any, device: Any) -> None:
        taken.append(size)
        if size < 3 << 30:
            raise torch.cuda.OutOfMemoryError("no block of that size: a smaller one is tried, then none")

    holder = Holder(resident)
    monkeypatch.setattr(gpu_room.host_gpu, "device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total << 30))
    monkeypatch.setattr(gpu_room.graph_pool, "pool_of", lambda _: SimpleNamespace(spare={holder}))
    monkeypatch.setattr(torch, "empty", empty)
    assert int(gpu_room.left_to_others(needed)) == left
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (32 << 30, total << 30))
    gpu_room.hold_one_block(needed)
    assert taken == held
    # what has no room is not asked for
    taken.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (held[0] - 1 if held else 0, total << 30))
    gpu_room.hold_one_block(needed)
    assert not held or held[0] not in taken and taken == [needed]
