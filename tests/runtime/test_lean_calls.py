"""A plan of another size is made while half-precision weights stay in system memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pretended_card import Card
from torch import nn
from torch.nn import functional as F

from sfast_ext.capture import capture as capturing
from sfast_ext.preparation import Interrupted
from sfast_ext.runtime import lean_calls, plan_builder
from sfast_ext.runtime.eight_bits import EightBitsFailed
from sfast_ext.weights import stand_ins, streamed_by_layer
from sfast_ext.weights.resident import Resident

from . import test_resident_bytes as unets
from .eight_bits import LAYERS, Net, On, changed
from .test_resident import WEIGHTS, away, card, halves, kernels, started  # noqa: F401

OTHER = 32
"""Rows of the other size: with few, weights take most memory."""


@pytest.fixture
def on(card: Card) -> On:  # noqa: F811
    found = started()
    assert away(found) == len(halves(found.ours))
    return found


def lean(on: On, plans: int = 2) -> None:
    """All plans were made without bringing weights back."""
    assert on.count("weights_brought_back") == 0 and on.count("errors") == 0, on.words()
    assert len(on.acc.plans) == plans and all(plan.resident for plan in on.acc.plans.values()), on.words()
    assert away(on) == len(halves(on.ours)) and not on.acc._context.model.lean_failed


def fell_back(on: On) -> None:
    """The other size was made with all weights on the GPU, and the report tells why."""
    assert on.count("weights_brought_back") > 0 and on.count("errors") == 0, on.words()
    assert on.words().count("half-precision weights come back for the first step of each size") == 1
    assert len(on.acc.plans) == 2 and all(plan.resident for plan in on.acc.plans.values())
    assert away(on) == len(halves(on.ours)) and on.error(OTHER) < 0.05 and on.error() < 0.05
    # and so is each other from now on
    before = on.count("weights_brought_back")
    assert on.error(64) < 1e-6 and on.count("weights_brought_back") > before
    assert on.words().count("half-precision weights come back for the first step of each size") == 1


def peak(call: Callable[[], Any], card: Card) -> int:  # noqa: F811
    """What a call takes at a time, next to what there was before."""
    before = card.peak = card.used
    call()
    return card.peak - before


def test_another_size_brings_no_weights_back(card: Card, on: On) -> None:  # noqa: F811
    all_of_them = sum(p.nbytes for p in halves(on.ours))
    taken = peak(lambda: on.call(OTHER), card)
    lean(on)
    assert taken < 0.6 * all_of_them
    assert on.error(OTHER) < 0.05 and on.error() < 0.05
    # with all of them
    other = started()
    other.acc._context.model.lean_failed = True
    assert peak(lambda: other.call(OTHER), card) > all_of_them
    assert other.count("weights_brought_back") == 1


def test_results_are_those_with_all_weights_on_the_gpu(card: Card, on: On) -> None:  # noqa: F811
    other = started()
    other.acc._context.model.lean_failed = True
    for rows in (OTHER, OTHER, 256, OTHER, 512, 512):
        assert torch.equal(on.call(rows)[0], other.call(rows)[0]), rows
    lean(on, 3)


def test_in_inference_mode(card: Card) -> None:  # noqa: F811
    with torch.inference_mode():
        on = started()
        for rows in (OTHER, OTHER, 256):
            assert on.error(rows) < 0.05
    lean(on)


def test_parameters_are_what_they_were(card: Card, on: On) -> None:  # noqa: F811
    resident = on.acc.arena.resident

    def seen() -> list[Any]:
        parts = [(id(p), p.data_ptr(), p._version, p.stride(), p.untyped_storage()._cdata) for p in halves(on.ours)]
        return [*parts, *((aside.seen, id(aside.digest)) for aside in resident._asides)]

    before, copied = seen(), on.acc.status()["weights"]["copied"]
    on.call(OTHER)
    lean(on)
    assert seen() == before and not resident.due()
    assert on.error(OTHER) < 0.05 and seen() == before
    # no bank was made anew
    assert on.acc.status()["weights"]["copied"] == copied and len(on.acc.arena.banks) == LAYERS


@pytest.mark.parametrize("how", ["in place", "data", "rows", "object"])
def test_what_the_host_changed_before_is_followed(card: Card, on: On, how: str) -> None:  # noqa: F811
    on.both(changed(how, -1.6))
    assert on.error(OTHER) < 1e-6 and on.error(OTHER) < 0.06 and on.error() < 0.06
    lean(on)
    on.both(changed(how, -1.6))
    assert on.error() < 0.06 and on.error(OTHER) < 0.06
    lean(on)


def test_what_the_forward_itself_writes_is_followed(card: Card) -> None:  # noqa: F811
    """As AUTOMATIC1111 applies a LoRA: in the call of a layer, if it is not applied yet."""
    on = On(unets.CARD, "cuda")
    for each in (on.ours, on.twin):
        each.blocks[1].ff_out.__class__ = Applies
    for _ in range(3):
        on.call()
    lean(on, 1)
    for each in (on.ours, on.twin):
        each.blocks[1].ff_out.weight[0, 0] = 50.0
    assert on.error(OTHER) < 1e-6 and on.count("weights_brought_back") == 0
    assert torch.equal(on.ours.blocks[1].ff_out.weight.cpu(), on.twin.blocks[1].ff_out.weight)
    for _ in range(3):
        assert on.error(OTHER) < 0.06 and on.error() < 0.06
    assert on.count("errors") == 0, on.words()


class Applies(nn.Linear):
    """Writes to its weight if that is not as it wants it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self.weight) is nn.Parameter and not hasattr(x, "fake_mode") and float(self.weight[0, 0]) == 50.0:
            self.weight.mul_(-0.5)
        return super().forward(x)


