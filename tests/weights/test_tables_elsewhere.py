"""Tables on another device than the model's: each run copies them, as the forward does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sfast_ext.capture import capture as capture_module
from sfast_ext.weights import tables
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.weight import new_weight

aten: Any = torch.ops.aten


def test_a_table_on_another_device_is_copied() -> None:
    source = torch.arange(6.0)
    found = tables.copied_table(new_weight("a table", source, []), torch.device("cpu"))
    assert found is not None and found.source is source and found.tensor.data_ptr() != source.data_ptr()
    large = torch.empty(tables.MAX_COPIED // 4 + 1)
    assert tables.copied_table(new_weight("a table", large, []), torch.device("cpu")) is None


CUDA = torch.device("cuda", 0)


def graph_of(*targets: Any, device: torch.device = CUDA) -> tuple[fx.GraphModule, fx.Node]:
    """A graph that reads a table by these operators, whose results are on a device."""
    mode, graph = FakeTensorMode(), fx.Graph()
    node = graph.get_attr("table")
    users = [graph.call_function(target, (node, device)) for target in targets]
    for user in users:
        user.meta["val"] = FakeTensor(mode, torch.empty(4, device="meta"), device)
    graph.output(users)
    root = nn.Module()
    root.register_buffer("table", torch.ones(4))
    return fx.GraphModule(root, graph), node


@pytest.mark.parametrize(
    ("targets", "device", "copied"),
    [
        ([aten.to.device], CUDA, True),
        ([aten.to.device, aten._to_copy.default], CUDA, True),
        ([aten.to.dtype_layout], CUDA, True),
        ([aten.to.device, aten.add.Tensor], CUDA, False),
        ([aten.mul.Tensor], CUDA, False),
        ([aten.to.device], torch.device("cpu"), False),
        ([aten.to.device], torch.device("cuda", 1), False),
    ],
)
def test_a_table_in_system_memory_is_copied_where_the_forward_moves_it(
    monkeypatch: pytest.MonkeyPatch, targets: list[Any], device: torch.device, copied: bool
) -> None:
    _, node = graph_of(*targets, device=device)
    arena, source = WeightArena(nn.Linear(1, 1)), torch.ones(4)
    monkeypatch.setattr(arena, "table_on", lambda found, to: (found, to))
    weight = new_weight("a table", source, [])
    expected = (weight, CUDA) if copied else None
    assert capture_module._copied_table(node, weight, arena, CUDA) == expected


def test_one_copy_serves_all_plans() -> None:
    arena, source = WeightArena(nn.Linear(1, 1)), torch.arange(6.0)
    arena.is_table = lambda tensor: tensor is source
    table = arena.locate(source)
    assert table is not None and arena.holds_table(table) and arena.locate(source) is table
    assert arena.locate(source.clone()) is None
    copy = arena.table_on(table, torch.device("cpu"))
    assert copy is not None and arena.table_on(table, torch.device("cpu")) is copy
