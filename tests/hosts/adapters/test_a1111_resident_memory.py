"""What AUTOMATIC1111 with 8 bits on a small card takes of system memory at rest: what it takes alone, with copies of
weights that its LoRAs leave on each layer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_resident_memory as counted
from hosts.adapters.test_a1111_resident import LOWVRAM, MEDVRAM, NONE, SIZE, Running, net, on  # noqa: F401
from sfast_ext.hosts.a1111 import adapter as a1111

pytestmark = pytest.mark.usefixtures("proportions")
FLAGS = [(MEDVRAM, 1.9), (LOWVRAM, 1.9), (NONE, 2.1)]
SMALL = SIZE // 50
Scene = tuple[str, Any]


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    counted.keep_apart()
    yield
    counted._others.clear()


def held() -> int:
    """The bytes of tensors in system memory since the test began, once garbage was collected a single time: the WebUI
    does not collect it, and Python seldom does."""
    return sum(x.untyped_storage().nbytes() for place, x in counted.tensors().items() if place not in counted._others)


def scenes(seed: int) -> list[Scene]:
    """A random order of what a user does; at the end another checkpoint, with a LoRA."""
    draw, found = random.Random(seed), list[Scene]()
    for _ in range(3):
        kind = draw.choice(["lora", "lora", "plain", "bypassed", "sfast_eight_bits", "sfast_enabled", "load"])
        found.append((kind, draw.randint(1, 2) if kind == "load" else draw.choice([-0.6, 0.3, 0.6])))
    return [*found, ("lora", 0.6), ("load", 2), ("sfast_eight_bits", None), ("lora", -0.6)]


def play(on: Running, scene: Scene) -> None:  # noqa: F811
    kind, value = scene
    options, networks = on.host.opts.data, ()
    if kind in ("sfast_eight_bits", "sfast_enabled"):
        options[kind] = not options.get(kind, True)
    elif kind == "load":
        load(on, value)
    elif kind == "lora":
        networks = (net("a", value), net("b", 1.0))[: 1 + (value > 0)]
    # as token merging is told
    on.model.applied_token_merged_ratio = 0.5 * (kind == "bypassed")
    on.image(2, networks)


def load(on: Running, seed: int) -> None:  # noqa: F811
    on.host.networks.loaded_networks = []
    on.load(seed)


def at_rest(on: Running) -> int:  # noqa: F811
    """What is held with the extension off, after an image of the first checkpoint."""
    options = on.host.opts.data
    options["sfast_enabled"] = False
    load(on, 1)
    on.image(2)
    found = held()
    options.update(sfast_enabled=True, sfast_eight_bits=True)
    return found


def rests(on: Running, seed: int) -> list[int]:  # noqa: F811
    """What is held at rest, before some scenes and after them."""
    found = [at_rest(on)]
    for scene in scenes(seed):
        play(on, scene)
    return [*found, at_rest(on)]


# seeds of which the scenes are of all kinds
@pytest.mark.long(but=[0])
@pytest.mark.parametrize(("on", "seed"), [(flag, seed) for seed, flag in enumerate(FLAGS, 3)], indirect=["on"])
def test_at_rest_it_is_what_the_webui_takes_alone(on: Running, seed: int) -> None:  # noqa: F811
    # first as the WebUI does it alone
    a1111.A1111Session.stop()
    alone = rests(on, seed)
    a1111.start("test")
    ours = rests(on, seed)
    assert max(alone) - min(alone) <= SMALL
    assert all(abs(a - b) <= SMALL for a, b in zip(ours, alone)), (ours, alone)
    assert on.counter("captures") > 0 and on.counter("errors") == 0


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("on", FLAGS, indirect=True)
def test_a_checkpoint_that_was_exchanged_leaves_nothing(on: Running) -> None:  # noqa: F811
    load(on, 2)
    on.image(3, (net("a", 0.6),))
    with_lora = held()
    on.image(3)
    load(on, 1)
    assert on.counter("captures") > 0
    # neither the copies on the layers of the model before nor those of the twin
    assert held() < with_lora - 1.5 * SIZE