class Asks(nn.Linear):
    """Moves its input to where it believes its weight to be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.device == x.device
        return F.linear(x.to(self.weight.device), self.weight, self.bias)


def test_layers_find_their_weights_on_the_gpu(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    on = On(unets.CARD, "cuda")
    for each in (on.ours, on.twin):
        each.blocks[0].ff_out.__class__ = Asks
    for _ in range(3):
        on.call()
    before, real, seen = streamed_by_layer.StreamedByLayer._before, plan_builder.capture, list[str]()

    def called(self: Any, layer: nn.Module, given: Any) -> None:
        before(self, layer, given)
        seen.extend("called" for p in layer._parameters.values() if p is not None and card.holds(p) and p.dim() == 2)

    def recorded(*given: Any) -> Any:
        # to it those of the card look like the CPU's
        assert all(map(card.holds, on.ours.parameters()))
        seen.append("recorded")
        return real(*given)

    monkeypatch.setattr(streamed_by_layer.StreamedByLayer, "_before", called)
    monkeypatch.setattr(plan_builder, "capture", recorded)
    assert on.error(OTHER) < 1e-6
    lean(on)
    # the first and the last are there in any case
    assert seen == ["called"] * (len(halves(on.ours)) + 2) + ["recorded"]
    assert on.error(OTHER) < 0.05


def test_convolutions_and_the_prompts_keys(card: Card) -> None:  # noqa: F811
    on = unets.On()
    weights = dict(on.ours.named_parameters())
    strides = {n: p.stride() for n, p in weights.items()}
    for _ in range(3):
        on.error()
    all_of_them = sum(weights[f"{name}.weight"].nbytes for name in unets.IN_8_BITS)
    assert peak(lambda: on.error(8), card) < all_of_them
    for size in (16, 8, 12, 16):
        assert on.error(size) < 0.07
    assert sorted(on.away()) == sorted(unets.IN_8_BITS)
    assert len(on.acc.plans) == 3 and all(plan.resident for plan in on.acc.plans.values())
    report = on.acc.report
    assert report.counter("weights_brought_back") == 0 and report.counter("errors") == 0
    assert all(weights[f"{name}.weight"].stride() == strides[f"{name}.weight"] for name in unets.IN_8_BITS)
    on.acc.release()
    assert {n: p.stride() for n, p in on.ours.named_parameters()} == strides and not on.away()


class Elsewhere(Net):
    """With few rows, it reads a weight where its layer is not called: that one stays in half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + F.linear(y, self.blocks[1].to_out.weight[:8, :8]) if x.shape[1] == OTHER // 2 else y


