"""Plans whose half-precision weights are in system memory are compared with the original without moving them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended_card import Card
from torch import nn
from torch.nn import functional as F

from sfast_ext import accelerate
from sfast_ext.runtime.eight_bits import SECOND_LOOK
from sfast_ext.runtime.plan_runner import PlanRunner
from sfast_ext.weights.streamed import Streamed

from .eight_bits import HALF, Net, On, changed, net
from .test_resident import CARD, away, card, halves, kernels, started  # noqa: F401


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The original's results that plans were compared with, after they were made."""
    found: list[torch.Tensor] = []
    real = PlanRunner._compared

    def kept(self: PlanRunner, *given: Any) -> Any:
        found.append(real(self, *given))
        return found[-1]

    monkeypatch.setattr(PlanRunner, "_compared", kept)
    return found


def quiet(on: On, card: Card, graphs: int = 1) -> None:  # noqa: F811
    """Nothing moved, and no CUDA graph was given up."""
    assert away(on) == len(halves(on.ours)) and on.count("weights_brought_back") == 0
    assert on.plan.has_graph and on.count("graph_captures") == graphs and on.count("evictions") == 0
    assert on.count("errors") == 0 and "come back" not in on.words(), on.words()


def test_the_second_look_moves_no_weights(
    card: Card, compared: list[Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    on = started(calls=SECOND_LOOK + 1)
    read: list[int] = []
    real = Streamed._on_gpu

    def counted(self: Streamed, x: torch.Tensor) -> torch.Tensor:
        read.append(id(x))
        return real(self, x)

    monkeypatch.setattr(Streamed, "_on_gpu", counted)
    assert not compared
    errors = [on.error() for _ in range(3)]
    # the original's own result is that of the call
    assert len(compared) == 1 and min(errors) < 0.01 and max(errors) < 0.05
    assert len(read) == len(halves(on.ours))
    quiet(on, card)


@pytest.mark.long(but=[1, 3])
@pytest.mark.parametrize("how", ["in place", "data", "rows", "object"])
def test_other_weights_are_compared_once_and_stay_away(card: Card, compared: list[Any], how: str) -> None:  # noqa: F811
    on = started(calls=SECOND_LOOK + 4)
    compared.clear()
    on.both(changed(how, -1.6))
    on.acc.new_generation()
    assert on.error() < 0.01
    assert all(on.error() < 0.06 for _ in range(4)) and len(compared) == 1
    quiet(on, card)


def test_each_call_is_compared_where_that_is_asked_for(card: Card, compared: list[Any]) -> None:  # noqa: F811
    on = started(replace(CARD, check="always"))
    before = len(compared)
    assert all(on.error() < 0.01 for _ in range(4)) and len(compared) == before + 4
    quiet(on, card)


def reads_device(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Moves its input to where it believes the weight to be."""
    return F.linear(x.to(self.weight.device), self.weight, self.bias)


def out_of_memory(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.weight.device.type == "cpu":
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    return F.linear(x, self.weight, self.bias)


def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.weight.device.type == "cpu":
        self.weight.mul_(1.0)
    return F.linear(x, self.weight, self.bias)


@pytest.mark.long(but=[0, 2])
@pytest.mark.parametrize("forward", [reads_device, out_of_memory, writes])
def test_what_cannot_be_run_so_gets_its_weights_back(
    card: Card, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any], compared: list[Any]  # noqa: F811
) -> None:
    on = started(calls=SECOND_LOOK + 1)
    layer = on.ours.blocks[0].ff_out
    real = nn.Linear.forward
    # of a class, so that the behaviour of the model is as it was
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (forward if self is layer else real)(self, x))
    on.plan.compare_again = True
    errors = [on.error() for _ in range(4)]
    assert max(errors) < 0.05 and on.count("errors") == 0, on.words()
    assert away(on) in (0, len(halves(on.ours)))


class OfList(Net):
    """Takes its input out of a list."""

    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(x.pop())


def test_a_comparison_that_fails_leaves_lists_as_they_were(
    card: Card, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr("runtime.eight_bits.Net", OfList)
    ours = net().to("cuda")
    acc = accelerate(ours, CARD)
    for _ in range(SECOND_LOOK + 1):
        ours([torch.randn(2, 128, 8).to(HALF).to("cuda")])
    (plan,) = acc.plans.values()
    assert plan.resident and plan.edits
    real = Streamed._on_gpu

    def fails(self: Streamed, x: torch.Tensor) -> torch.Tensor:
        if max(x.shape) == 8 * min(x.shape):
            raise RuntimeError("Expected all tensors to be on the same device")
        return real(self, x)

    monkeypatch.setattr(Streamed, "_on_gpu", fails)
    plan.compare_again = True
    given = [torch.randn(2, 128, 8).to(HALF).to("cuda")]
    assert ours(given).shape == (2, 128, 8) and given == []
    assert acc.report.counter("weights_brought_back") == 1 and acc.report.counter("errors") == 0
    acc.release()


def test_a_plan_that_is_wrong_is_found_so(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    on = started(calls=SECOND_LOOK)
    monkeypatch.setattr(PlanRunner, "outputs", lambda self, plan, call, real=PlanRunner.outputs: [
        2 * x for x in real(self, plan, call)
    ])  # fmt: skip
    on.plan.compare_again = True
    assert on.error() < 0.01
    assert on.count("weights_brought_back") == 0
    monkeypatch.undo()


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": F.linear,
    "a product with a part": lambda x, w: x[:, :16] @ w[:, 4:20].T,
    "a row": lambda x, w: x * w[5],
    "rows by an index": lambda x, w: x @ w[torch.arange(0, 32, 2)].T,
    "another type": lambda x, w: x.double() @ w.double().T,
    "the weight alone": lambda x, w: x * w.abs().sum(),
    "a value": lambda x, w: x * float(w[0, 0]),
    "stacked": lambda x, w: x @ torch.stack([w, 2 * w]).transpose(1, 2),
    "a norm of it": lambda x, w: F.linear(x, w / torch.linalg.vector_norm(w, dim=1, keepdim=True)),
    "a convolution": lambda x, w: F.conv1d(x[:, :, None], w[:, :, None]),
    "under inference mode": lambda x, w: _inferred(x, w),
    "expanded": lambda x, w: torch.bmm(x[None].expand(3, -1, -1), w.T.expand(3, -1, -1)),
}


def _inferred(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return F.linear(x, w).clone()


@pytest.mark.parametrize("form", FORMS)
def test_operations_read_weights_of_system_memory(card: Card, form: str) -> None:  # noqa: F811
    weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
    x = torch.randn(7, 32)
    wanted, there = FORMS[form](x, weight), x.to("cuda")
    before = weight._version
    with Streamed([weight.detach()], torch.device("cuda", 0)):
        found = FORMS[form](there, weight)
    assert found.device.type == "cuda" and torch.equal(found.cpu(), wanted)
    assert weight.device.type == "cpu" and weight._version == before


def test_others_are_left_alone(card: Card) -> None:  # noqa: F811
    weight, other = torch.randn(8, 8), torch.randn(8, 8)
    with Streamed([weight], torch.device("cuda", 0)):
        assert (other @ other).device.type == "cpu"
        with pytest.raises(RuntimeError):
            torch.randn(3, 8).to("cuda") @ other
        with pytest.raises(Exception, match="add_"):
            weight.add_(1)
    assert torch.equal(weight, weight.clone())


def test_a_network_as_a_whole(card: Card) -> None:  # noqa: F811
    ours: Net = net()
    x = torch.randn(2, 16, 8).to(torch.bfloat16)
    wanted = ours(x)
    held = [p.detach() for p in ours.parameters()]
    with Streamed(held, torch.device("cuda", 0)):
        found = ours(x.to("cuda"))
    assert torch.equal(found.cpu(), wanted) and not any(p.is_cuda for p in ours.parameters())
