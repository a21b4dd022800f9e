"""Copies in system memory of weights that are on a pretended GPU."""

from __future__ import annotations

import copy
import gc
import random

import pytest
import torch
from faulty import failing
from pretended_card import GPU, pretended_card
from torch import nn
from use_count import counted

from sfast_ext.weights.host_copies import HostCopies, move_to_gpu, sources_of
from sfast_ext.weights.staging import Staging


@pytest.fixture
def card(monkeypatch):
    with pretended_card(monkeypatch, 1 << 30) as card:
        yield card


class Moved:
    """A model that is moved to the GPU, with its values before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Linear(40, 30))
        self.module[2].weight.data = self.module[2].weight.data.contiguous(memory_format=torch.channels_last)
        self.copies = HostCopies()
        self.arrive()

    def arrive(self) -> None:
        self.pointers = [p.data_ptr() for p in self.module.parameters()]
        self.strides = [p.stride() for p in self.module.parameters()]
        self.values = copy.deepcopy(self.module)
        sources = sources_of(self.module.parameters())
        move_to_gpu(self.module.parameters(), GPU)
        self.module.to(GPU)
        assert all(p.is_cuda for p in self.module.parameters())
        assert [p.stride() for p in self.module.parameters()] == self.strides
        self.copies.keep(self.module, sources)

    def leave(self) -> int:
        """How many weights had to be copied."""
        put_back = self.copies.put_back(self.module)
        self.module.to("cpu")
        assert not any(t.is_cuda for t in (*self.module.parameters(), *self.module.buffers()))
        return len(self.pointers) - put_back

    def unmoved(self) -> list[bool]:
        return [p.data_ptr() == was for p, was in zip(self.module.parameters(), self.pointers)]


@pytest.fixture
def moved(card):
    return Moved()


def equal(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.state_dict().values(), other.state_dict().values())
    return all(torch.equal(a.to("cpu"), b.to("cpu")) for a, b in pairs)


@pytest.mark.parametrize("where", ["memory", "pieces"])
def test_a_move_that_fails_moves_nothing(monkeypatch, where):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 1000), nn.Linear(8, 8))
    before, pointers = copy.deepcopy(module), [p.data_ptr() for p in module.parameters()]
    with pretended_card(monkeypatch, 20_000 if where == "memory" else 1 << 30) as card:
        if where == "pieces":
            failing(monkeypatch, Staging, "_send")
        with pytest.raises(RuntimeError):
            move_to_gpu(module.parameters(), GPU)
        # half of it on the GPU might be without its values
        assert [p.data_ptr() for p in module.parameters()] == pointers and equal(module, before)
        gc.collect()
        assert card.used == 0


def test_nothing_is_copied_if_nothing_changed(moved):
    for _ in range(3):
        assert moved.copies.bytes == sum(p.nbytes for p in moved.module.parameters())
        assert moved.leave() == 0 and all(moved.unmoved()) and equal(moved.module, moved.values)
        assert moved.copies.bytes == 0
        moved.arrive()


@pytest.mark.parametrize("how", ["in place", "in its data", "other data", "another tensor"])
def test_what_changed_is_copied(moved, how):
    layer = moved.module[3]
    with torch.no_grad():
        changed = layer.weight + 1
        if how == "in place":
            layer.weight.copy_(changed)
        elif how == "in its data":
            layer.weight.data.add_(1)
        elif how == "other data":
            layer.weight.data = changed
        else:
            layer.weight = nn.Parameter(changed)
    with torch.no_grad():
        moved.values[3].weight += 1
    assert moved.leave() == 1 and equal(moved.module, moved.values)
    moved.arrive()
    assert moved.leave() == 0 and equal(moved.module, moved.values)


def test_a_parameter_that_left_the_module_is_not_touched(moved):
    kept = moved.module[3].weight
    moved.module[3].weight = nn.Parameter(kept.detach().clone())
    moved.leave()
    assert kept.is_cuda and equal(moved.module, moved.values)


def test_other_dtypes_and_shapes_are_copied(moved):
    moved.module[0].half()
    moved.module[3].bias.data = torch.zeros(31).to(GPU)
    assert moved.leave() == 3
    assert moved.module[0].weight.dtype == torch.float16 and moved.module[3].bias.shape == (31,)


def test_the_same_bits_in_another_dtype_or_shape_are_copied(moved):
    moved.module.requires_grad_(False)
    moved.module[0].bias.data = moved.module[0].bias.data.view(torch.int32)
    moved.module[3].weight.data = moved.module[3].weight.data.view(15, 80)
    assert moved.leave() == 2
    assert moved.module[0].bias.dtype == torch.int32 and moved.module[3].weight.shape == (15, 80)


@counted
def test_memory_that_others_use_is_not_kept(card):
    moved = Moved()
    moved.leave()
    backup = moved.module[0].weight.data
    both = moved.module[2].bias.data[2:]
    moved.arrive()
    assert moved.leave() == 2
    # as without us, what follows does not reach the backup
    with torch.no_grad():
        moved.module[0].weight.add_(1)
        both.add_(1)
    assert torch.equal(backup, moved.values[0].weight) and torch.equal(moved.module[2].bias, moved.values[2].bias)


def test_a_module_that_is_there_already_keeps_them(moved):
    sources = sources_of(moved.module.parameters())
    assert sources == []
    moved.copies.keep(moved.module, sources)
    assert moved.leave() == 0


def test_tied_and_empty_parameters(card):
    moved = Moved()
    moved.leave()
    moved.module.append(nn.Linear(40, 30))
    moved.module[4].weight = moved.module[3].weight
    moved.module.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    moved.arrive()
    moved.leave()
    assert moved.module[4].weight is moved.module[3].weight and equal(moved.module, moved.values)


def test_inference_tensors(card):
    moved = Moved()
    moved.leave()
    weight = moved.module[3].weight
    with torch.inference_mode():
        weight.data = weight.data.clone()
        sources = sources_of(moved.module.parameters())
        move_to_gpu(moved.module.parameters(), GPU)
        moved.copies.keep(moved.module, sources)
        assert weight.is_inference() and weight.is_cuda
        assert moved.leave() == 0
    assert weight.is_inference() and equal(moved.module, moved.values)


def changes(rng: random.Random, module: nn.Module) -> str:
    """Change something, wherever the module is, as a LoRA, a merge, a cast or a host does."""
    layer = module[rng.choice((0, 2, 3))]
    name = rng.choice(("weight", "bias"))
    parameter = getattr(layer, name)
    what = rng.choice(("add", "data", "back", "replace", "half", "float", "relay", "flip", "nothing"))
    with torch.no_grad():
        if what == "add":
            parameter.add_(rng.random())
        elif what == "data":
            parameter.data = parameter.data * 0.5
        elif what == "back":
            parameter.add_(1).sub_(1)
        elif what == "replace":
            setattr(layer, name, nn.Parameter(parameter.detach().clone()))
        elif what in ("half", "float"):
            layer.half() if what == "half" else layer.float()
        elif what == "relay" and parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        elif what == "flip":
            parameter.copy_(parameter.flip(0))
    return what


@counted
def test_after_random_changes_a_module_is_as_if_the_host_had_moved_it(card):
    for seed in range(60):
        rng = random.Random(seed)
        moved = Moved()
        other, log = copy.deepcopy(moved.values).to(GPU), []
        aliases: list[torch.Tensor] = []
        for _ in range(12):
            state = rng.getstate()
            log.append(changes(rng, moved.module))
            rng.setstate(state)
            changes(rng, other)
            move = rng.random()
            if move < 0.3:
                moved.leave()
                other.to("cpu")
                if rng.random() < 0.3:
                    aliases.append(rng.choice(list(moved.module.parameters())).data)
                if rng.random() < 0.5:
                    state = rng.getstate()
                    log.append(changes(rng, moved.module))
                    rng.setstate(state)
                    changes(rng, other)
                moved.arrive()
                other.to(GPU)
            elif move < 0.4 and aliases:
                aliases.pop().zero_()
            pairs = zip(moved.module.state_dict().items(), other.state_dict().values())
            for (name, value), expected in pairs:
                assert value.dtype == expected.dtype and value.stride() == expected.stride(), (seed, name, log)
                assert torch.equal(value.to("cpu"), expected.to("cpu")), (seed, name, log)


def test_copies_go_with_their_module_and_where_it_was_moved_otherwise(moved):
    moved.copies.sweep()
    assert moved.copies.bytes
    for parameter in moved.module.parameters():
        parameter.data = parameter.data.to("cpu")
    moved.copies.sweep()
    assert not moved.copies.bytes
    moved.arrive()
    assert moved.copies.bytes
    del moved.module
    gc.collect()
    assert not moved.copies.bytes