def test_a_weight_that_is_read_in_half_precision_comes(card: Card) -> None:  # noqa: F811
    models = []
    for lean_failed in (False, True):
        on = On(unets.CARD, "cuda")
        on.acc._context.model.lean_failed = lean_failed
        models.append(on)
        for each in (on.ours, on.twin):
            each.__class__ = Elsewhere
        for _ in range(3):
            on.call()
    on, other = models
    weight = on.ours.blocks[1].to_out.weight
    for rows in (OTHER, OTHER, OTHER, 256, OTHER, 256):
        assert torch.equal(on.call(rows)[0], other.call(rows)[0])
    # the plan before had its integers, and is made again without them
    assert (on.count("weights_brought_back"), other.count("weights_brought_back")) == (0, 2)
    assert len(on.acc.plans) == 2 and on.count("captures") == 3 and not on.acc.report.as_dict()["reasons_since_start"]
    # no plan has its integers
    on.acc.forget_plans("the user has dropped them")
    on.acc._context.bring_back()
    for rows in (OTHER, OTHER):
        on.call(rows)
    assert weight.is_cuda and away(on) == len(halves(on.ours)) - 1
    # a second plan has it in half precision, too
    before = on.count("weights_brought_back")
    assert on.error(64) < 1e-6 and on.error(64) < 0.05 and weight.is_cuda and away(on) == len(halves(on.ours)) - 1
    assert on.count("weights_brought_back") == before and on.count("errors") == 0, on.words()


