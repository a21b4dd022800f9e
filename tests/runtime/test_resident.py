"""Weights of which the GPU has the 8-bit integers alone."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import eight_bit_kernels
import pytest
import torch
from pretended_card import GPU, Card, pretended_card
from torch import nn

from sfast_ext import Config
from sfast_ext.kernels.backend import health
from sfast_ext.passes import eight_bits as passes_eight_bits
from sfast_ext.plans.graph_pool import MB, pool_of
from sfast_ext.runtime import plan_builder, verify
from sfast_ext.weights import resident as weights_resident
from sfast_ext.weights import tables

from . import eight_bits
from .eight_bits import LAYERS, Net, On, changed, net

CARD = Config(triton=False, eight_bits=True, resident=True, tolerance=0.1)
OFF = replace(CARD, eight_bits=False)
WEIGHTS = ("to_q", "to_k", "to_v", "to_out", "ff_in", "ff_out")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    eight_bit_kernels.available(monkeypatch)
    with torch.no_grad():
        yield
    health.clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setattr(verify, "milliseconds", lambda run, device, times=1: float(run() is None) + 1)
    monkeypatch.setattr(plan_builder, "unsupported", lambda device, dtypes: None)
    eight_bit_kernels.pay_everywhere(monkeypatch)
    with pretended_card(monkeypatch, 64 * MB) as found:
        yield found
        assert not found.faults


def halves(model: Net) -> list[nn.Parameter]:
    """The weights of the layers in 8 bits."""
    return [getattr(block, name).weight for block in model.blocks for name in WEIGHTS]


def away(on: On) -> int:
    """How many of these are in system memory."""
    return sum(p.device.type == "cpu" for p in halves(on.ours))


def started(config: Config = CARD, calls: int = 3) -> On:
    on = On(config, "cuda")
    for _ in range(calls):
        on.call()
    return on


def test_the_half_precision_weights_are_in_system_memory(card: Card) -> None:
    on = started()
    assert on.status()["layers"] == LAYERS and on.plan.resident and on.plan.has_graph
    assert away(on) == len(halves(on.ours)) and on.error() < 0.05
    size = sum(p.nbytes for p in on.twin.parameters())
    on.acc.release()
    gc.collect()
    assert away(on) == 0 and card.allocated == pytest.approx(size, abs=4096)
    assert on.count("errors") == 0, on.words()


def uncounted(m: Net) -> None:
    m.blocks[0].ff_out.weight.data.mul_(-1.5)


def by_numpy(m: Net) -> None:
    weight = m.blocks[1].to_out.weight
    if weight.device.type == "cpu":
        weight.detach().view(torch.int16).numpy()[:] ^= -32768
    else:
        weight.neg_()


def elsewhere(m: Net) -> None:
    weight = m.blocks[0].to_k.weight
    m.blocks[0].to_k.weight = nn.Parameter((-weight.detach()).cpu(), requires_grad=False)


def on_the_gpu(m: Net) -> None:
    device = m.first.weight.device
    m.blocks[1].to_v.weight.data = (m.blocks[1].to_v.weight.detach() * -2).to(device)


def checkpoint(m: Net) -> None:
    torch.manual_seed(int(m.first.weight.float().sum().abs() * 1000) % 97)
    m.load_state_dict({k: torch.randn_like(v.cpu()) * 0.2 for k, v in m.state_dict().items()})


CHANGES: dict[str, Callable[[Net], Any]] = {
    **{how: changed(how, -1.6) for how in ("in place", "data", "rows", "object")},
    "uncounted": uncounted,
    "numpy": by_numpy,
    "a tensor in system memory": elsewhere,
    "a tensor on the gpu": on_the_gpu,
    "a checkpoint": checkpoint,
    "what stays in half precision": lambda m: m.blocks[0].norm1.weight.mul_(-1.2),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changes_are_followed_at_the_next_call(card: Card, how: str) -> None:
    on = started(calls=11)
    for _ in range(2):
        on.both(CHANGES[how])
        assert on.error() < 0.06, how
        assert on.error() < 0.06
    assert on.count("captures") == 1 and on.plan.resident
    assert away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()


def test_without_a_change_nothing_is_quantised_again(card: Card) -> None:
    on = started(calls=13)
    before, again = on.acc.status()["weights"]["copied"], on.count("misspeculated")
    for _ in range(40):
        on.call()
    assert on.acc.status()["weights"]["copied"] == before and on.count("misspeculated") == again


def test_what_a_digest_found_is_due_until_it_is_quantised(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    on = started(calls=11)
    resident = on.acc.arena.resident
    monkeypatch.setattr(weights_resident, "AUDITED_BYTES", 0)
    on.both(uncounted)
    assert not resident.due()
    resident.audit_all = True
    found = resident.due()
    # a call that could not fill it does not lose it
    assert found and resident.due() == found
    assert on.error() < 0.06 and not resident.due()


def test_the_original_gets_its_weights_back(card: Card) -> None:
    on = started()
    runs = on.count("weights_brought_back")
    with torch.enable_grad():
        result = on.ours(torch.randn(2, 8, 8).to("cuda", torch.bfloat16))
    assert result.device == GPU and away(on) == 0
    assert on.count("weights_brought_back") == runs + 1 and "back on the GPU" in on.words()
    assert on.error() < 0.05 and away(on) == len(halves(on.ours))
    # a layer that is patched bypasses the call
    on.ours.blocks[0].ff_out.register_forward_hook(lambda module, given, result: result)
    assert on.error() < 0.01 and away(on) == 0


def test_off_gives_them_back_at_once_and_the_exact_bits(card: Card) -> None:
    on = started()
    for _ in range(2):
        on.acc.configure(OFF)
        assert away(on) == 0 and on.status()["bytes"] == 0
        on.call()
        assert on.error() < 0.01 and on.count("errors") == 0
        assert not on.plan.banks
        on.acc.configure(CARD)
        assert on.error() < 0.05
        assert away(on) == len(halves(on.ours)) and on.plan.resident
        assert [plan.resident for plan in on.acc.plans.values()] == [True]
    assert on.count("errors") == 0, on.words()


def in_memory() -> list[torch.Tensor]:
    """Large tensors in half precision in system memory, whoever refers to them."""
    gc.collect()
    every = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    return [x for x in every if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.numel() >= 4096]


def test_system_memory_is_that_of_the_start_after_the_model_is_gone(card: Card) -> None:
    # those that other tests have left; no other tensor gets their addresses
    others = in_memory()
    on = started(calls=11)
    assert not on.acc.arena.resident._copies.bytes
    on.acc.release()
    resident = on.acc.arena.resident
    assert not resident and not resident._copies.bytes and not resident.banks
    storages = {p.untyped_storage()._cdata for p in on.ours.parameters()}
    held = {x.untyped_storage()._cdata for x in in_memory()}
    mine = {x.untyped_storage()._cdata for x in (*on.twin.parameters(), *others)}
    assert held <= mine | storages


def test_a_second_size(card: Card) -> None:
    on = started()
    on.call(512)
    assert on.error(512) < 0.05 and on.error() < 0.05 and len(on.acc.plans) == 2
    assert away(on) == len(halves(on.ours))
    # layers of few rows are in 8 bits as well
    on.call(32)
    assert on.error(32) < 0.05 and on.status()["layers"] == LAYERS and on.count("errors") == 0
    assert away(on) == len(halves(on.ours)) and len(on.acc.arena.banks) == LAYERS


def test_memory_that_others_need(card: Card) -> None:
    on = started()
    pool_of(GPU).make_room(on.acc.report)
    assert on.status()["bytes"] == 0
    on.both(changed("in place", -1.5))
    for _ in range(3):
        assert on.error() < 0.05
    assert on.status()["bytes"] and on.count("captures") == 1


def test_a_card_that_has_no_room_for_both(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_resident, "BATCH_BYTES", 1 << 14)
    eight_bit_kernels.without_memory(monkeypatch, card)
    size = sum(p.nbytes for p in net().parameters())
    on = On(replace(CARD, cuda_graphs=False), "cuda")
    for _ in range(3):
        on.call(32)
    card.capacity = size + 130_000
    # the half-precision weights take as much again: banks give way
    hook = on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    assert on.error(32) < 0.01 and away(on) == 0 and on.status()["bytes"] == 0
    hook.remove()
    for _ in range(3):
        assert on.error(32) < 0.05
    assert away(on) == len(halves(on.ours)) and on.count("errors") == 0, on.words()


def test_a_forward_that_is_put_over_the_module_finds_its_weights(card: Card) -> None:
    on = started()
    ours, plain = on.ours.forward, type(on.ours).forward
    on.ours.forward = lambda x: plain(on.ours, x)
    assert away(on) and on.error() < 1e-6 and away(on) == 0
    on.ours.forward = ours
    again = on.count("misspeculated")
    for _ in range(8):
        assert on.error() < 0.05
    assert away(on) and on.count("misspeculated") <= again + 1


def test_copies_have_their_weights_on_one_device(card: Card) -> None:
    on = started()
    for made in (copy.deepcopy(on.ours), copy.copy(on.ours)):
        x = torch.randn(2, 128, 8).to(torch.bfloat16)
        assert verify.relative_error([made(x.to("cuda")).cpu()], [on.twin(x)]) < 1e-6
        assert {p.device.type for p in made.parameters()} == {"cuda"}
        on.call()
        assert away(on)
    assert {value.device.type for value in on.ours.state_dict().values()} == {"cuda"}
    assert on.error() < 0.05


def broken(*_: object) -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize("where", ["staging", "copies", "live"])
def test_what_fails_as_weights_come_back_does_not_reach_the_host(
    card: Card, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    on = started()
    place = {"staging": (weights_resident.Staging, "copy"), "copies": (type(on.acc.arena.resident._copies), "keep"),
             "live": (type(on.acc.arena._tracked), "refresh_live")}[where]  # fmt: skip
    hook = on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    with monkeypatch.context() as patch:
        patch.setattr(*place, broken)
        assert on.error() < 0.01 and away(on) == 0
    assert "no" in str(on.acc.report.as_dict()["last_error"])
    hook.remove()
    for _ in range(3):
        assert on.error() < 0.05
    assert away(on) == len(halves(on.ours))


class Tied(Net):
    """One weight is read by a layer that is fit for 8 bits, and by code that is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + self.blocks[0].to_out.weight.sum(0) + self.blocks[1].to_q.weight[0])


