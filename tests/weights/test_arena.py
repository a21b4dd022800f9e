from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch
from torch import nn

from sfast_ext.weights.arena import WeightArena, WeightsAway, WeightsChanged
from sfast_ext.weights.submodule_arena import SubmoduleArena


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, n, bias=False) for n in (3, 5, 4))
        self.conv = nn.Conv2d(4, 6, 3)
        self.register_buffer("table", torch.arange(3.0))


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Small()


def arena_of(module, *names):
    arena = WeightArena(module)
    arena.index()
    return arena, [arena.locate(module.get_parameter(n)) for n in names]


def snapshot(module):
    return {
        n: (t, t.detach().clone(), t.stride(), t.untyped_storage().nbytes())
        for n, t in [*module.named_parameters(), *module.named_buffers()]
    }


def assert_as_before(module, before, *, values=True):
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        identity, value, stride, storage = before[name]
        assert tensor is identity, name
        assert tensor.stride() == stride and tensor.untyped_storage().nbytes() == storage, name
        if values:
            assert torch.equal(tensor, value), name


def test_packed_parameters_are_views_and_keep_their_identity_and_values(small):
    before = snapshot(small)
    arena, weights = arena_of(small, "q.weight", "k.weight", "v.weight")
    packed = arena.pack(weights)
    assert packed.tensor.shape == (12, 4)
    assert torch.equal(packed.tensor, torch.cat([before[f"{n}.weight"][1] for n in "qkv"]))
    storage = packed.tensor.untyped_storage().data_ptr()
    for name in "qkv":
        parameter = small.get_parameter(f"{name}.weight")
        assert parameter is before[f"{name}.weight"][0]
        assert parameter.untyped_storage().data_ptr() == storage
    assert arena.pack(weights) is packed


def test_an_update_in_place_reaches_the_packed_tensor_by_itself(small):
    arena, weights = arena_of(small, "q.weight", "k.weight")
    packed = arena.pack(weights)
    arena.bind([packed])
    with torch.no_grad():
        small.k.weight.fill_(7)
    assert arena.sync() == 0
    assert torch.equal(packed.tensor[3:], torch.full((5, 4), 7.0))


@pytest.mark.parametrize("how", ["parameter", "data", "load_state_dict", "assign", "dtype round trip"])
def test_replaced_values_are_copied_in_and_the_parameter_is_bound_again(small, how):
    arena, weights = arena_of(small, "q.weight", "k.weight", "conv.weight")
    packed = arena.pack(weights[:2])
    assert arena.channels_last(weights[2])
    arena.bind([packed, weights[2]])
    address = packed.tensor.data_ptr(), weights[2].tensor.data_ptr()
    new = torch.randn(5, 4)
    if how == "parameter":
        small.k.weight = nn.Parameter(new.clone())
    elif how == "data":
        small.k.weight.data = new.clone()
    elif how == "load_state_dict":
        small.load_state_dict({**small.state_dict(), "k.weight": new.clone()})
    elif how == "assign":
        small.load_state_dict({**small.state_dict(), "k.weight": new.clone()}, assign=True)
    else:
        with torch.no_grad():
            small.k.weight.copy_(new)
        small.double().float()
    arena.sync()
    assert torch.equal(packed.tensor[3:], new)
    assert torch.equal(small.k.weight, new)
    assert (packed.tensor.data_ptr(), weights[2].tensor.data_ptr()) == address
    assert small.k.weight.data_ptr() == packed.tensor[3:].data_ptr()
    assert small.conv.weight.data_ptr() == weights[2].tensor.data_ptr()
    with torch.no_grad():
        small.k.weight.fill_(3)
    assert arena.sync() == 0 and torch.equal(packed.tensor[3:], torch.full((5, 4), 3.0))


def test_a_transposed_view_of_the_same_memory_is_not_taken_for_unchanged():
    module = nn.Linear(3, 3, bias=False)
    arena, (weight,) = arena_of(module, "weight")
    arena.bind([weight])
    value = module.weight.detach().clone()
    module.weight = nn.Parameter(module.weight.detach().t())
    arena.sync()
    assert torch.equal(weight.tensor, value.t()) and torch.equal(module.weight, value.t())


def test_weights_that_cannot_be_followed_say_so(small):
    arena, weights = arena_of(small, "q.weight")
    arena.bind(weights)
    kept = small.q.weight
    small.q.weight = nn.Parameter(torch.zeros(9, 4))
    with pytest.raises(WeightsChanged, match="q.weight changed"):
        arena.sync()
    small.q.weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float16))
    with pytest.raises(WeightsChanged):
        arena.sync()
    small.q.weight = nn.Parameter(torch.zeros(3, 4, device="meta"))
    with pytest.raises(WeightsAway, match="meta"):
        arena.sync()
    small.q._parameters["weight"] = None
    with pytest.raises(WeightsChanged, match="gone"):
        arena.sync()
    small.q._parameters["weight"] = kept
    assert arena.sync() == 0


