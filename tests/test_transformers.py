"""Transformers of diffusers: right within rounding, and served by plans, at several sizes, prompts and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_net import no_gradients  # noqa: F401
from small_transformers import KINDS, inputs, transformer

from sfast_ext import Config, accelerate

CPU = Config(allow_cpu=True, drop_slower=False)
CALLS = (((8, 8), (5,)), ((8, 12), (5, 9)), ((8, 8), (5,)))
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def results(found: Any) -> list[torch.Tensor]:
    """The tensors of a result: of a tuple, of diffusers' output, of a list of images."""
    found = found[0] if isinstance(found, tuple) else found.sample
    return list(found) if isinstance(found, list) else [found]


def error(ours: Any, theirs: Any) -> float:
    pairs = list(zip(results(ours), results(theirs), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() for a, b in pairs)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


@pytest.mark.long(but=[1, 2, 3, 5])
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), (KINDS[0], torch.bfloat16)], ids=str
)
def test_it_runs_on_plans_and_gives_the_same(kind: str, dtype: torch.dtype) -> None:
    model, twin = transformer(kind, dtype=dtype), transformer(kind, dtype=dtype)
    accelerator = accelerate(model, CPU)
    for size, tokens in CALLS:
        for step in range(3):
            args, kwargs = inputs(model, size, tokens, timestep=0.9 - 0.3 * step, seed=step)
            assert error(model(*args, **kwargs), twin(*args, **kwargs)) < LIMITS[dtype]
    status = accelerator.report.as_dict()
    assert status["counters"]["captures"] == len(set(CALLS)) and status["last_error"] is None
    # the first call fills the tables of rotary embeddings, or shows what is read of a mask
    assert status["counters"]["eager_runs"] >= 3 * len(CALLS) - len(set(CALLS)) - 1
    accelerator.release()


@pytest.mark.long(but=[2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_gets_the_class_that_it_asks_for(kind: str) -> None:
    model, twin = transformer(kind), transformer(kind)
    accelerator = accelerate(model, CPU)
    args, kwargs = inputs(model)
    for return_dict in (True, False, True, False):
        kwargs["return_dict"] = return_dict
        for _ in range(3):
            ours, theirs = model(*args, **kwargs), twin(*args, **kwargs)
            assert type(ours) is type(theirs) and error(ours, theirs) < 1e-5
    assert accelerator.report.as_dict()["counters"]["captures"] == 2
    accelerator.release()


@pytest.mark.long(but=[1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_outlives_the_weights(kind: str) -> None:
    model, twin = transformer(kind), transformer(kind)
    accelerator = accelerate(model, CPU)
    for seed in range(3):
        other = transformer(kind, seed).state_dict()
        twin.load_state_dict(other)
        if seed == 1:
            model.load_state_dict(other, assign=True)
        else:
            model.load_state_dict(other)
        for step in range(3):
            args, kwargs = inputs(model, seed=step)
            assert error(model(*args, **kwargs), twin(*args, **kwargs)) < 1e-5
    assert accelerator.report.as_dict()["counters"]["captures"] == 1
    accelerator.release()
