"""SD.Next's balanced offload with 8 bits on a small card: in the first image too, half-precision weights of layers stay
in system memory. On a pretended GPU."""

# ruff: noqa: F811
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import big_modeling
from pairs import one_of
from quantised_layer import Layer

from hosts.adapters import test_sdnext_resident as resident
from hosts.adapters.test_sdnext_resident import SIZE, Running, on  # noqa: F401
from hosts.adapters.test_sdnext_whole_short import OOM, SHORT, short
from hosts.adapters.test_sdnext_whole_unet import OWN, in_parts, marked, parted
from sfast_ext import accelerator_of, reasons, torch_state
from sfast_ext.capture.capture import CaptureRefused
from sfast_ext.hosts.sdnext import offload
from sfast_ext.runtime import lean_calls, plan_builder
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.tools.lib import models
from sfast_ext.weights import expected

WHOLE, PARTED = 1.0, 0.4
"""High watermarks: with one SD.Next itself maps all of the UNet to the GPU, with the other parts of it."""
TIGHT, WIDE = 0.9, 1.9
"""UNets in half precision for which a card has room."""
MOST = 0.9
"""UNets that the GPU holds at most, when layers are measured."""
PLACES = (WHOLE, WIDE, "july"), (PARTED, TIGHT, "august"), (PARTED, WIDE, "july"), (WHOLE, WIDE, "august")


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "LEAST", 4 << 10)


