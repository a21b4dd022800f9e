"""Small transformers on a GPU: CUDA graphs, tables that stay on the CPU, masks whose lengths are read."""

from __future__ import annotations

import pytest
import torch
from small_net import no_gradients  # noqa: F401
from small_transformers import KINDS, inputs, transformer

from sfast_ext import Config, accelerate
from sfast_ext.tools.lib import transformers

pytestmark = pytest.mark.gpu
ON_GPU = Config(drop_slower=False)
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def pair(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    return transformer(kind, seed, dtype).cuda(), transformer(kind, seed, dtype).cuda()


def error(ours, theirs) -> float:
    a, b = transformers.result_of(ours).float(), transformers.result_of(theirs).float()
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graphs_give_what_the_model_gives(kind: str, dtype: torch.dtype) -> None:
    model, twin = pair(kind, dtype)
    accelerator = accelerate(model, ON_GPU)
    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            for size, tokens in (((8, 8), (5,)), ((8, 12), (5, 9)), ((8, 8), (5,))):
                accelerator.new_generation()
                for step in range(4):
                    args, kwargs = inputs(model, size, tokens, timestep=0.9 - 0.2 * step, seed=step)
                    assert error(model(*args, **kwargs), twin(*args, **kwargs)) < LIMITS[dtype]
    status = accelerator.report.as_dict()
    assert status["counters"]["captures"] == 2 and status["counters"]["replays"] >= 18, status
    assert status["last_error"] is None
    assert all(plan.has_graph for plan in accelerator.plans.values())
    accelerator.release()


def test_a_table_on_the_cpu_is_followed() -> None:
    model, twin = pair("lumina2")
    accelerator = accelerate(model, ON_GPU)
    accelerator.new_generation()
    for change in (lambda x: None, lambda x: x.mul_(0.5), lambda x: x.neg_(), lambda x: x[1:3].zero_()):
        with torch.inference_mode():
            for each in (model, twin):
                for table in each.rope_embedder.freqs_cis:
                    assert table.device.type == "cpu"
                    change(table)
        for step in range(3):
            args, kwargs = inputs(model, seed=step)
            assert error(model(*args, **kwargs), twin(*args, **kwargs)) < 2e-3
    assert accelerator.report.as_dict()["counters"]["captures"] == 1
    assert next(iter(accelerator.plans.values())).has_graph
    accelerator.release()


def test_a_mask_that_is_written_between_steps_is_read_anew() -> None:
    model, twin = pair("lumina2")
    accelerator = accelerate(model, ON_GPU)
    accelerator.new_generation()
    args, kwargs = inputs(model, tokens=(5, 9))
    mask = kwargs["encoder_attention_mask"]
    for lengths in ((5, 9), (7, 9), (5, 9), (9, 4)):
        with torch.inference_mode():
            mask.zero_()
            for row, n in enumerate(lengths):
                mask[row, :n] = 1
        for _ in range(3):
            assert error(model(*args, **kwargs), twin(*args, **kwargs)) < 2e-3
    accelerator.release()


@pytest.mark.parametrize("kind", KINDS)
def test_no_replay_reads_weights_of_before(kind: str) -> None:
    model, twin = pair(kind)
    accelerator = accelerate(model, ON_GPU)
    for seed in range(4):
        accelerator.new_generation()
        other = {name: value.cuda() for name, value in transformer(kind, seed).state_dict().items()}
        twin.load_state_dict(other)
        model.load_state_dict(other, assign=seed == 2)
        for step in range(3):
            args, kwargs = inputs(model, seed=step)
            assert error(model(*args, **kwargs), twin(*args, **kwargs)) < 2e-3
    assert accelerator.report.as_dict()["counters"]["captures"] == 1
    accelerator.release()
