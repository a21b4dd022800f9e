"""SD.Next's balanced offload on a card that has room for a UNet in half precision, and of which SD.Next uses less: with
8 bits the UNet comes as a whole. On a pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import one_of
from pretended_card import GPU

from hosts.adapters.test_sdnext_resident import SIZE, Running, on  # noqa: F401
from sfast_ext import Config, accelerator_of, reasons, torch_state
from sfast_ext.hosts import gpu_room, system_memory
from sfast_ext.hosts.sdnext import whole_unet
from sfast_ext.runtime import lean_calls

ROOM, MARK = 1.5, 0.6
"""UNets in half precision for which a card has room, and SD.Next's high watermark: less than one."""
FITS = (ROOM, "july"), (ROOM, "august")
OWN = "parts of the UNet do not fit on the GPU"
SHORT = "GPU memory ran out with all of the UNet"


def in_parts(unet: Any) -> bool:
    """Whether layers are brought for each call."""
    hooks = (getattr(module, "_hf_hook", None) for module in unet.modules())
    each = (hook for found in hooks for hook in getattr(found, "hooks", (found,)))
    return unet.device.type == "cuda" and any(getattr(hook, "offload", False) for hook in each)


@pytest.fixture
def card(on: Running) -> Iterator[Running]:  # noqa: F811
    marked(on)
    yield on
    assert on.counter("errors") == 0, on.host.status()["last_error"]


def marked(card: Running, mark: float = MARK) -> None:
    """The model is loaded anew, under this watermark."""
    card.host.shared.gpu_memory = card.card.capacity / 2**30
    card.host.opts.diffusers_offload_max_gpu_memory = mark
    card.load(0)


def cards(number: int | None = None, *rooms: Any) -> Any:
    rooms = rooms or FITS
    return pytest.mark.parametrize("on", rooms if number is None else one_of(number, *rooms), indirect=True)


def whole(card: Running, **job: Any) -> None:
    """Images in 8 bits, of a UNet that is whole."""
    found = []
    for _ in range(3):
        # in its eleventh step a plan is compared, and half-precision weights are back at its end
        assert card.image(**job) < 0.1
        assert not in_parts(card.unet), card.host.reasons()
        found.append(card.away)
    assert sorted(found)[1] > 20, (found, card.host.reasons())


def parted(card: Running, words: str, **job: Any) -> None:
    """An image by SD.Next's own map, with a reason."""
    runs = card.host.runs()
    assert card.image(**job) < 2e-3
    reasons = card.host.reasons()
    assert in_parts(card.unet) and card.host.runs() == runs and words in reasons, reasons


def stays(card: Running) -> None:
    """From now on nothing makes the UNet leave the GPU."""
    encoder = card.host.modeldata.model_data.sd_model.text_encoder
    card.host.modeldata.model_data.sd_model.text_encoder = lambda x: encoder(x)


def of_whole(card: Running) -> whole_unet.WholeUnet:
    return card.host.session._offload.whole


@pytest.mark.long(but=[1])
@cards()
def test_it_comes_as_a_whole(card: Running) -> None:
    assert card.image() < 0.06
    assert not in_parts(card.unet)
    whole(card)
    assert card.counter("captures") == 1 and card.counter("replays") > 5
    told = accelerator_of(card.unet).status()["eight_bits"]
    assert told["layers"] > 10 and told["reason"] is None
    # SD.Next's map is as it was
    assert {"cpu", "cuda:0"} == set(card.unet.balanced_offload_device_map.values())


@cards(0)
def test_without_8_bits_it_comes_in_parts(card: Running) -> None:
    card.host.opts.sfast_eight_bits = False
    parted(card, OWN)
    parted(card, OWN)


def without_room(card: Running, needed: str, free: str) -> None:
    for _ in range(2):
        parted(card, f"8 bits need {needed} GB of GPU memory, and {free} are free")
    assert card.counter("out_of_memory") == 0 and card.card.refused == 0


@cards(1, (0.66, "july"), (0.66, "august"))
def test_it_comes_in_parts_without_room_for_it_in_8_bits(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_unet, "_gb", lambda size: f"{size / SIZE:.2f}")
    without_room(card, "0.67", "0.66")


@cards(1, (1.05, "july"), (1.05, "august"))
def test_it_comes_in_parts_without_room_for_all_of_it(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_unet, "_gb", lambda size: f"{size / SIZE:.2f}")
    monkeypatch.setattr(lean_calls, "_is_possible", lambda context: False)
    without_room(card, "1.10", "1.05")