@pytest.fixture
def early(on: Running, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A card under a watermark, with a model that made no image yet. What a test makes fail counts as an error."""
    marked(on, request.param)
    yield on
    assert on.counter("errors") == 0 or "where" in request.fixturenames, on.host.status()["last_error"]


def places(*chosen: tuple[float, float, str], number: int | None = None) -> Any:
    """For `early`."""
    taken = chosen or PLACES
    taken = taken if number is None else tuple(one_of(number, *taken))
    return pytest.mark.parametrize(("early", "on"), [(m, (r, s)) for m, r, s in taken], indirect=True)


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each call whose plan is made so: how many parameters are in system memory."""
    found: list[int] = []
    real = lean_calls.run

    def counted(context: ModuleContext, *given: Any) -> Any:
        found.append(resident.away(context.module))
        return real(context, *given)

    monkeypatch.setattr(lean_calls, "run", counted)
    return found


def peak(card: Running, error: float = 0.06, **job: Any) -> float:
    """Make an image; what the GPU held at most, in UNets."""
    card.card.peak = 0
    assert card.image(**job) < error
    return float(card.card.peak / SIZE)


def none_came(card: Running) -> None:
    assert card.counter("weights_brought_back") == 0 and card.card.refused == 0, card.host.reasons()
    assert not in_parts(card.unet) and card.away > 20


@pytest.mark.long(but=[0, 1])
@places()
def test_the_first_images(early: Running, lean: list[int]) -> None:
    for _ in range(3):
        assert peak(early) < MOST
    assert len(lean) == 1 and lean[0] > 50 and early.counter("captures") == 1
    none_came(early)


@places(number=2)
def test_without_8_bits_it_comes_as_it_does_alone(early: Running, lean: list[int]) -> None:
    early.host.opts.sfast_eight_bits = False
    for _ in range(2):
        assert early.image() < 0.02 and early.away == 0
    assert not lean and not accelerator_of(early.unet).arena.resident
    early.host.opts.sfast_eight_bits = True
    assert peak(early) < MOST and len(lean) == 1


@places((PARTED, TIGHT, "july"))
def test_switched_on_after_images_in_parts(early: Running, lean: list[int]) -> None:
    early.host.opts.sfast_eight_bits = False
    early.image()
    assert in_parts(early.unet) and accelerator_of(early.unet).arena.resident.in_parts
    early.host.opts.sfast_eight_bits = True
    # it has room in 8 bits alone
    assert early.image() < 0.06 and len(lean) == 1
    none_came(early)


@places((WHOLE, 2.1, "july"))
def test_a_card_that_is_not_small_for_it(early: Running, lean: list[int]) -> None:
    assert early.image() < 0.06 and early.away == 0 and not lean
    assert not accelerator_of(early.unet).arena.resident


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("multipliers", [(1.0, 1.0, 0.0), (0.0, 1.0, -1.0)])
@places(number=1)
def test_loras(early: Running, lean: list[int], multipliers: tuple[float, ...]) -> None:
    for multiplier in multipliers:
        for _ in range(2):
            assert peak(early, 0.1, multiplier=multiplier) < MOST
    assert len(lean) == 1 and early.counter("captures") == 1
    none_came(early)


@places(number=0)
def test_another_checkpoint_before_the_first_call(early: Running, lean: list[int]) -> None:
    early.load(1)
    early.load(0)
    assert peak(early) < MOST
    early.load(1)
    assert early.image() < 0.06 and early.image() < 0.06
    assert len(lean) == early.counter("captures")


@places((WHOLE, WIDE, "july"), (PARTED, 1.6, "july"))
def test_a_refiner(early: Running, lean: list[int]) -> None:
    data = early.host.modeldata.model_data
    info = SimpleNamespace(name="refiner")
    data.sd_refiner = refiner = SimpleNamespace(unet=models.copied(resident._unet(1)), sd_checkpoint_info=info)
    early.host.session.follow()
    wanted = early.host.stock(refine=True)
    for _ in range(2):
        found = early.host.image(refine=True)
        assert (found - wanted).norm() / wanted.norm() < 0.1
    assert len(lean) == 2 and resident.away(refiner.unet) > 20 and early.counter("weights_brought_back") == 0
    data.sd_refiner = None


@places(number=3)
def test_an_image_that_is_bypassed_finds_all_weights(early: Running, lean: list[int]) -> None:
    early.host.opts.sparse_attention_enabled = True
    for _ in range(2):
        # SD.Next does it alone: nothing stays, and nothing comes back
        assert early.image() < 2e-3 and early.away == 0
    assert early.counter("weights_brought_back") == 0 and not lean
    assert not accelerator_of(early.unet).arena.resident
    early.host.opts.sparse_attention_enabled = False
    assert early.image() < 0.06 and len(lean) == 1


OBSTACLE = reasons.NO_ROOM()


@pytest.mark.parametrize("then", ["on", "off"])
@places(number=2)
def test_a_call_that_is_bypassed_after_all(
    early: Running, monkeypatch: pytest.MonkeyPatch, lean: list[int], then: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch_state, "obstacle", lambda: OBSTACLE)
        assert early.image() < 2e-3 and early.away == 0 and not lean
    assert early.counter("weights_brought_back") == 0
    early.host.opts.sfast_eight_bits = then == "on"
    assert early.image() < (0.06 if then == "on" else 0.02)
    assert len(lean) == (then == "on")


@pytest.mark.parametrize("then", ["on", "off"])
@places((WHOLE, WIDE, "july"), (PARTED, TIGHT, "july"))
def test_a_call_of_which_the_host_says_late_that_it_is_bypassed(early: Running, lean: list[int], then: str) -> None:
    context = accelerator_of(early.unet)._context
    hooks = context.hooks
    context.hooks = replace(hooks, bypass_reason=lambda: None if in_parts(early.unet) else OBSTACLE)
    # nothing was made yet that knows the hooks
    assert early.image() < 2e-3 and early.away == 0 and not lean
    context.hooks = hooks
    early.host.opts.sfast_eight_bits = then == "on"
    if early.card.capacity < SIZE:
        parted(early, SHORT if then == "on" else OWN)
    else:
        assert early.counter("weights_brought_back") == 1
        assert early.image() < (0.06 if then == "on" else 0.02) and len(lean) == (then == "on")


@pytest.mark.parametrize("what", ["eight_bits", "enabled"])
@places((WHOLE, WIDE, "july"), (PARTED, TIGHT, "july"))
def test_switched_off_between_the_dispatch_and_the_call(
    early: Running, monkeypatch: pytest.MonkeyPatch, lean: list[int], what: str
) -> None:
    real, away = offload.Offload._dispatch_to, []

    def then_off(self: Any, places: Any, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, places, original, model, *args, **kwargs)
        if model is early.unet and not away:
            away.append(early.away)
            found = accelerator_of(model)
            found.configure(replace(found.config, **{what: False}))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(offload.Offload, "_dispatch_to", then_off)
        assert early.image() < 0.02 and away[0] > 50 and not lean
    assert early.image() < 0.06


def refuses(why: str) -> CaptureRefused:
    return CaptureRefused(reasons.NOT_RECORDED(reasons.Detail(why), ""))


FAILURES = {
    "the recording": (plan_builder, "capture", lambda *_, **__: _raised(refuses("a test"))),
    "the recording, by an error": (plan_builder, "capture", lambda *_, **__: _raised(ValueError("a test"))),
    "no memory for the recording": (plan_builder, "capture", lambda *_, **__: _raised(OOM("CUDA out of memory"))),
    "by layer": (ModuleContext, "run_by_layer", lambda *_, **__: _raised(ValueError("a test"))),
    "no memory by layer": (ModuleContext, "run_by_layer", lambda *_, **__: _raised(OOM("CUDA out of memory"))),
    "settling": (plan_builder.residency, "settle", lambda *_, **__: _raised(OOM("CUDA out of memory"))),
}


def _raised(exc: Exception) -> Any:
    raise exc


@contextlib.contextmanager
def failing(where: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAILURES[where])
        yield


@pytest.mark.long(but=[0, 9, 10])
@pytest.mark.parametrize("where", FAILURES)
@places((WHOLE, WIDE, "july"), (PARTED, TIGHT, "july"))
def test_a_plan_that_is_not_made(on: Running, early: Running, lean: list[int], where: str) -> None:
    with failing(where):
        assert early.image() < 0.06 and lean
        first = in_parts(early.unet)
        assert early.image() < 0.06
    room = early.card.capacity / SIZE
    if first:
        # there was no room for what the original forward reads
        assert room < 1
        parted(early, SHORT)
    assert early.image() < 0.06 and early.image() < 0.06
    early.load(1)
    assert early.image() < 0.06 and early.image() < 0.06 and not in_parts(early.unet) and early.away > 20


@places((WHOLE, WIDE, "july"), (PARTED, TIGHT, "july"))
def test_memory_runs_out_in_the_first_call(
    early: Running, monkeypatch: pytest.MonkeyPatch, lean: list[int]
) -> None:
    with monkeypatch.context() as patch:
        real = ModuleContext.run_by_layer
        held: list[torch.Tensor] = []

        def fuller(*args: Any, **kwargs: Any) -> Any:
            free = early.card.capacity - early.card.used
            held.append(torch.empty(free - (8 << 10), dtype=torch.uint8, device=resident.GPU))
            try:
                return real(*args, **kwargs)
            finally:
                held.clear()

        patch.setattr(ModuleContext, "run_by_layer", fuller)
        assert early.image() < 0.06 and lean and early.card.refused
    assert in_parts(early.unet) == (early.card.capacity < SIZE)


@places((PARTED, TIGHT, "july"), (PARTED, WIDE, "august"))
def test_memory_runs_out_in_every_forward_of_all_of_it(early: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        ran = short(early, patch)
        parted(early, SHORT)
        assert len(ran) <= 2
    parted(early, SHORT)


@places((PARTED, TIGHT, "july"), (PARTED, WIDE, "august"))
def test_memory_runs_out_as_it_comes(early: Running, monkeypatch: pytest.MonkeyPatch, lean: list[int]) -> None:
    real, times = big_modeling.attach_align_device_hook_on_blocks, []

    def once(model: Any, *args: Any, **kwargs: Any) -> Any:
        real(model, *args, **kwargs)
        if model is early.unet and not times:
            times.append(1)
            raise OOM("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(big_modeling, "attach_align_device_hook_on_blocks", once)
        parted(early, SHORT)
    parted(early, SHORT)
    assert times and not lean and not early.host.session._offload._release_always


@places((WHOLE, WIDE, "july"), (PARTED, WIDE, "july"))
def test_tied_weights(early: Running, lean: list[int]) -> None:
    block = early.unet.mid_block.attentions[0].transformer_blocks[0]
    block.attn1.to_q.weight = block.attn1.to_k.weight
    wanted = early.host.stock()
    for _ in range(3):
        found = early.host.image()
        assert (found - wanted).norm() / wanted.norm() < 0.06
        assert in_parts(early.unet) == (early.host.opts.diffusers_offload_max_gpu_memory == PARTED)
    assert block.attn1.to_q.weight is block.attn1.to_k.weight and not lean


@places((WHOLE, WIDE, "july"), (PARTED, WIDE, "july"))
def test_layers_of_sdnq(early: Running) -> None:
    attention = early.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    sdnq = type("SDNQLinear", (Layer,), {"__module__": "sdnq.layers"})
    torch.manual_seed(3)
    n, k = attention.to_q.weight.shape
    attention.to_q = sdnq(k, n, bias=False, dtype=resident.HALF)
    early.unet.quantization_method = "sdnq"
    wanted = early.host.stock()
    for _ in range(3):
        found = early.host.image()
        assert (found - wanted).norm() / wanted.norm() < 0.06


def none(module: Any) -> None:
    module.to(resident.GPU)


def model(module: Any) -> None:
    accelerate.cpu_offload_with_hook(module, resident.GPU)


def sequential(module: Any) -> None:
    accelerate.cpu_offload(module, resident.GPU)


@pytest.mark.parametrize("way", [none, model, sequential])
@places((WHOLE, WIDE, "july"))
def test_other_modes_of_offload(early: Running, lean: list[int], way: Any) -> None:
    early.host.opts.diffusers_offload_mode = way.__name__
    early.host.sd_offload.forget_hook()
    early.load(0)
    pipe = early.host.modeldata.model_data.sd_model
    for module in (pipe.unet, pipe.text_encoder):
        way(module)
    for _ in range(2):
        assert early.image() < (2e-3 if way is sequential else 0.06)
    # as there is no dispatch, all of it was there in the first image
    assert not lean and early.counter("captures") == (way is not sequential)


@pytest.mark.parametrize("on", [(0.95, "july")], indirect=True)
def test_memory_that_the_extension_lacks_is_not_lacked_by_the_host(on: Running) -> None:
    marked(on, WHOLE)
    images: list[dict[str, Any]] = [{}, {}, {"side": 16}, {"side": 16}, {}, {"multiplier": 1.0}]
    for image in (*images, {"multiplier": 1.0, "side": 16}, {}, {}):
        assert on.image(**image) < 0.05
    # a launch is recorded, the original is compared with a plan, and weights come back: all of them in another way
    assert on.card.refused == on.counter("out_of_memory") > 2
    assert on.counter("memory_given_back") == 0 and on.counter("errors") == 0
