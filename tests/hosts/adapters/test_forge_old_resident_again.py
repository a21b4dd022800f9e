"""Forge loads a UNet anew after a load in parts that failed, and as it does alone after 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hosts.standins import forge_old_memory
from sfast_ext.hosts.forge import adapter as forge

from .resident_forge import SIZE, Running, card_with, room
from .test_forge_old_resident import REFUSED, another_forward, short

pytestmark = pytest.mark.usefixtures("proportions")


on = card_with(forge_old_memory, forge.OldSession)


def in_8_bits(on: Running) -> None:
    assert on.image() < 0.06 and on.image() < 0.06 and on.away


def once(on: Running, patch: pytest.MonkeyPatch, error: type[BaseException]) -> list[int]:
    """The next load in parts fails."""
    share, seen = on.host.memory.compute_model_gpu_memory_when_using_cpu_swap, list[int]()

    def failing(*given: Any, **named: Any) -> Any:
        seen.append(1)
        if len(seen) == 1:
            raise error("no")
        return share(*given, **named)

    patch.setattr(on.host.memory, "compute_model_gpu_memory_when_using_cpu_swap", failing)
    return seen


def given_way(on: Running, patch: pytest.MonkeyPatch) -> None:
    on.session.drop_plans()
    short(on, patch, 0)
    on.image()


def off(on: Running, patch: pytest.MonkeyPatch) -> None:
    on.host.opts.data["sfast_eight_bits"] = False
    on.image()


def ended(on: Running, patch: pytest.MonkeyPatch) -> None:
    on.kind.stop()


@pytest.mark.long(but=[0, 5])
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("what", [given_way, off, ended])
@room(1.6)
def test_after_a_load_in_parts_that_failed_the_next_image_is_made(
    on: Running, what: Any, error: type[BaseException]
) -> None:
    in_8_bits(on)
    with pytest.MonkeyPatch.context() as patch:
        seen = once(on, patch, error)
        try:
            what(on, patch)
        except BaseException as exc:
            # of an image that is lost, as it would be if Forge's own load failed
            assert type(exc) is error or "device" in str(exc)
    assert seen
    on.host.errors.clear()
    for _ in range(2):
        assert on.image() < 0.06
    if what is ended:
        forge.start("test")


# a session that finds another forward releases the UNet before it is loaded
@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("done", [each for each in REFUSED if each is not another_forward])
@room(1.6)
def test_what_is_refused_after_8_bits_comes_as_forge_loads_it_alone(on: Running, done: Any) -> None:
    in_8_bits(on)
    patcher = on.host.model_data.sd_model.original.clone()
    done(on, patcher)
    on.host._load(patcher)
    was = on.off
    on.host.memory.unload_all_models()
    on.host._load(patcher)
    assert was == pytest.approx(on.off, abs=0.02 * SIZE)


@pytest.mark.long
@room(1.6)
def test_models_may_be_given_by_an_iterator(on: Running) -> None:
    assert on.image() < 0.06
    on.host.memory.unload_all_models()
    on.host.memory.load_models_gpu(iter([on.host.model_data.sd_model.original]))
    assert on.host.current
