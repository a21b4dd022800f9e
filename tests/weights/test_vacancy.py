"""Memory of weights that goes to the host and comes back, under plans that stay."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from faulty import Injected, failing
from fuzz.nets import SmallNet
from pretended_card import GPU, Card, pretended_card
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.weights.arena import WeightsAway
from sfast_ext.weights.original_layout import OriginalLayouts
from sfast_ext.weights.staging import Staging
from sfast_ext.weights.vacancy import Vacancy, vacancies, vacate
from sfast_ext.weights.weight import new_weight

GRAPHS = Config(triton=False)


@pytest.fixture
def card(monkeypatch):
    with torch.no_grad(), pretended_card(monkeypatch, 1 << 20) as found:
        yield found
        assert not found.faults


class Case:
    """A model on the card, used twice, and its twin on the CPU."""

    def __init__(self, card: Card, config: Config = GRAPHS) -> None:
        torch.manual_seed(0)
        self.card, self.twin = card, SmallNet().eval()
        self.net = copy.deepcopy(self.twin)
        self.to("cuda")
        self.size = card.allocated
        self.acc = accelerate(self.net, config)
        for _ in range(2):
            self.same()

    def to(self, device: str) -> None:
        self.net.to(device)
        self.net.table = self.net.table.to(device)

    def same(self) -> None:
        args = torch.randn(2, 4, 8, 8), torch.tensor([5, 7]), torch.randn(2, 7, 8)
        ours = self.net(*[x.to(self.net.conv_in.weight.device) for x in args])["sample"]
        torch.testing.assert_close(ours.cpu(), self.twin(*args)["sample"], rtol=1e-4, atol=1e-4)

    def counts(self, *names: str) -> list[int]:
        return [self.acc.report.counter(name) for name in names]

    def words(self) -> str:
        return str(self.acc.report.as_dict())


def test_nothing_is_given_back_if_the_module_lies_in_it(card: Card) -> None:
    case = Case(card)
    assert not case.acc.give_memory_back()
    case.same()
    assert case.counts("replays", "graph_captures") == [2, 1]


@pytest.mark.parametrize("fetched", [False, True])
def test_what_left_the_gpu_is_given_back_while_the_rest_lies_there(card: Card, fetched: bool) -> None:
    case = Case(card)
    part = case.net.blocks
    part.to("cpu")
    size = sum(p.nbytes for p in part.parameters())
    before = card.allocated
    # the rest of the module uses the memory of plans
    assert not case.acc.give_memory_back()
    assert before - card.allocated > 0.8 * size and card.graph_bytes == 0
    assert case.counts("memory_given_back") == [1]
    with torch.no_grad():
        for each in (case.net, case.twin):
            each.blocks[0].conv.weight.mul_(3)
    if fetched:
        assert case.acc.fetch_weights() > 0
    part.to("cuda")
    for _ in range(3):
        case.same()
    assert case.counts("captures", "graph_captures", "replays") == [1, 2, 4]
    assert not case.acc.status()["weights"]["away"]


def test_a_release_while_a_part_is_away_leaves_all_weights_as_they_were(card: Card) -> None:
    case = Case(card)
    case.net.blocks.to("cpu")
    assert not case.acc.give_memory_back()
    case.acc.release()
    gc.collect()
    rest = case.size - sum(p.nbytes for p in case.net.blocks.parameters())
    assert card.allocated == rest and card.graph_bytes == 0
    case.to("cpu")
    for (name, ours), (_, theirs) in zip(case.net.named_parameters(), case.twin.named_parameters()):
        assert ours.stride() == theirs.stride() and torch.equal(ours, theirs), name


@pytest.mark.parametrize("by", ["data", "parameters"])
def test_plans_outlive_their_memory_and_graphs_are_captured_anew(card: Card, by: str) -> None:
    case = Case(card)
    case.to("cpu")
    assert card.allocated >= case.size and card.graph_bytes
    assert case.acc.give_memory_back()
    gc.collect()
    # an element of each tensor is left
    assert card.used < case.size / 8 and case.acc.status()["weights"]["away"]
    # once is enough
    assert case.acc.give_memory_back() and case.counts("memory_given_back") == [1]
    case.same()
    assert "not on a GPU" in case.words() or "on the CPU" in case.words()
    with torch.no_grad():
        for each in (case.net, case.twin):
            each.blocks[0].conv.weight.mul_(3)
    if by == "data":
        case.to("cuda")
    else:
        for module in case.net.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("cuda"), requires_grad=False)
        case.to("cuda")
    for _ in range(3):
        case.same()
    assert case.counts("captures", "graph_captures", "replays") == [1, 2, 4]
    assert not case.acc.status()["weights"]["away"]
    case.acc.release()
    gc.collect()
    assert card.allocated == case.size and card.graph_bytes == 0
    case.to("cpu")
    for (name, ours), (_, theirs) in zip(case.net.named_parameters(), case.twin.named_parameters()):
        assert ours.stride() == theirs.stride() and torch.equal(ours, theirs), name


def test_weights_are_fetched_without_a_second_copy(card: Card) -> None:
    case = Case(card)
    for vacated in (False, True, False):
        case.to("cpu")
        case.twin.conv_out.weight.mul_(2)
        case.net.conv_out.weight.mul_(2)
        if vacated:
            assert case.acc.give_memory_back()
        card.peak = held = card.used
        assert case.acc.fetch_weights() > 10
        weights = sum(p.nbytes for p in case.net.parameters())
        assert card.peak - held <= (1.25 * weights if vacated else 0.1 * weights)
        assert {p.device for p in case.net.parameters()} == {GPU}
        case.same()
        case.same()
    assert case.counts("captures", "graph_captures", "replays") == [1, 2, 7]


@pytest.mark.parametrize("fails", ["copy", "_send"])
def test_a_fetch_that_fails_leaves_the_host_its_weights(card: Card, fails: str) -> None:
    case = Case(card)
    case.to("cpu")
    where = {name: p.data_ptr() for name, p in case.net.named_parameters()}
    assert case.acc.give_memory_back()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, Staging, fails)
        with pytest.raises(Injected):
            case.acc.fetch_weights()
    # the memory of the plans was without their values
    assert {name: p.data_ptr() for name, p in case.net.named_parameters()} == where
    assert case.acc.fetch_weights() > 10
    case.same()
    assert case.counts("captures", "graph_captures", "replays") == [1, 2, 2]


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_plans_find_what_was_fetched() -> None:
    torch.manual_seed(0)
    net = SmallNet().eval().to("cuda")
    net.table = net.table.cuda()
    twin, acc = copy.deepcopy(net), accelerate(net, GRAPHS)
    args = torch.randn(2, 4, 8, 8).cuda(), torch.tensor([5, 7]).cuda(), torch.randn(2, 7, 8).cuda()

    def same() -> None:
        torch.testing.assert_close(net(*args)["sample"], twin(*args)["sample"], rtol=1e-3, atol=1e-3)

    for _ in range(3):
        same()
    for times in (1, 2, -1):
        net.to("cpu")
        net.table = net.table.cpu()
        for each in (net, twin):
            each.conv_out.weight.mul_(times)
        assert acc.give_memory_back()
        # what is freed must not come back with the values that it had
        waste = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 10, 1 << 16, 1 << 20) * 8]
        del waste
        assert acc.fetch_weights() > 10 and {p.device.type for p in net.parameters()} == {"cuda"}
        net.table = net.table.cuda()
        for _ in range(2):
            same()
    served = acc.report.counter("replays") + acc.report.counter("eager_runs")
    assert acc.report.counter("captures") == 1 and served == 8


def test_a_plan_without_graphs_runs_again_too(card: Card) -> None:
    case = Case(card, Config(triton=False, cuda_graphs=False))
    case.to("cpu")
    assert case.acc.give_memory_back()
    case.to("cuda")
    case.same()
    assert case.counts("captures", "eager_runs") == [1, 2]


def test_no_plan_runs_while_the_memory_is_away(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(card)
    case.to("cpu")
    assert case.acc.give_memory_back()
    case.to("cuda")
    # as if the weights had been looked at before another thread gave the memory back
    monkeypatch.setattr(case.acc.arena, "sync", lambda: 0)
    case.same()
    assert "given back to the host" in case.words() and case.counts("replays") == [1]
    monkeypatch.undo()


def test_without_room_for_the_weights_the_original_runs(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(card)
    case.to("cpu")
    assert case.acc.give_memory_back()
    case.to("cuda")
    card.outside = card.capacity - card.used - 100
    with pytest.raises(WeightsAway, match="no memory left for the weights"):
        case.acc.arena.sync()
    assert card.refused == 1
    card.outside = 0
    with monkeypatch.context() as patch:
        failing(patch, Vacancy, "occupy", WeightsAway)
        case.same()
    assert case.counts("captures", "replays", "errors") == [1, 1, 0]
    case.same()
    assert case.counts("captures", "replays", "errors") == [1, 2, 0]


def test_release_and_move_to_while_the_memory_is_away(card: Card) -> None:
    case = Case(card)
    case.to("cpu")
    assert case.acc.give_memory_back()
    other = SmallNet().eval()
    case.twin = copy.deepcopy(other)
    assert case.acc.move_to(other, case.acc.hooks)
    case.net = other
    case.to("cuda")
    case.same()
    assert case.counts("captures", "replays") == [1, 2]
    case.to("cpu")
    assert case.acc.give_memory_back()
    case.acc.release()
    gc.collect()
    assert card.used == 0
    for (name, ours), (_, theirs) in zip(other.named_parameters(), case.twin.named_parameters()):
        assert ours.stride() == theirs.stride() and torch.equal(ours, theirs), name


def test_tensors_without_memory_share_what_they_are_of() -> None:
    made = [torch.ones(3, 4), torch.ones(5), torch.ones(2, 2, dtype=torch.int8), torch.ones(6)]
    weights = [new_weight(str(i), tensor, []) for i, tensor in enumerate(made)]
    blocks, _ = vacancies(weights, weights, OriginalLayouts())
    vacate(blocks)
    tensors = [weight.tensor for weight in weights]
    assert len({weight.tensor.data_ptr() for weight in weights}) == 2
    assert all(tensor.isnan().all() for tensor in tensors if tensor.is_floating_point()) and not tensors[2].any()
    # each comes back by itself
    for block in blocks:
        block.occupy(OriginalLayouts())
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [int(tensor.float().mean()) for tensor in tensors] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_a_tensor_without_memory_keeps_its_shape(dtype, shape):
    tensor = torch.zeros(shape).to(dtype)
    weight = new_weight("scale", tensor, [])
    ((block,), _) = vacancies([weight], [weight], OriginalLayouts())
    for step in (lambda: vacate([block]), lambda: block.occupy(OriginalLayouts())):
        step()
        assert weight.tensor.shape == shape and weight.tensor.dtype == dtype
        assert weight.tensor.data_ptr() == weight.pointer
