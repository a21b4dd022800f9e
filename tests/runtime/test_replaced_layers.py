"""A host puts other layers, or the same at other places, into a module whose weights are in system memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretended_card import Card
from torch import nn
from torch.nn.utils import parametrize

from sfast_ext.weights.aside import Aside

from .eight_bits import HALF, Block, Net, On, changed
from .test_lean_first_calls import FEW, least, moved  # noqa: F401
from .test_resident import away, card, kernels, started  # noqa: F401

Change = Callable[[Net, str], Any]


def made(layer: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(4)
    return layer().to(HALF).to(device)


def another(net: Net, device: str) -> None:
    net.blocks[0].ff_out = made(lambda: nn.Linear(256, 64), device)  # type: ignore[assignment]


def of_another_form(net: Net, device: str) -> None:
    two = made(lambda: nn.Sequential(nn.Linear(256, 32), nn.Linear(32, 64)), device)
    net.blocks[0].ff_out = two  # type: ignore[assignment]


def other_block(net: Net, device: str) -> None:
    net.blocks[0] = made(Block, device)


def fewer(net: Net, device: str) -> None:
    net.blocks = nn.ModuleList([net.blocks[1]])


def in_another_order(net: Net, device: str) -> None:
    net.blocks = nn.ModuleList([net.blocks[1], net.blocks[0]])


def tied(net: Net, device: str) -> None:
    net.blocks[1].ff_out.weight = net.blocks[0].ff_out.weight


def another_parameter(net: Net, device: str) -> None:
    weight = torch.full((64, 256), 0.01, dtype=HALF, device=device)
    net.blocks[1].ff_out.weight = nn.Parameter(weight)


def no_parameter(net: Net, device: str) -> None:
    del net.blocks[1].to_out._parameters["weight"]
    net.blocks[1].to_out.register_buffer("weight", torch.full((64, 64), 0.01, dtype=HALF, device=device))


def parametrized(net: Net, device: str) -> None:
    parametrize.register_parametrization(net.blocks[1].to_out, "weight", nn.Identity())


class Wrapper(nn.Module):
    """A layer around another one, as for a LoRA."""

    def __init__(self, layer: nn.Linear, device: str) -> None:
        super().__init__()
        self.layer = layer
        self.more = made(lambda: nn.Linear(layer.in_features, layer.out_features), device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 0.1 * self.more(x)  # type: ignore[no-any-return]


def wrapped(net: Net, device: str) -> None:
    for block in net.blocks:
        block.ff_out = Wrapper(block.ff_out, device)


CHANGES = [another, of_another_form, other_block, fewer, in_another_order, tied, another_parameter, no_parameter,
           parametrized, wrapped]  # fmt: skip


def in_eight_bits(on: On) -> None:
    """The model as it is has plans, which leave weights in system memory."""
    for rows in (FEW, FEW, FEW, 256, 256, FEW):
        assert on.error(rows) < 0.02, on.words()
    plans = [plan for plan in on.acc.plans.values() if plan.generation_of_use]
    assert plans and plans[-1].resident and on.acc.arena.resident.elsewhere()
    assert on.acc._context.model.eight_bits.reason is None and not on.acc._context.model.lean_failed
    assert on.count("errors") == 0, on.words()


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "later"])
@pytest.mark.parametrize("change", CHANGES)
def test_results_are_those_of_the_layers_that_are_there(card: Card, change: Change, first: bool) -> None:  # noqa: F811
    on = moved() if first else started()
    assert away(on) == 12
    change(on.twin, "cpu")
    change(on.ours, "cuda")
    in_eight_bits(on)
    on.acc.release()
    assert all(p.is_cuda for p in on.ours.parameters())
    assert all(map(torch.equal, (p.cpu() for p in on.ours.parameters()), on.twin.parameters()))


def test_in_a_call_without_a_plan_as_well(card: Card) -> None:  # noqa: F811
    on = moved()
    parametrized(on.twin, "cpu")
    parametrized(on.ours, "cuda")
    on.ours.blocks[0].register_forward_hook(lambda module, given, result: result)
    assert on.error(FEW) < 1e-6 and all(p.is_cuda for p in on.ours.parameters())


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "later"])
def test_a_block_that_comes_back_has_its_weights(card: Card, first: bool) -> None:  # noqa: F811
    on = moved() if first else started()
    before = on.ours.blocks[0], on.twin.blocks[0]
    for _ in range(2):
        other_block(on.ours, "cuda")
        other_block(on.twin, "cpu")
        in_eight_bits(on)
        # meanwhile it is changed
        for block in before:
            block.ff_in.weight.mul_(-1.3)
            block.to_q.weight.data = block.to_q.weight.data * 0.7
        on.ours.blocks[0], on.twin.blocks[0] = before
        in_eight_bits(on)
        on.both(changed("in place", -1.2))
        in_eight_bits(on)


def test_two_layers_at_one_path_have_banks_of_their_own(card: Card) -> None:  # noqa: F811
    on = started()
    resident, block = on.acc.arena.resident, on.ours.blocks[0]
    plan, number = on.plan, len(resident.banks)
    other_block(on.ours, "cuda")
    other_block(on.twin, "cpu")
    in_eight_bits(on)
    # the plan of the layers before may be used again
    assert plan in on.acc.plans.values() and len(resident.banks) > number
    sources = [{id(aside.slots[0][0]) for aside, _ in bank.sources} for bank in resident.banks]
    own = {id(layer._parameters) for layer in on.ours.blocks[0].modules()}
    theirs = {id(layer._parameters) for layer in block.modules()}
    assert any(each <= own for each in sources) and any(each <= theirs for each in sources)


def test_an_aside_is_that_of_a_place_and_a_form(card: Card) -> None:  # noqa: F811
    on = started()
    asides, layer = on.acc.arena.resident._asides, on.ours.blocks[0].ff_out
    weight: Any = next(w for w in on.acc.arena._tracked.known() if w.path == "blocks.1.norm1.weight")
    assert asides.of(weight) is None
    (one,) = asides.made_of(weight)
    assert asides.made_of(weight) == [one] and asides.of(weight) is one and isinstance(one, Aside)
    # another place more, and another dtype
    weight.slots = [*weight.slots, (layer._parameters, "weight")]
    assert asides.of(weight) is not one
    two = asides.of(weight)
    weight.tensor = weight.tensor.float()
    assert asides.of(weight) is not two and asides.of(copy.copy(weight)) is asides.of(weight)
