"""Tensors that a forward reads and that are no attribute of a module: in lists, objects, closures and globals. A plan
reads their memory, and sees that one is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_net import CPU, close, counters, no_gradients  # noqa: F401
from torch import nn

from sfast_ext import accelerate

GLOBAL = torch.arange(4.0)


def table(scale: float = 1.0) -> torch.Tensor:
    return torch.arange(4.0) * scale + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Tables:
    """As a rotary embedding that is no module."""

    def __init__(self) -> None:
        self.held: Any = [table(), table(2)]

    def __call__(self, place: int) -> torch.Tensor:
        return self.held[place]


@dataclasses.dataclass
class Record:
    cosines: torch.Tensor
    sines: torch.Tensor


class InList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [table(), table(2)]

    def forward(self, x):
        return self.layer(x) * self.tables[1]


class InTuple(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = (table(), table(2))

    def forward(self, x):
        return self.layer(x) * self.tables[1]


class InDict(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = {"one": table(), "two": table(2)}

    def forward(self, x):
        return self.layer(x) * self.tables["two"]


class InObject(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Tables()

    def forward(self, x):
        return self.layer(x) * self.rope(1)


class InRecord(Model):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record(table(), table(2))

    def forward(self, x):
        return self.layer(x) * self.record.sines


class InNested(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = {"rotary": [Record(table(), table(2))]}

    def forward(self, x):
        return self.layer(x) * self.tables["rotary"][0].sines


class InGlobal(Model):
    def forward(self, x):
        return self.layer(x) * GLOBAL


HELD = [table(2)]


class InDefault(Model):
    def forward(self, x, held=HELD):
        return self.layer(x) * held[0]


def _closure() -> Any:
    held = [table(2)]

    class InClosure(Model):
        def forward(self, x):
            return self.layer(x) * held[0]

        def replace(self, new):
            held[0] = new

    return InClosure


InClosure = _closure()


class OnClass(Model):
    tables = [table(2)]

    def forward(self, x):
        return self.layer(x) * self.tables[0]


def _replace_global(model: nn.Module, new: torch.Tensor) -> None:
    globals()["GLOBAL"] = new


def _set(model: Any, new: torch.Tensor) -> None:
    model.tables = (model.tables[0], new)


KINDS: dict[str, tuple[Any, Callable[[Any], torch.Tensor], Callable[[Any, torch.Tensor], Any]]] = {
    "a list": (InList, lambda m: m.tables[1], lambda m, new: m.tables.__setitem__(1, new)),
    "another list": (InList, lambda m: m.tables[1], lambda m, new: setattr(m, "tables", [m.tables[0], new])),
    "a tuple": (InTuple, lambda m: m.tables[1], _set),
    "a dictionary": (InDict, lambda m: m.tables["two"], lambda m, new: m.tables.update(two=new)),
    "an object": (InObject, lambda m: m.rope.held[1], lambda m, new: m.rope.held.__setitem__(1, new)),
    "an object's other list": (InObject, lambda m: m.rope.held[1], lambda m, new: setattr(m.rope, "held", [new, new])),
    "a record": (InRecord, lambda m: m.record.sines, lambda m, new: setattr(m.record, "sines", new)),
    "nested": (InNested, lambda m: m.tables["rotary"][0].sines,
               lambda m, new: setattr(m.tables["rotary"][0], "sines", new)),
    "a global": (InGlobal, lambda m: GLOBAL, _replace_global),
    "a default": (InDefault, lambda m: type(m).forward.__defaults__[0][0],
                  lambda m, new: type(m).forward.__defaults__[0].__setitem__(0, new)),
    "a closure": (InClosure, lambda m: None, lambda m, new: m.replace(new)),
    "a class": (OnClass, lambda m: m.tables[0], lambda m, new: type(m).tables.__setitem__(0, new)),
}  # fmt: skip


def made(kind: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = KINDS[kind][0]().eval().requires_grad_(False)
    original = model.forward
    return model, original, accelerate(model, CPU)


def served(model: Any, original: Any, accelerator: Any, by_plan: bool = True) -> None:
    x = torch.randn(3, 4)
    before = counters(accelerator).get("eager_runs", 0)
    close(model(x), original(x))
    close(model(x), original(x))
    if by_plan:
        assert counters(accelerator).get("eager_runs", 0) > before, accelerator.report.as_dict()["reasons"]


@pytest.mark.parametrize("generations", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_read_and_another_one_is_seen(kind: str, generations: bool) -> None:
    model, original, accelerator = made(kind)
    if generations:
        accelerator.new_generation()
    served(model, original, accelerator)
    KINDS[kind][2](model, table(5))
    served(model, original, accelerator)
    KINDS[kind][2](model, table(7))
    if generations:
        accelerator.new_generation()
    served(model, original, accelerator, by_plan=False)
    accelerator.release()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a closure"])
def test_what_is_written_to_a_table_is_seen_at_once(kind: str) -> None:
    model, original, accelerator = made(kind)
    accelerator.new_generation()
    served(model, original, accelerator)
    held = KINDS[kind][1](model)
    for write in (
        lambda: held.add_(3),
        lambda: held[1:3].zero_(),
        lambda: held.copy_(table(-1)),
        lambda: setattr(held, "data", table(9)),
        lambda: held.data.mul_(2),
    ):
        with torch.inference_mode():
            write()
        x = torch.randn(3, 4)
        close(model(x), original(x))
    assert counters(accelerator)["captures"] == 1
    accelerator.release()


def test_a_table_that_grew_is_seen() -> None:
    model, original, accelerator = made("a list")
    accelerator.new_generation()
    served(model, original, accelerator)
    model.tables[1].data = torch.ones(1)
    served(model, original, accelerator, by_plan=False)


def test_a_table_that_is_gone_raises_what_the_original_raises() -> None:
    model, original, accelerator = made("a dictionary")
    served(model, original, accelerator)
    del model.tables["two"]
    with pytest.raises(KeyError, match="two"):
        model(torch.randn(3, 4))


def test_a_table_of_complex_numbers_is_read() -> None:
    class Rotary(Model):
        def __init__(self) -> None:
            super().__init__()
            self.angles = [torch.polar(torch.ones(2), torch.arange(2.0))]

        def forward(self, x):
            pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * self.angles[0]).flatten(-2)

    model = Rotary().eval().requires_grad_(False)
    original = model.forward
    accelerator = accelerate(model, CPU)
    served(model, original, accelerator)
    model.angles[0].mul_(1j)
    served(model, original, accelerator)
    assert counters(accelerator)["captures"] == 1


def test_a_table_that_is_filled_at_the_first_use_is_read() -> None:
    class Lazy(InObject):
        def __init__(self) -> None:
            super().__init__()
            self.rope.held = None

        def forward(self, x):
            if self.rope.held is None:
                self.rope.held = [table(), table(2)]
            return super().forward(x)

    model = Lazy().eval().requires_grad_(False)
    original = model.forward
    accelerator = accelerate(model, CPU)
    for _ in range(4):
        served(model, original, accelerator, by_plan=False)
    assert counters(accelerator)["captures"] == 1 and counters(accelerator)["eager_runs"] >= 5


def test_a_table_made_in_inference_mode_is_read() -> None:
    with torch.inference_mode():
        model = InList()
    model.eval().requires_grad_(False)
    original = model.forward
    accelerator = accelerate(model, CPU)
    for _ in range(2):
        with torch.inference_mode():
            served(model, original, accelerator)
            model.tables[1].add_(1)
    assert counters(accelerator)["captures"] == 1


def test_a_forward_that_writes_to_a_table_is_refused() -> None:
    class Counts(InList):
        def forward(self, x):
            self.tables[0].add_(1)
            return super().forward(x) + self.tables[0]

    model = Counts().eval().requires_grad_(False)
    twin = Counts().eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    accelerator = accelerate(model, CPU)
    for _ in range(4):
        x = torch.randn(3, 4)
        close(model(x), twin(x))
    assert "captures" not in counters(accelerator)


def test_a_forward_that_reads_a_number_of_a_table_is_refused() -> None:
    class Number(InList):
        def forward(self, x):
            return super().forward(x) * float(self.tables[0][2])

    model = Number().eval().requires_grad_(False)
    original = model.forward
    accelerator = accelerate(model, CPU)
    served(model, original, accelerator, by_plan=False)
    assert "captures" not in counters(accelerator)
    model.tables[0].add_(1)
    served(model, original, accelerator, by_plan=False)


def test_equal_blocks_keep_tables_apart() -> None:
    class Block(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.tables = [table(scale)]
            self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])

        def forward(self, x):
            return self.layers(x) * self.tables[0]

    model = nn.Sequential(Block(1), Block(2), Block(3)).eval().requires_grad_(False)
    original = model.forward
    served(model, original, accelerate(model, CPU))


def test_no_table_is_kept_after_release() -> None:
    model, original, accelerator = made("a list")
    served(model, original, accelerator)
    assert accelerator.arena._tracked.tables
    accelerator.release()
    assert not accelerator.arena._tracked.tables


def test_memory_of_tables_is_not_given_back() -> None:
    model, original, accelerator = made("a list")
    served(model, original, accelerator)
    weights = [weight for plan in accelerator.plans.values() for weight in plan.weights]
    given, _ = accelerator.arena.vacancies(weights)
    held = {member.weight.path for vacancy in given for member in vacancy.members}
    assert not any("table" in path for path in held)
