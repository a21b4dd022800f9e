from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.timestep_embedding import timestep_embedding

from .support import Traced

T = torch.tensor([981, 3])
FREQUENCY = torch.rand(1, 5, generator=torch.Generator().manual_seed(0))


def embedded(t: Tensor, sine_first: bool = True, exchanged: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    angle = t[:, None].float() * FREQUENCY
    parts = [angle.sin(), angle.cos()]
    y = torch.cat(parts if sine_first else parts[::-1], dim=-1)
    if exchanged:
        y = torch.cat([y[:, 5:], y[:, :5]], dim=-1)
    return y if dtype is None else y.to(dtype)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("sine_first", [False, True])
@pytest.mark.parametrize("t", [T, T.float() + 0.5, T.half()], ids=["int64", "float32", "float16"])
def test_one_kernel(t: Tensor, sine_first: bool, exchanged: bool, dtype: torch.dtype | None) -> None:
    traced = Traced(lambda t: embedded(t, sine_first, exchanged, dtype) * 2, t)
    assert traced.rewrite(cleanup, timestep_embedding) == 1
    left = traced.ops()
    assert left["timestep_embedding"] == 1
    assert not any(left[name] for name in ("sin", "cos", "cat", "slice", "to", "_to_copy"))
    kernel = traced.find("timestep_embedding")[0]
    assert kernel.kwargs == {"sine_first": sine_first != exchanged, "out_dtype": dtype or torch.float32}
    assert traced.error() < 1e-6


def test_without_triton(with_nvrtc: None) -> None:
    traced = Traced(lambda t: embedded(t), T)
    traced.ctx.triton = False
    assert traced.rewrite(cleanup, timestep_embedding) == 1


def test_the_order_of_the_factors_does_not_matter() -> None:
    def forward(t: Tensor) -> Tensor:
        angle = FREQUENCY * t[:, None]
        return torch.cat([angle.cos(), angle.sin()], 1)

    traced = Traced(forward, T.float())
    assert traced.rewrite(timestep_embedding) == 1
    assert traced.error() < 1e-6


def test_timesteps_that_are_rounded_first_stay_rounded() -> None:
    """A product of float16 and float32 is one in float32, of what is left of the timestep."""

    def forward(t: Tensor) -> Tensor:
        angle = t[:, None].to(torch.float16) * FREQUENCY
        return torch.cat([angle.sin(), angle.cos()], -1)

    traced = Traced(forward, torch.tensor([981.37, 3.0001]))
    assert traced.rewrite(timestep_embedding) == 1
    assert traced.error() < 1e-6


def one_half_alone(t: Tensor) -> Any:
    y = embedded(t)
    return torch.cat([y[:, 5:], y[:, 5:]], -1)


def parts_of_other_sizes(t: Tensor) -> Any:
    y = embedded(t)
    return torch.cat([y[:, 4:], y[:, :4]], -1)


def used_before_the_exchange(t: Tensor) -> Any:
    y = embedded(t)
    return torch.cat([y[:, 5:], y[:, :5]], -1), y + 1


@pytest.mark.parametrize("forward", [one_half_alone, parts_of_other_sizes, used_before_the_exchange])
def test_another_exchange_stays(forward: Any) -> None:
    traced = Traced(forward, T)
    assert traced.rewrite(timestep_embedding) == 1
    assert traced.ops()["slice"] >= 2
    assert traced.error() < 1e-6


def sine_twice(t: Tensor) -> Any:
    angle = t[:, None].float() * FREQUENCY
    return torch.cat([angle.sin(), angle.sin()], -1)


def two_angles(t: Tensor) -> Any:
    return torch.cat([(t[:, None].float() * FREQUENCY).sin(), (t[:, None].float() * FREQUENCY).cos()], -1)


def below_each_other(t: Tensor) -> Any:
    angle = t[:, None].float() * FREQUENCY
    return torch.cat([angle.sin(), angle.cos()], 0)


def no_column(t: Tensor) -> Any:
    angle = (t[:, None] * torch.ones(2, 5)).float() * FREQUENCY
    return torch.cat([angle.sin(), angle.cos()], -1)


def three_parts(t: Tensor) -> Any:
    angle = t[:, None].float() * FREQUENCY
    return torch.cat([angle.sin(), angle.cos(), angle], -1)


def in_double(t: Tensor) -> Any:
    angle = t[:, None].double() * FREQUENCY.double()
    return torch.cat([angle.sin(), angle.cos()], -1)


def frequencies_in_half(t: Tensor) -> Any:
    angle = t[:, None].float() * FREQUENCY.half()
    return torch.cat([angle.sin(), angle.cos()], -1)


def in_half(t: Tensor) -> Any:
    angle = t[:, None].half() * FREQUENCY.half()
    return torch.cat([angle.sin(), angle.cos()], -1)


def timesteps_of_a_dtype_not_served(t: Tensor) -> Any:
    angle = t[:, None].to(torch.int16) * FREQUENCY
    return torch.cat([angle.sin(), angle.cos()], -1)


def written(t: Tensor) -> Any:
    angle = t[:, None].float() * FREQUENCY
    y = torch.cat([angle.sin(), angle.cos()], -1)
    y[:, 0].zero_()
    return y


LEFT_ALONE = [
    sine_twice, two_angles, below_each_other, no_column, three_parts, in_double, in_half, frequencies_in_half,
    timesteps_of_a_dtype_not_served, written,
]  # fmt: skip


@pytest.mark.parametrize("forward", LEFT_ALONE)
def test_left_alone(forward: Any) -> None:
    traced = Traced(forward, T)
    before = traced.ops()
    if forward is written:
        for node in traced.graph.nodes:
            if node.op == "call_function" and "cat" in str(node.target):
                node.meta["mutated"] = True
    assert traced.rewrite(timestep_embedding) == 0
    assert traced.ops() == before
