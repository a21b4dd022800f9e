from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sfast_ext.capture import slice_writes

X = torch.arange(48.0).reshape(4, 6, 2)


def joined(forward: Callable[[Tensor], Any]) -> tuple[torch.fx.GraphModule, int]:
    gm = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(X)
    count = slice_writes.join(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, count


def ops(gm: torch.fx.GraphModule) -> list[str]:
    return [node.target._schema.name.split("::")[1] for node in gm.graph.nodes if node.op == "call_function"]


def by_dimension(x: Tensor, dim: int, step: int, make: Callable[..., Tensor] = torch.zeros_like) -> Tensor:
    out = make(x)
    for at in range(0, x.shape[dim], step):
        part = (*[slice(None)] * dim, slice(at, at + step))
        out[part] = x[part].sin()
    return out + 1


def backwards(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[2:] = x[2:].sin()
    out[:2] = x[:2].cos()
    return out * 2


def in_another_dtype(x: Tensor) -> Tensor:
    out = torch.zeros(4, 6, 2, dtype=torch.float64)
    out[:2] = x[:2]
    out[2:] = x[2:]
    return out * 2


def seen_through_views(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :3] = x[:, :3].sin()
    out[:, 3:] = x[:, 3:].cos()
    return out[:, 1:4].reshape(4, -1) * out.sum()


def broadcast(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2] = x[0]
    out[2:] = x[1]
    return out


def blocks(x: Tensor, *steps: int) -> Tensor:
    """The slices of SD.Next's dynamic attention: along the first dimension, of these along the second, and so on."""
    out = torch.zeros_like(x)
    for corner in itertools.product(*(range(0, n, step) for n, step in zip(x.shape, steps))):
        part = tuple(slice(at, at + step) for at, step in zip(corner, steps))
        out[part] = x[part].sin() * (1 + sum(corner))
    return out + 1


def uneven_blocks(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[2:, 4:] = x[2:, 4:]
    out[:2] = x[:2].sin()
    out[2:, :4] = x[2:, :4].cos()
    return out * 2


JOINED: dict[str, Callable[[Tensor], Any]] = {
    "the first dimension": lambda x: by_dimension(x, 0, 2),
    "the second, one left": lambda x: by_dimension(x, 1, 4),
    "into memory as it comes": lambda x: by_dimension(x, 1, 3, torch.empty_like),
    "backwards": backwards,
    "another dtype": in_another_dtype,
    "seen through views": seen_through_views,
    "broadcast": broadcast,
}


@pytest.mark.parametrize("what", JOINED)
def test_becomes_a_concatenation(what: str) -> None:
    becomes(JOINED[what], concatenations=1)


def becomes(forward: Callable[[Tensor], Any], concatenations: int) -> None:
    gm, count = joined(forward)
    assert count == 1
    assert not {"copy_", "zeros_like", "zeros", "empty_like"} & set(ops(gm))
    assert ops(gm).count("cat") == concatenations
    torch.testing.assert_close(gm(X), forward(X))


@pytest.mark.parametrize(
    ("steps", "concatenations"),
    [((2, 3), 3), ((1, 2), 5), ((4, 3), 1), ((2, 3, 1), 7), ((3, 4), 3)],
    ids=["halves of halves", "thirds of quarters", "the second alone", "three dimensions", "what is left over"],
)
def test_slices_of_slices_become_concatenations_of_concatenations(steps: tuple[int, ...], concatenations: int) -> None:
    becomes(lambda x: blocks(x, *steps), concatenations)


def test_only_some_slices_are_sliced_again() -> None:
    becomes(uneven_blocks, concatenations=2)


def a_gap(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :2] = x[:, :2]
    out[:, 3:] = x[:, 3:]
    return out


def over_each_other(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :4] = x[:, :4]
    out[:, 2:] = x[:, 2:].sin()
    return out


def read_in_between(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2] = x[:2]
    before = out.sum()
    out[2:] = x[2:]
    return out + before


def a_view_from_before(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    view = out[:3]
    out[:2] = x[:2]
    out[2:] = x[2:]
    return view * 2


def what_was_written_changes(x: Tensor) -> Tensor:
    out, y = torch.zeros_like(x), x[:2].sin()
    out[:2] = y
    y.add_(1)
    out[2:] = y
    return out


def added_to_afterwards(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2] = x[:2]
    out[2:] = x[2:]
    out[1:].add_(1)
    return out


def corners(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2, :3] = x[:2, :3]
    out[2:, 3:] = x[2:, 3:]
    return out


def every_second(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[::2] = x[::2]
    out[1::2] = x[1::2]
    return out


def an_argument(x: Tensor) -> Tensor:
    x[:2] = x[2:].sin()
    x[2:] = x[:2].cos()
    return x + 1


def a_block_missing(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2, :3] = x[:2, :3]
    out[:2, 3:] = x[:2, 3:]
    out[2:, :3] = x[2:, :3]
    return out


def a_block_twice(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:2] = x[:2]
    out[2:, :3] = x[2:, :3]
    out[2:, 3:] = x[2:, 3:]
    out[:2, 3:] = x[:2, 3:].sin()
    return out


def pinwheel(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:3, :2] = x[:3, :2]
    out[3:, :4] = x[3:, :4]
    out[1:, 4:] = x[1:, 4:]
    out[:1, 2:] = x[:1, 2:]
    out[1:3, 2:4] = x[1:3, 2:4]
    return out


LEFT = [
    a_gap, over_each_other, read_in_between, a_view_from_before, what_was_written_changes, added_to_afterwards,
    corners, a_block_missing, a_block_twice, pinwheel, every_second, an_argument,
]  # fmt: skip


@pytest.mark.parametrize("forward", LEFT)
def test_left_alone(forward: Callable[[Tensor], Any]) -> None:
    gm, count = joined(forward)
    assert count == 0
    torch.testing.assert_close(gm(X.clone()), forward(X.clone()))