def test_memory_that_was_exchanged_under_a_plan_is_noticed(small):
    """A CUDA graph goes on reading where it was, although the live tensor follows its storage."""
    arena, (weight,) = arena_of(small, "q.weight")
    arena.bind([weight])
    storage, held = small.q.weight.untyped_storage(), []
    while storage.data_ptr() == weight.pointer:
        held.append(torch.empty(storage.nbytes(), dtype=torch.uint8))
        storage.resize_(2 * storage.nbytes())
    with torch.no_grad():
        small.q.weight.fill_(3)
    with pytest.raises(WeightsChanged, match="memory of q.weight"):
        arena.sync()
    arena.unbind([weight])
    arena.index()
    again = arena.locate(small.q.weight)
    arena.bind([again])
    assert arena.sync() == 0 and again.tensor.eq(3).all()


def test_what_a_plan_reads_is_not_moved(small):
    arena, weights = arena_of(small, "q.weight", "k.weight", "conv.weight")
    arena.bind([weights[0], weights[2]])
    assert arena.pack(weights[:2]) is None
    assert not arena.channels_last(weights[2])
    arena.unbind([weights[0], weights[2]])
    assert arena.pack(weights[:2]) is not None and arena.channels_last(weights[2])


def test_weights_that_do_not_fit_are_not_packed(small):
    arena, weights = arena_of(small, "q.weight", "k.weight", "conv.weight")
    assert arena.pack([weights[0], weights[2]]) is None
    assert arena.pack([weights[0], weights[0]]) is None
    small.k.half()
    arena.index()
    assert arena.pack([weights[0], arena.locate(small.k.weight)]) is None


def test_weights_are_not_packed_without_memory_for_both_copies(small, monkeypatch):
    arena, weights = arena_of(small, "q.weight", "k.weight")
    before = snapshot(small)

    def no_memory(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", no_memory)
    assert arena.pack(weights) is None
    assert_as_before(small, before)
    monkeypatch.undo()
    assert arena.pack(weights) is not None


def test_release_gives_every_parameter_back_as_it_was(small):
    before = snapshot(small)
    arena, weights = arena_of(small, "q.weight", "k.weight", "v.weight", "conv.weight")
    packed = arena.pack(weights[:3])
    arena.channels_last(weights[3])
    arena.bind([packed, weights[3]])
    arena.unbind([packed, weights[3]])
    arena.release()
    assert_as_before(small, before)
    arena.release()
    assert_as_before(small, before)


def test_release_gives_current_values_back(small):
    before = snapshot(small)
    arena, weights = arena_of(small, "q.weight", "k.weight")
    packed = arena.pack(weights)
    arena.bind([packed])
    with torch.no_grad():
        small.q.weight.fill_(2)
    small.k.weight = nn.Parameter(torch.full((5, 4), 5.0))
    arena.sync()
    arena.release()
    assert small.q.weight is before["q.weight"][0]
    assert small.q.weight.eq(2).all() and small.k.weight.eq(5).all()
    assert small.q.weight.untyped_storage().nbytes() == 3 * 4 * 4
    assert small.k.weight.untyped_storage().nbytes() == 5 * 4 * 4


def test_a_dissolved_pack_can_be_made_anew(small):
    arena, weights = arena_of(small, "q.weight", "k.weight")
    first = arena.pack(weights)
    small.k.weight = nn.Parameter(torch.ones(5, 4))
    arena.index()
    again = [arena.locate(small.q.weight), arena.locate(small.k.weight)]
    packed = arena.pack(again)
    assert packed is not None and packed is not first
    assert packed.tensor[3:].eq(1).all()
    arena.release()
    assert small.q.weight.untyped_storage().nbytes() == 3 * 4 * 4


def test_tied_parameters_are_one_weight():
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    arena, (weight,) = arena_of(module, "a.weight")
    assert len(weight.slots) == 2
    arena.bind([weight])
    module["b"].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(WeightsChanged, match="shared"):
        arena.sync()


def test_a_copy_of_the_module_is_independent(small):
    arena, weights = arena_of(small, "q.weight", "k.weight")
    packed = arena.pack(weights)
    twin = copy.deepcopy(small)
    with torch.no_grad():
        twin.q.weight.fill_(9)
    assert not packed.tensor[:3].eq(9).any()
    saved = small.state_dict()
    assert torch.equal(saved["k.weight"], small.k.weight)


def test_sync_is_cheap_when_nothing_changed():
    """No step of Python's for each weight."""

    def steps(layers):
        module = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))
        arena = WeightArena(module)
        arena.index()
        arena.bind([arena.locate(p) for p in module.parameters()])
        assert arena.status()["tracked"] == 2 * layers
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        gc.disable()  # a collection would run finalizers of other objects here
        sys.settrace(trace)
        try:
            assert arena.sync() == 0
        finally:
            sys.settrace(before)
            gc.enable()
        return count

    assert 0 < steps(850) == steps(8)


def test_a_part_checks_what_was_bound_after_its_last_check():
    model = nn.ModuleDict({"part": nn.Linear(4, 3), "rest": nn.Linear(4, 3)})
    arena = WeightArena(model)
    part = SubmoduleArena(arena, model["part"])
    assert part.sync() == 0
    arena.index()
    weights = [arena.locate(model[name].weight) for name in ("part", "rest")]
    arena.bind(weights)
    for module in model.values():
        module.weight.data = torch.full((3, 4), 2.0)
    # the other is not the part's
    assert part.sync() == 1 and bool((weights[0].tensor == 2).all())
    assert arena.sync() == 1 and bool((weights[1].tensor == 2).all())
