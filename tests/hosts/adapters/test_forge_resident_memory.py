"""What a UNet that Forge Neo loads with 8 bits takes of system memory: no more than one UNet and its LoRA while the
extension is on, and afterwards what Forge takes alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from pairs import one_of
from torch import fx

from hosts.adapters.resident_forge import SIZE, SMALL, Running, of, room
from hosts.adapters.test_forge_resident import on  # noqa: F401
from sfast_ext.accelerator import Accelerator
from sfast_ext.plans.plan import Plan
from sfast_ext.weights.banks import Bank
from sfast_ext.weights.weight import Weight

pytestmark = [pytest.mark.usefixtures("proportions"), pytest.mark.long("test_after_it_was_turned_off")]
OURS = (Accelerator, Bank, Plan, Weight, fx.Graph)
KINDS = frozenset({torch.bfloat16, torch.int8})
"""Those of the UNet and of its weights in 8 bits. What the tests themselves keep is in float32."""


_others: dict[int, torch.Tensor] = {}
"""Tensors that other tests have left, by address. They are held: no other tensor gets their addresses."""


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    keep_apart()
    yield
    _others.clear()


def keep_apart() -> None:
    """What there is now belongs to other tests. The garbage collector does not look at its million objects again."""
    _others.update(tensors())
    gc.freeze()


def tensors() -> dict[int, torch.Tensor]:
    """Such tensors in system memory by address, whoever refers to them."""
    gc.collect()
    every = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    found = [each for each in every if each.device.type == "cpu" and each.dtype in KINDS]
    return {each.untyped_storage().data_ptr(): each for each in found}


def held(on: Running) -> int:  # noqa: F811
    """The bytes of all that are there since the test began."""
    of.cache_clear()
    found = tensors()
    return sum(each.untyped_storage().nbytes() for place, each in found.items() if place not in _others)


def ours() -> dict[str, int]:
    """How many objects of ours there are."""
    gc.collect()
    return {kind.__name__: sum(type(each) is kind for each in gc.get_objects()) for kind in OURS}


def images(on: Running, *sizes: int) -> None:  # noqa: F811
    for size in sizes or (8, 8):
        assert on.image(2, size) < 0.2


@room(1.6)
def test_while_it_is_on(on: Running) -> None:  # noqa: F811
    images(on)
    away = held(on)
    assert 0.5 * SIZE < away < SIZE and on.away
    on.lora(a=1.0)
    images(on)
    with_lora = held(on)
    assert with_lora <= away + SIZE
    # another UNet has the plans, of the one before nothing stays
    on.load(2)
    images(on)
    assert on.away and held(on) <= with_lora + SMALL
    on.lora(b=0.5)
    images(on, 12, 8)
    assert on.away and held(on) <= with_lora + SMALL
    on.lora()
    images(on)
    assert on.away and held(on) <= away + SMALL
    # values in 8 bits stay there once they had to leave the GPU
    banks = on.accelerator.arena.banks.bytes
    on.host.memory.unload_all_models()
    images(on)
    assert on.away and held(on) <= away + banks + SMALL
    report = on.session.report
    on.kind.stop()
    assert report.counter("errors") == 0


SETTINGS = "sfast_eight_bits", "sfast_enabled"
# by each setting, and on each card
TURNED_OFF = [case for i, size in enumerate((1.6, 1.25)) for case in one_of(i, *((size, name) for name in SETTINGS))]


@pytest.mark.parametrize(("on", "name"), TURNED_OFF, indirect=["on"])
def test_after_it_was_turned_off(on: Running, name: str) -> None:  # noqa: F811
    options = on.host.opts.data

    def at_rest() -> tuple[int, dict[str, int]]:
        options["sfast_enabled"] = False
        on.lora()
        on.load(1)
        images(on, 8)
        options["sfast_enabled"] = True
        return held(on), ours()

    start, there = at_rest()
    images(on)
    on.lora(a=-1.0)
    images(on)
    options[name] = False
    images(on, 8)
    options[name] = True
    on.load(2)
    images(on, 8, 12)
    on.host.memory.unload_all_models()
    images(on)
    on.lora(a=0.5, b=1.0)
    images(on, 8)
    end, left = at_rest()
    assert end <= start + SMALL and left == there
    assert on.counter("errors") == 0