def test_a_weight_that_is_read_elsewhere_as_well_stays(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.eight_bits.Net", Tied)
    on = started()
    assert away(on) == len(halves(on.ours)) - 2
    assert on.ours.blocks[0].to_out.weight.is_cuda and on.ours.blocks[1].to_q.weight.is_cuda
    for change in (lambda m: m.blocks[0].to_out.weight.mul_(-3), lambda m: m.blocks[1].to_q.weight.data.mul_(-3)):
        on.both(change)
        assert on.error() < 0.05
    assert on.count("errors") == 0 and on.plan.resident


class OfImages(Net):
    """A convolution, whose weight plans lay channels last, in front of the layers in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.conv(x.mT.contiguous().unflatten(2, (8, -1))).flatten(2).mT)


def test_the_original_has_its_strides_next_to_weights_in_system_memory(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = OfImages().to(torch.bfloat16).eval()
    monkeypatch.setattr(eight_bits, "net", lambda: model)
    on = started()
    assert on.plan.resident and away(on) == len(halves(on.ours))
    seen: list[tuple[int, ...]] = []
    for each in (on.ours, on.twin):
        each.conv.register_forward_hook(lambda module, given, result: seen.append(result.stride()))
    # the hook bypasses the call
    assert on.error() < 0.01 and len(seen) == 2 and seen[0] == seen[1]


@pytest.mark.parametrize("short", [False, True])
def test_layers_are_measured_before_their_weights_leave(
    card: Card, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    """If the GPU has no memory for that, they leave before."""
    places: list[bool] = []
    on = On(CARD, "cuda")
    real = passes_eight_bits.measured

    def measured(*args: Any, **kwargs: Any) -> Any:
        places.append(away(on) == 0)
        if short and len(places) == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(passes_eight_bits, "measured", measured)
    for _ in range(3):
        assert on.error() < 0.05
    assert places == [True, False][: 1 + short]
    assert on.status()["layers"] == LAYERS and on.plan.resident and away(on) == len(halves(on.ours))
    assert on.count("errors") == 0 and on.status()["reason"] is None


def test_a_layer_whose_error_is_too_large_never_leaves(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    real = weights_resident.Resident._leave
    monkeypatch.setattr(weights_resident.Resident, "_leave", lambda self, values: (
        left.extend(map(id, values := list(values))), real(self, values)))  # fmt: skip
    eight_bit_kernels.too_inaccurate(monkeypatch, ["ff_out"])
    on = started()
    assert len(on.status()["kept"]) == 2 and on.plan.resident and away(on) == len(halves(on.ours)) - 2
    assert not any(id(block.ff_out.weight) in left for block in on.ours.blocks)


def test_a_table_on_another_device_is_none_of_them(card: Card) -> None:
    on, source = started(), tables.table_of(torch.ones(4))
    assert source is not None
    table = tables.copied_table(source, GPU)
    # as a plan of Lumina 2 has it, which reads its table from system memory in each run
    assert table is not None and table.is_bare and not on.acc.arena.resident.has(table)
    assert on.acc.arena.read(table) is table.tensor
