"""What a small card does before a VAE's largest values are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended_card import pretended_card
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.hosts import gpu_room, vae_memory
from sfast_ext.report import Report

diffusers = pytest.importorskip("diffusers")


def of_diffusers(widths: tuple[int, ...] = (8, 16, 32)) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()


def of_ldm() -> Any:
    vaes = pytest.importorskip("hosts.standins.a1111_vae")
    return vaes.make_vae(2).eval()


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often the allocator's cache was given back."""
    found: list[int] = []
    monkeypatch.setattr(gpu_room, "is_tight", lambda: True)
    monkeypatch.setattr(vae_memory, "_LARGE", 1)
    with torch.no_grad(), pretended_card(monkeypatch, 1 << 30):
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(1))
        yield found


def decoded(vae: Any) -> torch.Tensor:
    latent = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1)).to("cuda")
    return vae.decoder(latent)


@pytest.mark.parametrize(("made", "times"), [(of_diffusers, 3), (of_ldm, 3)])
def test_the_cache_is_given_back_before_the_largest_values(freed: list[int], made: Any, times: int) -> None:
    vae = made().to("cuda")
    expected = decoded(vae)
    held: list[float] = []
    watched = vae_memory.VaeMemory(lambda needed, in_one: held.append(needed))
    watched.watch([vae])
    steps = vae_memory.largest_steps(vae.decoder)
    # the upsampling to the full size, and the blocks there
    assert len(steps) == times and not freed
    assert torch.equal(decoded(vae), expected) and len(freed) == times and len(held) == 1
    watched.release()
    decoded(vae)
    assert len(freed) == times and not any(m._forward_pre_hooks for m in vae.modules())


def test_small_values_and_others_leave_it(freed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_memory, "_LARGE", 64 << 20)
    vae = of_diffusers().to("cuda")
    watched = vae_memory.VaeMemory(lambda needed, in_one: None)
    watched.watch([vae])
    decoded(vae)
    vae_memory.FreeCached()(vae, ())
    vae_memory.FreeCached()(vae, (torch.empty(65 << 20, dtype=torch.uint8, device="meta"),))
    assert not freed
    watched.release()
    for other in (nn.Linear(1, 1), of_diffusers((8,)).decoder):
        assert vae_memory.largest_steps(other) == []


def test_a_large_card_and_another_decoder_get_no_hook_within(freed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    monkeypatch.setattr(gpu_room, "hold_one_block", held.append)
    vae = of_diffusers().to("cuda")
    vae.decoder.up_blocks[-1].resnets = nn.ModuleList()
    vae.decoder.up_blocks[-2].upsamplers = None
    other = of_diffusers().to("cuda")
    for tight, each in ((True, vae), (False, other)):
        monkeypatch.setattr(gpu_room, "is_tight", lambda tight=tight: tight)
        watched = vae_memory.VaeMemory(lambda needed, in_one: None)
        watched.watch([each])
        assert sum(len(m._forward_pre_hooks) for m in each.modules()) == 2
        watched.release()


def test_a_cache_that_cannot_be_given_back_now_stays(freed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    vae_memory.FreeCached()(nn.Identity(), (torch.randn(4).to("cuda"),))


@pytest.mark.parametrize(
    ("free", "part", "asked"),
    [(99, 1.0, [1]), (100, 1.0, []), (60, 0.5, [40, 20, 10, 5, math.inf]), (60, 0.0, [40, 40, 40, 40, math.inf])],
)
def test_banks_of_what_is_missing_are_freed_until_pieces_between_them_are_whole(
    monkeypatch: pytest.MonkeyPatch, free: int, part: float, asked: list[float]
) -> None:
    given: list[float] = []

    def make_room(report: Report, why: str, banks: float = math.inf) -> None:
        nonlocal free
        given.append(banks)
        # the rest is in memory that others share
        free += int(part * min(banks, 100))

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_room.host_gpu, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10_000))
    monkeypatch.setattr(gpu_room.graph_pool, "make_room", make_room)
    gpu_room.free_pieces(100, Report(), "a VAE")
    assert given == asked


def test_a_plan_needs_what_its_values_take(freed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    monkeypatch.setattr(gpu_room, "hold_one_block", held.append)
    monkeypatch.setattr(vae_memory, "largest_steps", lambda decoder: [])
    vae, asked = of_diffusers().to("cuda"), list[float]()
    config = Config(cuda_graphs=False, rare_calls=True, rare_gain=math.inf, drop_slower=False)
    accelerator = accelerate(vae.decoder, config)
    watched = vae_memory.VaeMemory(lambda needed, in_one: asked.append(needed))
    watched.watch([vae])
    for _ in range(3):
        decoded(vae)
    (plan,) = accelerator.plans.values()
    estimated = gpu_room.decoder_bytes((8, 16, 32), torch.zeros(1, 4, 4, 4))
    planned = plan.peak_bytes + gpu_room.PLANS_WORKSPACE
    assert plan.replays == 1 and 0 < planned < estimated
    assert asked == [estimated, estimated, planned] and held == [estimated, estimated]
    # the original runs as well, or alone
    plan.compare_again = True
    decoded(vae)
    vae.decoder(torch.randn(2, 4, 4, 4).to("cuda"))
    accelerator.configure(replace(config, enabled=False))
    decoded(vae)
    assert planned not in asked[3:] and len(asked) == 6
    accelerator.release()


def test_an_image_does_not_end_because_a_plans_need_is_not_known(
    freed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise RuntimeError("arguments that cannot be read")

    vae, asked = of_diffusers().to("cuda"), list[float]()
    accelerator = accelerate(vae.decoder, Config(cuda_graphs=False, rare_calls=True))
    monkeypatch.setattr(accelerator, "planned_bytes", fail)
    watched = vae_memory.VaeMemory(lambda needed, in_one: asked.append(needed))
    watched.watch([vae])
    decoded(vae)
    assert asked == [gpu_room.decoder_bytes((8, 16, 32), torch.zeros(1, 4, 4, 4))]
    accelerator.release()


@pytest.mark.parametrize("others", [0.0, 7.0])
def test_next_to_weights_in_8_bits_room_is_made_in_one(
    freed: list[int], monkeypatch: pytest.MonkeyPatch, others: float
) -> None:
    monkeypatch.setattr(gpu_room, "left_to_others", lambda needed: others)
    asked: list[tuple[float, bool]] = []
    vae = of_diffusers().to("cuda")
    watched = vae_memory.VaeMemory(lambda needed, in_one: asked.append((needed, in_one)))
    watched.watch([vae])
    decoded(vae)
    needed = gpu_room.decoder_bytes((8, 16, 32), torch.zeros(1, 4, 4, 4))
    assert asked == [(needed + others, others > 0)]
