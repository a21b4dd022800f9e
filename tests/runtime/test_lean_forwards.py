"""Forwards that do unusual things with weights, or raise, in a call that leaves these in system memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pretended_card import GPU, Card
from torch import nn
from torch.nn import functional as F

from sfast_ext.runtime import lean_calls
from sfast_ext.weights import arena

from .eight_bits import Net, On, changed
from .test_lean_first_calls import FEW, least, move, moved  # noqa: F401
from .test_resident import CARD, away, card, halves, kernels, started  # noqa: F401


class GoesToAWeight(Net):
    """Returns its result where it believes a weight to be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(self.blocks[1].to_out.weight.device)


class KeepsAView(Net):
    """Keeps a view of a weight, which it takes outside of the layer's call."""

    view: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "view"):
            self.view = self.blocks[1].to_out.weight.t()
        y = super().forward(x)
        return y + y @ self.view[:8, :8]


class Twice(Net):
    """Calls a layer within its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.blocks[0].to_out
        return super().forward(x) + self.last(layer(layer(self.first(x))))


class Direct(Net):
    """Calls forwards without hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block.forward(x) + block.to_out.forward(x)
        return self.last(x)


class OfData(nn.Linear):
    """Reads its weight past autograd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.data, self.bias.data)


class OfRows(nn.Linear):
    """Reads a part of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight[:32], self.bias[:32]).repeat(1, 1, 2)


class KeepsDerived(nn.Linear):
    """Keeps what it computes of its weight."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = self.weight * 2
        return F.linear(x, self.kept, self.bias)


class Mapped(nn.Linear):
    """Is called by torch.func."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda rows: F.linear(rows, self.weight, self.bias))(x)


# of each kind one, but for vmap, which takes long
@pytest.mark.long(but=[0, 3, 4, 7, 8, 11, 12])
@pytest.mark.parametrize("first", [True, False], ids=["first", "another size"])
@pytest.mark.parametrize("kind", [GoesToAWeight, KeepsAView, Twice, Direct, OfData, OfRows, KeepsDerived, Mapped])
def test_each_call_gives_what_the_original_gives(card: Card, kind: type[nn.Module], first: bool) -> None:  # noqa: F811
    on = On(CARD) if first else started()
    on.device = "cuda"
    for each in (on.ours, on.twin):
        (each if issubclass(kind, Net) else each.blocks[1].ff_out).__class__ = kind  # type: ignore[assignment]
    if first:
        move(on)
    assert away(on) == len(halves(on.ours))
    for rows in (FEW, FEW, 256, 256, FEW, 512):
        x = torch.randn(2, rows // 2, 8).to(torch.bfloat16)
        found, wanted = on.ours(x.to("cuda")), on.twin(x)
        assert found.device == GPU and (found.cpu() - wanted).norm() < 0.07 * wanted.norm(), (rows, on.words())
    on.both(changed("in place", -1.6))
    if kind is not KeepsDerived:
        assert on.error(FEW) < 0.08 and on.error(64) < 0.08
    on.acc.release()
    assert away(on) == 0 and on.count("errors") == 0
    assert all(map(torch.equal, (p.cpu() for p in on.ours.parameters()), on.twin.parameters()))


class KeepsData(Net):
    """Keeps what `.data` of a weight gives, which it takes outside of the layer's call."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = self.blocks[1].to_out.weight.data
        y = super().forward(x)
        if self.fails and not self.blocks[1].to_out.weight.is_cuda:
            raise RuntimeError
        return y + y @ self.kept[:8, :8]


@pytest.mark.parametrize("first", [True, False], ids=["first", "another size"])
@pytest.mark.parametrize("fails", [False, True])
def test_data_that_a_forward_keeps_is_on_the_gpu(card: Card, first: bool, fails: bool) -> None:  # noqa: F811
    on = moved() if first else started()
    for each in (on.ours, on.twin):
        each.__class__ = KeepsData
    on.ours.fails = fails
    assert on.error(FEW) < 1e-6 and on.ours.kept.device == GPU
    assert torch.equal(on.ours.kept.cpu(), on.twin.kept)
    on.ours.fails = False
    for rows in (FEW, FEW, 256, 256):
        assert on.error(rows) < 0.05, on.words()
    assert on.count("errors") == 0 and bool(on.count("weights_brought_back")) == fails


class Stop(Exception):
    """Of a host, which ends a call by it."""


@pytest.mark.parametrize("first", [True, False], ids=["first", "another size"])
def test_what_a_host_raises_once_is_raised(card: Card, first: bool) -> None:  # noqa: F811
    on, asked = moved() if first else started(), [True]

    class Stops(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if asked:
                asked.clear()
                raise Stop
            return y

    before: list[Any] = [(p.data_ptr(), p._version) for p in halves(on.ours)]
    on.ours.__class__ = Stops
    with pytest.raises(Stop):
        on.call(FEW)
    assert [(p.data_ptr(), p._version) for p in halves(on.ours)] == before
    assert on.error(FEW) < 1e-6 and on.error(FEW) < 0.05 and on.count("errors") == 0
    assert not on.acc._context.model.lean_failed


def test_a_move_to_another_dtype(card: Card) -> None:  # noqa: F811
    on = On(CARD)
    on.device = "cuda"
    with on.acc.keeping_aside(GPU, early=True):
        on.ours.to("cuda", torch.float16)
    on.twin.half()
    assert {p.dtype for p in on.ours.parameters()} == {torch.float16}
    for rows in (FEW, FEW, 256, 256):
        x = torch.randn(2, rows // 2, 8).half()
        found, wanted = on.ours(x.to("cuda")).cpu(), on.twin(x)
        assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert on.count("errors") == 0, on.words()
    on.acc.release()
    assert all(map(torch.equal, (p.cpu() for p in on.ours.parameters()), on.twin.parameters()))


def test_what_another_thread_saves_has_its_values(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(arena, "RESTORE_WAIT_S", 0.05)
    on, saved = started(), dict[str, Any]()

    def bits(value: torch.Tensor) -> Any:
        return value.detach().contiguous().view(torch.int16).numpy().copy()

    def save() -> None:
        with card, torch.no_grad():
            saved.update((name, bits(value)) for name, value in on.ours.state_dict().items())

    thread = threading.Thread(target=save)
    with lean_calls.standing_in(on.acc._context):
        thread.start()
        thread.join(0.5)
        assert not saved
    thread.join(10)
    assert all((saved[name] == bits(value)).all() for name, value in on.twin.state_dict().items())