class Reads(Net):
    """With few rows, it reads a value of a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = float(self.blocks[1].to_out.weight[0, 0]) if x.shape[1] == OTHER // 2 else 1.0
        return super().forward(x) * factor


def test_values_of_weights_are_read_by_no_plan(card: Card) -> None:  # noqa: F811
    on = On(unets.CARD, "cuda")
    for each in (on.ours, on.twin):
        each.__class__ = Reads
    for rows in (256, 256, OTHER, OTHER, 256, OTHER):
        assert on.error(rows) < (0.05 if rows == 256 else 1e-6)
    assert len(on.acc.plans) == 1 and on.count("errors") == 0


@pytest.mark.parametrize("kept", ["ff_out", "to_q+to_k+to_v"])
def test_layers_that_were_not_near_enough_come_in_half_precision(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch, kept: str  # noqa: F811
) -> None:
    real, plans, strides = plan_builder.verify_plan, list[Any](), [p.stride() for p in halves(on.ours)]

    def once(new: Any) -> Any:
        plans.append(new.plan)
        refusal = real(new)
        if len(plans) > 1:
            return refusal
        selection = next(iter(on.acc._context.model.eight_bits._selections.values()))
        selection.kept.add(f"blocks.0.{kept}")
        raise EightBitsFailed(plan_builder.reasons.EIGHT_BITS_NO_GAIN(), again=True)

    monkeypatch.setattr(plan_builder, "verify_plan", once)
    assert on.error(OTHER) < 1e-6 and len(plans) == 2
    assert on.count("weights_brought_back") == 0 and on.count("errors") == 0, on.words()
    # a bank of the first plan is made of it as well
    on.acc.drop_plan(next(iter(on.acc.plans)))
    for _ in range(3):
        assert on.error(OTHER) < 0.05
    weights = [getattr(on.ours.blocks[0], name).weight for name in kept.split("+")]
    assert all(p.is_cuda for p in weights) and away(on) == len(halves(on.ours)) - len(weights)
    on.both(lambda m: getattr(m.blocks[0], kept.split("+")[-1]).weight.mul_(-1.5))
    assert on.error(OTHER) < 0.05 and on.error(OTHER) < 0.05 and len(on.acc.plans) == 1
    on.acc.release()
    assert [p.stride() for p in halves(on.ours)] == strides and away(on) == 0
    storages = {p.untyped_storage()._cdata: p for p in halves(on.ours)}
    assert len(storages) == len(strides)
    assert all(map(torch.equal, (p.cpu() for p in halves(on.ours)), halves(on.twin)))


def fails(*_: object, **__: object) -> Any:
    raise RuntimeError("no")


@contextlib.contextmanager
def once(patch: pytest.MonkeyPatch, home: Any, name: str, error: Exception | None = None) -> Iterator[list[int]]:
    """Within, a function raises the first time."""
    real, calls = getattr(home, name), list[int]()

    def first(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise error or RuntimeError("no")
        return real(*args, **kwargs)

    with patch.context() as inner:
        inner.setattr(home, name, first)
        yield calls


PLACES = {
    "streaming": (streamed_by_layer.StreamedByLayer, "_before"),
    "standing in": (stand_ins, "set_data"),
    "leaving": (stand_ins, "apart"),
    "the recording": (plan_builder, "capture"),
    "passes": (plan_builder, "make_plan"),
    "values": (Resident, "values"),
    "binding": (plan_builder.residency, "settle"),
    "the check": (plan_builder, "verify_plan"),
}


@pytest.fixture(params=PLACES)
def place(on: On, request: pytest.FixtureRequest) -> str:
    """What fails once, which the next call of another size passes."""
    if request.param == "values":
        # layers are measured anew
        next(iter(on.acc._context.model.eight_bits._selections.values())).errors.clear()
    return str(request.param)


def test_without_success_weights_come_back(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch, place: str  # noqa: F811
) -> None:
    before = [(p.data_ptr(), p._version) for p in halves(on.ours)]
    with once(monkeypatch, *PLACES[place]) as calls:
        assert on.error(OTHER) < 1e-6 and calls
    assert len(before) == len(halves(on.ours))
    fell_back(on)


def test_a_forward_that_fails_as_it_is_recorded(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    with once(monkeypatch, capturing, "record") as calls:
        assert on.error(OTHER) < 1e-6 and calls
    fell_back(on)


def test_a_model_that_fails_itself_is_no_reason(card: Card, on: On) -> None:  # noqa: F811
    with pytest.raises(RuntimeError, match="shape"):
        on.ours(torch.zeros(2, 16, 7, dtype=torch.bfloat16).to("cuda"))
    on.ours.blocks[0].to_q.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="no"):
        on.call(OTHER)
    on.ours.blocks[0].to_q._forward_hooks.clear()
    assert not on.acc._context.model.lean_failed and on.error(OTHER) < 0.05 and on.error(OTHER) < 0.05


def test_an_interrupted_preparation_is_no_reason(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    with once(monkeypatch, plan_builder, "make_plan", Interrupted("by the user")):
        assert on.error(OTHER) < 1e-6
    assert len(on.acc.plans) == 1 and not on.acc._context.model.lean_failed
    assert on.error(OTHER) < 1e-6
    lean(on)


def test_without_memory_the_image_is_made(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch, place: str  # noqa: F811
) -> None:
    error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    with once(monkeypatch, *PLACES[place], error) as calls:
        assert on.error(OTHER) < 1e-6 and calls
    for _ in range(3):
        assert on.error(OTHER) < 0.05 and on.error() < 0.05
    assert not on.acc._context.model.lean_failed and on.count("errors") == 0, on.words()
    assert away(on) == len(halves(on.ours)) and on.plan.resident
    # there is room
    on.call(64)
    assert not on.acc._context.model.streams and on.error(64) < 0.05


def test_without_room_for_the_integers_it_is_as_if_all_came(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(lean_calls.residency, "room", lambda device: 0)
    on.acc.forget_plans("the user has dropped them")
    assert on.error(OTHER) < 1e-6 and on.count("weights_brought_back") == 1
    assert on.error(OTHER) < 0.05 and on.count("errors") == 0, on.words()


def test_arguments_are_as_they_were_if_it_runs_again(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr("runtime.eight_bits.Net", OfList)
    on = On(unets.CARD, "cuda")
    for rows in (256, 256, OTHER):
        real, calls = streamed_by_layer.StreamedByLayer._before, list[int]()

        def late(self: Any, *given: Any, real: Any = real, calls: list[int] = calls) -> Any:
            calls.append(1)
            return fails() if len(calls) == 9 else real(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(streamed_by_layer.StreamedByLayer, "_before", late)
            given = [torch.randn(2, rows // 2, 8).to(torch.bfloat16)]
            wanted = on.twin(list(given))
            found = on.ours(there := [given[0].to("cuda")])
        assert there == [] and (found.cpu() - wanted).norm() < 0.05 * wanted.norm()
    assert on.acc._context.model.lean_failed and on.count("errors") == 0


class Draws(Net):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(8, device=x.device)
        return super().forward(x) + noise


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_random_numbers_are_those_of_one_run_if_it_runs_again(card: Card, on: On, error: Exception) -> None:  # noqa: F811
    def raises(*_: object) -> None:
        failed.append(1)
        if len(failed) == 1:
            raise error

    failed, x = list[int](), torch.randn(2, 16, 8).to(torch.bfloat16)
    for each in (on.ours, on.twin):
        each.__class__ = Draws
    on.ours.last.register_forward_pre_hook(raises)
    torch.manual_seed(3)
    wanted, state = on.twin(x), torch.get_rng_state()
    torch.manual_seed(3)
    found = lean_calls.run(on.acc._context, None, (x.to("cuda"),), {}, on.acc.run_original)
    assert len(failed) == 2 and torch.equal(found.cpu(), wanted) and torch.equal(torch.get_rng_state(), state)


class OfList(Net):
    """Takes its input out of a list."""

    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.pop())


def test_original_forwards_of_other_threads_wait(card: Card, on: On) -> None:  # noqa: F811
    context, found = on.acc._context, list[torch.Tensor]()
    x = torch.randn(2, 16, 8).to(torch.bfloat16)

    def call() -> None:
        with card, torch.no_grad():
            found.append(on.acc.run_original(x.to("cuda")).cpu())

    thread = threading.Thread(target=call)
    with lean_calls.standing_in(context):
        assert away(on) == 0
        thread.start()
        thread.join(0.3)
        assert not found
    thread.join(10)
    assert torch.equal(found[0], on.twin(x))


def test_plans_of_other_threads_quantise_nothing_of_it(card: Card, on: On) -> None:  # noqa: F811
    context, resident = on.acc._context, on.acc.arena.resident
    found, copied = list[torch.Tensor](), on.acc.status()["weights"]["copied"]
    x = torch.randn(2, 128, 8).to(torch.bfloat16)

    def call() -> None:
        with card, torch.no_grad():
            found.append(on.ours(x.to("cuda")).cpu())

    thread = threading.Thread(target=call)
    on.acc.new_generation()
    with plan_builder.residency.building(context.model), lean_calls.standing_in(context):
        thread.start()
        thread.join(0.3)
        assert on.acc.status()["weights"]["copied"] == copied and not found
    thread.join(10)
    # it was bypassed
    assert torch.equal(found[0], on.twin(x))
    assert on.error() < 0.05 and on.error() < 0.05 and away(on) == len(halves(on.ours)) and resident.ready


@pytest.mark.parametrize("when", ["before the recording", "after the recording", "before the binding"])
def test_weights_that_another_thread_brings_back(
    card: Card, on: On, monkeypatch: pytest.MonkeyPatch, when: str  # noqa: F811
) -> None:
    found: list[torch.Tensor] = []
    x = torch.randn(2, 16, 8).to(torch.bfloat16)
    names = {"before the recording": "run", "after the recording": "make_plan", "before the binding": "make_plan"}
    home = lean_calls if when == "before the recording" else plan_builder
    real = getattr(home, names[when])

    def call() -> None:
        with card, torch.no_grad():
            found.append(on.acc.run_original(x.to("cuda")).cpu())

    def other() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(30)

    def around(*args: Any) -> Any:
        if when == "after the recording":
            other()
        result = real(*args)
        if when != "after the recording":
            other()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(home, names[when], around)
        assert on.error(OTHER) < 1e-6
    assert torch.equal(found[0], on.twin(x))
    for rows in (OTHER, OTHER, 256, 256, OTHER):
        assert on.error(rows) < 0.05
    assert away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()
    assert not on.acc._context.model.lean_failed and len(on.acc.plans) == 2


def test_stand_ins_share_memory_and_keep_their_form(card: Card, on: On) -> None:  # noqa: F811
    resident = on.acc.arena.resident
    strided = on.ours.blocks[0].ff_in.weight
    strided.data = strided.detach().T.contiguous().T
    before = {p: (p.stride(), p.dtype, p.shape, p.data_ptr()) for p in halves(on.ours)}
    used = card.used
    with pytest.raises(ValueError, match="in the middle"), resident.standing_in():
        assert all(card.holds(p) and (p.stride(), p.dtype, p.shape) == form[:3] for p, form in before.items())
        assert len({p.untyped_storage()._cdata for p in before}) == 1
        assert card.used - used == max(p.nbytes for p in before)
        assert not any(p.any() for p in before)
        raise ValueError("in the middle")
    assert {p: (p.stride(), p.dtype, p.shape, p.data_ptr()) for p in before} == before and card.used == used
    assert [getattr(on.ours.blocks[0], name).weight.device.type for name in WEIGHTS] == ["cpu"] * len(WEIGHTS)


def test_packs_of_weights_that_stood_in(card: Card, on: On) -> None:  # noqa: F811
    arena, block = on.acc.arena, on.ours.blocks[0]
    on.acc.forget_plans("the user has dropped them")
    values = [getattr(block, name).weight.detach().clone() for name in ("to_q", "to_k", "to_v")]
    with arena.resident.standing_in():
        arena.index()
        q, k, v, other, norm = (
            arena.locate(layer.weight) for layer in (block.to_q, block.to_k, block.to_v, block.ff_out, block.norm1)
        )
    used, whole = card.used, arena.pack([q, k, v])
    assert whole is not None and whole.tensor.shape == (192, 64) and whole.tensor.is_cuda and card.used == used
    rows = arena.pack([k, v])
    assert rows is not None and arena.pack([k, v]) is rows and arena.pack([q, k, v]) is whole
    # one has others' memory, one has another shape, and one is on the GPU
    assert arena.pack([whole, norm]) is None and arena.pack([q, other]) is None and arena.pack([q, norm]) is None
    assert torch.equal(arena.read(whole).cpu(), torch.cat(values)) and torch.equal(arena.read(other).cpu(),
                                                                                    block.ff_out.weight)
    arena.bind([whole, rows])
    arena.fetch()
    assert torch.equal(whole.tensor.cpu(), torch.cat(values)) and torch.equal(rows.tensor.cpu(), torch.cat(values[1:]))
    assert whole.tensor.untyped_storage()._cdata == rows.tensor.untyped_storage()._cdata
    assert block.to_k.weight.untyped_storage()._cdata == rows.tensor.untyped_storage()._cdata
    arena.unbind([whole, rows])
