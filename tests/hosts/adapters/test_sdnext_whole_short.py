"""SD.Next's balanced offload with 8 bits on a small card: memory that runs out with all of a UNet on the GPU. No image
is lost, and the UNet comes by SD.Next's own map from then on. On a pretended GPU."""

# ruff: noqa: F811
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hosts.adapters.test_sdnext_resident import Running, on  # noqa: F401
from hosts.adapters.test_sdnext_whole_unet import OWN, SHORT, card, cards, in_parts, of_whole, parted, whole  # noqa: F401
from sfast_ext import accelerator_of
from sfast_ext.hosts.sdnext import whole_unet
from sfast_ext.report import current
from sfast_ext.runtime import lean_calls
from sfast_ext.runtime.model_state import ModuleContext

OOM = torch.cuda.OutOfMemoryError


def short(card: Running, monkeypatch: pytest.MonkeyPatch, only: Callable[[Any], bool] = lambda x: True) -> list[int]:
    """From now on all of the UNet leaves too little memory for its original forward."""
    ran: list[int] = []

    def runs_out(honest: Callable[..., Any]) -> Callable[..., Any]:
        def run(context: ModuleContext, forward: Any, *args: Any, **kwargs: Any) -> Any:
            if context.module is card.unet and not in_parts(context.module) and only(args[0]):
                ran.append(1)
                raise OOM("CUDA out of memory")
            return honest(context, forward, *args, **kwargs)

        return run

    # one of them for a call whose plan leaves weights in system memory
    for name in ("run_forward", "run_by_layer"):
        monkeypatch.setattr(ModuleContext, name, runs_out(getattr(ModuleContext, name)))
    return ran


def refused(card: Running, **job: Any) -> None:
    """Images by SD.Next's own map, from now on."""
    for _ in range(2):
        parted(card, SHORT, **job)
        assert not accelerator_of(card.unet).plans
    assert "there was no room for all of the UNet" in str(card.host.session.report.as_dict()["events"])


@cards(1)
def test_the_first_forward_runs_out_of_memory(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        ran = short(card, patch)
        parted(card, SHORT)
        # by layer, and with all of them
        assert len(ran) == 2 and "keeps state" not in card.host.reasons()
    refused(card, side=24)
    assert card.counter("out_of_memory") == 1
    # another model, and the same loaded again
    card.load(0)
    whole(card)


@cards(0)
def test_a_later_size_runs_out_of_memory(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(card)
    with monkeypatch.context() as patch:
        ran = short(card, patch, only=lambda latent: latent.shape[-1] > 16)
        parted(card, SHORT, side=24)
        assert ran
    refused(card)
    card.host.opts.sfast_eight_bits = False
    parted(card, OWN)
    card.load(1)
    card.host.opts.sfast_eight_bits = True
    whole(card)


@cards(1)
def test_a_comparison_runs_out_of_memory(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    card.host.opts.sfast_check = "always"
    with monkeypatch.context() as patch:
        card.image(2)
        patch.setattr(ModuleContext, "run_streamed", lambda *_, **__: 1 / 0)
        short(card, patch)
        assert card.image() < 0.1
        assert in_parts(card.unet)
    refused(card)


@pytest.mark.long
@cards(0)
def test_with_a_lora_it_runs_out_of_memory(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(card, multiplier=1.0)
    with monkeypatch.context() as patch:
        short(card, patch)
        parted(card, SHORT, multiplier=1.0, side=24)
    for multiplier in (-1.0, 0.0, 1.0):
        parted(card, SHORT, multiplier=multiplier)


@cards(1)
def test_memory_runs_out_between_two_steps(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(card)
    with monkeypatch.context() as patch:

        def fewer(pipe: Any, step: int) -> None:
            if step == 1:
                short(card, patch)
                accelerator_of(pipe.unet).forget_plans(None)

        assert card.image(each_step=fewer) < 0.1
        assert in_parts(card.unet)
    refused(card)


@cards(0)
def test_nothing_gives_way_in_a_rehearsal(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    card.image()
    monkeypatch.setattr(current, "rehearsal", True)
    assert not of_whole(card).gave_way(card.unet) and not in_parts(card.unet)
    monkeypatch.setattr(current, "rehearsal", False)
    assert of_whole(card).gave_way(card.unet) and in_parts(card.unet)
    assert not of_whole(card).gave_way(card.unet)
    assert not of_whole(card).gave_way(None) and not of_whole(card).gave_way(card.encoder)


@cards(1, (0.97, "july"), (0.97, "august"))
def test_memory_runs_out_as_it_comes(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(whole_unet.WholeUnet, "_fits", lambda *_: True)
        # all weights come
        patch.setattr(lean_calls, "_is_possible", lambda context: False)
        parted(card, SHORT)
        parted(card, SHORT)
    # SD.Next's own, for which nothing is kept on the GPU from then on, were none
    assert not card.host.session._offload._release_always