@cards(0, (1.05, "july"), (1.05, "august"))
def test_calls_that_are_bypassed_need_room_for_all_of_it(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch_state, "obstacle", lambda: reasons.JIT_TRACE())
        parted(card, "torch.jit.trace")
    assert card.image() < 0.06 and not in_parts(card.unet)
    # with weights in 8 bits, too
    with monkeypatch.context() as patch:
        patch.setattr(torch_state, "obstacle", lambda: reasons.JIT_TRACE())
        parted(card, "torch.jit.trace")
    assert card.image() < 0.06 and not in_parts(card.unet) and card.card.refused == 0


@cards(0)
def test_what_plans_of_others_hold_counts_as_free(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.empty(int(0.85 * SIZE), dtype=torch.uint8, device=GPU)]
    monkeypatch.setattr(gpu_room, "givers", lambda *_: [held.clear])
    assert card.image() < 0.06
    assert not held and not in_parts(card.unet)


@cards(1)
def test_what_other_programs_hold_does_not(card: Running) -> None:
    marked(card, 0.2)
    held = torch.empty(int(0.85 * SIZE), dtype=torch.uint8, device=GPU)
    parted(card, "8 bits need")
    del held
    whole(card)


@cards(0, (2.1, "july"), (2.1, "august"))
def test_a_card_that_is_not_small_for_it(card: Running) -> None:
    marked(card, 0.4)
    parted(card, OWN)


@cards(1)
def test_system_memory(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # what leaves it for the GPU makes room there
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.MARGIN - SIZE // 100)
    parted(card, "8 bits need 1.0 GB of system memory, and 1.0 are free")
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.MARGIN)
    assert card.image() < 0.06 and not in_parts(card.unet)


@cards(0)
def test_what_is_bypassed_however_it_comes(card: Running) -> None:
    card.host.opts.sparse_attention_enabled = True
    parted(card, "sparse attention")
    card.host.opts.sparse_attention_enabled = False
    parted(card, "HyperTile", hypertile_enabled=True)
    whole(card)


