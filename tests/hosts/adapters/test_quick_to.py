"""`Module.to` if parameters are in place: what it does is what torch's own does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretended_card import CPU, GPU, pretended_card
from torch import nn

from sfast_ext.hosts import quick_to

_TO = nn.Module.to


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with pretended_card(monkeypatch, 1 << 20) as card:
        yield card


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm2d(3), nn.Linear(3, 3)))
    made[1].register_buffer("table", torch.arange(3), persistent=False)
    made[1].register_buffer("nothing", None)
    return made.requires_grad_(False)


def to(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return quick_to.to(original, module, [*module.modules()], args, kwargs)


def moved(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether torch's own `to` was needed."""
    asked: list[nn.Module] = []
    apply = nn.Module._apply

    def noted(each: nn.Module, *given: Any) -> Any:
        asked.append(each)
        return apply(each, *given)

    noted.__code__ = noted.__code__.replace(co_filename=apply.__code__.co_filename)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_apply", noted)
        assert to(_TO, module, *args, **kwargs) is module
    return bool(asked)


def check(module: nn.Module, place: torch.device) -> None:
    assert all(t.device == place for t in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("place", ["cuda", "cuda:0", GPU, torch.device("cuda")], ids=repr)
def test_parameters_that_are_there_stay_as_they_are(card: Any, place: Any) -> None:
    module = model()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(GPU)
    objects = [*map(id, module.parameters())]
    before, pointers = module.state_dict(), [p.data_ptr() for p in module.parameters()]
    assert not moved(module, place)
    check(module, GPU)
    assert [p.data_ptr() for p in module.parameters()] == pointers and [*map(id, module.parameters())] == objects
    assert all(torch.equal(value.cpu(), before[name].cpu()) for name, value in module.state_dict().items())
    assert torch.equal(module[1].table.cpu(), torch.arange(3)) and "table" not in module.state_dict()
    assert moved(module, "cpu") and not moved(module, "cpu") and not moved(module, CPU)
    check(module, CPU)


@pytest.mark.parametrize("which", [0, -1])
def test_one_that_is_elsewhere_is_moved(card: Any, which: int) -> None:
    module = model().to(GPU)
    parameter = [*module.parameters()][which]
    parameter.data = parameter.data.cpu()
    assert moved(module, GPU)
    check(module, GPU)


class Bound(nn.Linear):
    """Has something that follows it, as LSTMs have."""

    followed = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.followed += 1
        return super()._apply(fn)


class Own(nn.Parameter):
    """Of another class."""


def test_what_torchs_own_does_in_addition_is_done(card: Any) -> None:
    other = nn.Sequential(model(), Bound(2, 2))
    assert moved(other, "cpu") and other[1].followed == 1
    plain = model()
    assert not moved(plain, "cpu") and moved(plain, "cpu", torch.float64) and moved(plain, dtype=torch.float32)
    assert moved(plain, torch.float16) and plain[0].weight.dtype == torch.float16
    assert moved(plain, "cpu", non_blocking=True) and moved(plain, torch.zeros(1))
    plain[0].weight = Own(torch.zeros(3, 3), requires_grad=False)
    assert moved(plain, "cpu")
    graded = model().requires_grad_()
    graded[0].weight.grad = torch.ones(3, 3).to(CPU)
    assert moved(graded, "cpu")


def test_with_another_way_to_give_parameters_their_data_torchs_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        assert moved(model(), "cpu")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def test_anothers_method_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def other(self: nn.Module, *args: Any) -> nn.Module:
        called.append(args)
        return self

    module = model()
    to(other, module, "cpu")
    assert called == [("cpu",)]
    # somebody put it into all modules
    monkeypatch.setattr(nn.Module, "to", other)
    to(other, module, "cpu")
    monkeypatch.setattr(nn.Module, "to", _TO)
    monkeypatch.setattr(nn.Module, "_apply", lambda self, *args: called.append(args) or self)
    to(_TO, module, "cpu")
    assert len(called) == 3
    monkeypatch.undo()
    module[0]._apply = lambda *args: called.append(args)
    to(_TO, module, "cpu")
    assert len(called) == 4


def test_what_torch_refuses_is_refused() -> None:
    module = model()
    module[1].register_buffer("nowhere", torch.zeros(2, device="meta"))
    with pytest.raises(NotImplementedError, match="to_empty"):
        to(_TO, module, "cpu")
