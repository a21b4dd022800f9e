"""Weights that are moved in place of a host, on a pretended GPU."""

from __future__ import annotations

import pytest
import torch
from pretended_card import GPU, pretended_card
from torch import nn

from sfast_ext.hosts import quick_to, system_memory
from sfast_ext.hosts.attachment import wraps_torchs
from sfast_ext.hosts.moves import Moves, WeightMoves
from sfast_ext.report import Report
from sfast_ext.weights import host_copies

SIZE = 4 * 64 * 64 * 4


@pytest.fixture(autouse=True)
def room(monkeypatch):
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def round_trip(moves: WeightMoves, module: nn.Module) -> None:
    """There and back, with the values that it had."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    assert moves.to_gpu(module, GPU, lambda: module.to(GPU)) is module
    assert all(parameter.is_cuda for parameter in module.parameters())
    assert moves.to_cpu(module, lambda: module.to("cpu")) is module
    assert not any(parameter.is_cuda for parameter in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before))


@pytest.mark.parametrize(("capacity", "kept"), [(4 * SIZE, 4), (SIZE + 64, 0)])
def test_a_gpu_without_room_for_digests_is_no_failure(monkeypatch, capacity, kept):
    report, module = Report(), model()
    with pretended_card(monkeypatch, capacity) as card:
        round_trip(WeightMoves(report), module)
        assert (card.refused > 0) == (kept == 0) and card.refused == report.counter("out_of_memory")
    assert report.counter("weights_put_back") == kept and report.as_dict()["last_error"] is None


def test_weights_that_do_not_fit_are_the_host_s_failure(monkeypatch):
    report, module = Report(), model()
    with pretended_card(monkeypatch, SIZE // 2), pytest.raises(torch.cuda.OutOfMemoryError):
        WeightMoves(report).to_gpu(module, GPU, lambda: module.to(GPU))
    assert report.as_dict()["last_error"] is None


@pytest.mark.parametrize("name", ["sources_of", "move_to_gpu", "keep", "put_back"])
def test_what_fails_is_left_to_the_host(monkeypatch, name):
    def fail(*given):
        raise ValueError("planted")

    owner = host_copies.HostCopies if hasattr(host_copies.HostCopies, name) else WeightMoves.to_gpu.__globals__
    patch = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
    patch(owner, name, fail)
    report, module = Report(), model()
    with pretended_card(monkeypatch, 4 * SIZE):
        round_trip(WeightMoves(report), module)
    assert "planted" in str(report.as_dict()["last_error"])


def test_without_system_memory_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE - 1)
    report, module = Report(), model()
    with pretended_card(monkeypatch, 4 * SIZE):
        round_trip(WeightMoves(report), module)
    assert report.counter("weights_put_back") == 0 and report.as_dict()["last_error"] is None


class Own(nn.Sequential):
    """Has a method of its own."""

    def to(self, *args, **kwargs):
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(
    "kinds", [(nn.Sequential, nn.ModuleList), (nn.Sequential, type("Inheriting", (nn.Sequential,), {}))]
)
def test_a_class_that_inherits_a_wrapped_method_is_not_wrapped_again(kinds):
    report, modules = (
        Report(),
        [kind([nn.Linear(2, 2)]) if kind is nn.ModuleList else kind(nn.Linear(2, 2)) for kind in kinds],
    )
    moves = Moves(lambda module: [], lambda needed: None, report, "the host")
    moves.watch(modules)
    assert ["to" in vars(kind) for kind in kinds] == [True, not issubclass(kinds[1], kinds[0])]
    assert all(wraps_torchs(type(module).to) for module in modules)
    moves.release()
    assert not any("to" in vars(kind) for kind in kinds)


def test_other_modules_of_the_class_are_the_host_s(monkeypatch):
    moves = Moves(lambda module: [], lambda needed: None, Report(), "the host")
    followed, other = model(), model()
    with pretended_card(monkeypatch, 8 * SIZE):
        moves.watch([followed])
        for module in (followed, other):
            assert module.to(GPU) is module and all(p.is_cuda for p in module.parameters())
        assert followed in moves.copies._copies and other not in moves.copies._copies
        moves.release()


def test_torch_looks_at_no_parameter_if_all_are_there(monkeypatch):
    moves = Moves(lambda module: [], lambda needed: None, Report(), "the host")
    asked = []

    def to(original, *args):
        asked.append(original)
        return real(original, *args)

    real = quick_to.to
    monkeypatch.setattr(quick_to, "to", to)
    with pretended_card(monkeypatch, 8 * SIZE):
        moves.watch([followed := model()])
        for place in (GPU, "cpu"):
            followed.to(place)
            assert {p.device.type for p in followed.parameters()} == {torch.device(place).type}
        moves.release()
    assert asked == [nn.Module.to] * 2


def test_only_what_wraps_torch_s_own_is_vouched_for():
    moves = Moves(lambda module: [], lambda needed: None, Report(), "the host")
    own, before = Own(nn.Linear(2, 2)), Own.to
    moves.watch([own, nn.Sequential(nn.Linear(2, 2))])
    assert wraps_torchs(nn.Sequential.to) and not wraps_torchs(Own.to) and Own.to is not before
    moves.release()
    assert not wraps_torchs(nn.Sequential.to) and Own.to is before and not wraps_torchs(len)