@cards(1, (2 * ROOM, "july"), (2 * ROOM, "august"))
def test_single_precision(card: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    card.unet.float()
    card.host.session.follow()
    assert of_whole(card).places(card.unet, {"a": "cuda:0", "b": "cpu"}) is None
    # there would be room
    monkeypatch.setattr(whole_unet, "_HALF", {torch.float32})
    assert of_whole(card).places(card.unet, {"a": "cuda:0", "b": "cpu"}) is not None


MAPS: dict[str, tuple[dict[str, Any], bool]] = {
    "a GPU and memory": ({"a": "cuda:0", "b": "cpu"}, True),
    "by number": ({"a": 0, "b": "cpu", "c": 0}, True),
    "all of it": ({"a": "cuda:0", "b": "cuda:0"}, False),
    "none of it": ({"a": "cpu"}, False),
    "on disk": ({"a": "cuda:0", "b": "cpu", "c": "disk"}, False),
    "on disk and none": ({"a": "disk", "b": "cpu"}, False),
    "two GPUs": ({"a": "cuda:0", "b": "cpu", "c": "cuda:1"}, False),
    "another device": ({"a": "mps", "b": "cpu"}, False),
    "a GPU again": ({"a": "cuda:0", "b": "cpu"}, True),
}


@cards(0)
def test_maps(card: Running) -> None:
    card.host.session.follow()
    for words, (places, taken) in MAPS.items():
        found = of_whole(card).places(card.unet, places)
        assert found == ({"": places["a"]} if taken else None), words
        several = len(set(places.values())) > 1
        assert accelerator_of(card.unet).arena.resident.in_parts == (several and not taken), words
    assert of_whole(card).places(card.encoder, MAPS["a GPU and memory"][0]) is None


@cards(1)
def test_weights_that_another_dispatch_has_left_elsewhere(card: Running) -> None:
    card.host.session.follow()
    weight = card.unet.mid_block.resnets[0].conv1.weight
    card.unet.mid_block.resnets[0].conv1.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
    assert of_whole(card).places(card.unet, {"a": "cuda:0", "b": "cpu"}) is None
    card.unet.mid_block.resnets[0].conv1.weight = weight
    assert of_whole(card).places(card.unet, {"a": "cuda:0", "b": "cpu"}) is not None


@cards(0)
def test_a_forward_of_another_extension(card: Running) -> None:
    card.host.session.follow()
    unet = card.unet
    ours = unet._old_forward
    unet._old_forward = lambda *args, **kwargs: ours(*args, **kwargs)
    assert of_whole(card).places(unet, {"a": "cuda:0", "b": "cpu"}) is None
    unet._old_forward = ours
    assert of_whole(card).places(unet, {"a": "cuda:0", "b": "cpu"}) is not None


def switch_off_and_on(card: Running, *, stays_there: bool) -> None:
    opts = card.host.opts
    for name in ("sfast_eight_bits", "sfast_enabled"):
        whole(card)
        assert card.unet.device.type == "cuda" or not stays_there
        setattr(opts, name, False)
        for _ in range(2):
            assert card.image() < 2e-3 and in_parts(card.unet)
        setattr(opts, name, True)
    whole(card)


@pytest.mark.long
@cards(1)
def test_off_and_on(card: Running) -> None:
    switch_off_and_on(card, stays_there=False)


@cards(0)
def test_off_and_on_while_it_is_on_the_gpu(card: Running) -> None:
    stays(card)
    switch_off_and_on(card, stays_there=True)


@cards(1)
def test_one_that_is_not_accelerated_leaves_once(card: Running) -> None:
    card.host.opts.sfast_enabled = False
    stays(card)
    assert card.image() < 2e-3 and in_parts(card.unet)
    own, take_off, taken = card.unet._old_forward, of_whole(card)._take_off, []
    # of another extension
    card.unet._old_forward = lambda *args, **kwargs: own(*args, **kwargs)
    of_whole(card)._take_off = lambda unet, **more: taken.append(1) or take_off(unet, **more)
    for _ in range(2):
        card.host.opts.sfast_enabled = True
        for _ in range(3):
            assert card.image() < 2e-3 and in_parts(card.unet)
        assert len(taken) == 1
        taken.clear()
        card.host.opts.sfast_enabled = False
        card.image()


@pytest.mark.long
@cards(1)
def test_a_feature_in_between(card: Running) -> None:
    whole(card)
    for _ in range(2):
        parted(card, "HyperTile", hypertile_enabled=True)
        whole(card)
    assert card.counter("captures") == 1


@cards(0)
def test_another_mode_is_left_alone(card: Running) -> None:
    whole(card)
    card.host.opts.sfast_eight_bits, card.host.opts.diffusers_offload_mode = False, "none"
    before = card.unet._hf_hook
    of_whole(card).follow(card.unet, Config(enabled=False))
    assert card.unet._hf_hook is before


@cards(1)
def test_the_session_ends(card: Running) -> None:
    stays(card)
    for _ in range(2):
        card.image()
    assert not in_parts(card.unet) and card.away
    session = card.host.adapter.SDNextSession
    session.stop()
    assert card.unet.device.type == "cpu" and accelerator_of(card.unet) is None
    assert card.image() < 2e-3 and in_parts(card.unet)
    card.host.adapter.start("0.0")
    whole(card)


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("multipliers", [(-1.0,), (1.0, -1.0, 0.0)])
@cards(0)
def test_loras(card: Running, multipliers: tuple[float, ...]) -> None:
    for multiplier in multipliers:
        whole(card, multiplier=multiplier)
        card.host.opts.sfast_eight_bits = False
        parted(card, OWN, multiplier=multiplier)
        parted(card, OWN, multiplier=0.5)
        card.host.opts.sfast_eight_bits = True
        whole(card, multiplier=0.5)


@pytest.mark.long
@cards(1)
def test_another_checkpoint(card: Running) -> None:
    whole(card)
    card.host.modeldata.model_data.sd_model.text_encoder(torch.zeros(2, 7, 64, dtype=torch.bfloat16, device=GPU))
    card.load(1)
    whole(card)
    # the plan is that of the one before
    assert card.counter("captures") == 1


@cards(0)
def test_it_leaves_and_comes_back_between_steps(card: Running) -> None:
    def leave(pipe: Any, step: int) -> None:
        if step < 3:
            pipe.text_encoder(torch.zeros(2, 7, 64, dtype=torch.bfloat16, device=GPU))

    whole(card, each_step=leave, steps=4)


@cards(0)
def test_without_the_function_that_takes_it_off(card: Running) -> None:
    of_whole(card)._take_off = None
    parted(card, OWN)
