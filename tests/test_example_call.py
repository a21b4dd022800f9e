"""Inputs at another size have the tree, the types and the modes of the recorded call."""

from __future__ import annotations

import pytest
import torch

from sfast_ext.call_signature import flatten_call
from sfast_ext.example_call import ExampleCall, UnknownInput

CPU = torch.device("cpu")
HALF = torch.float16


def signature(*args, **kwargs):
    return flatten_call(args, kwargs, CPU).signature


def latent(rows=2, height=64, width=64):
    return torch.zeros(rows, 4, height, width, dtype=HALF)


def test_sizes_and_rows_are_exchanged_and_all_else_is_kept():
    added = {"text_embeds": torch.zeros(2, 1280), "time_ids": torch.zeros(2, 6, dtype=torch.int64)}
    prompt = torch.zeros(2, 77, 64)
    recorded = signature(
        latent(), torch.tensor(3), encoder_hidden_states=prompt, timestep_cond=None, added=added, flag=True
    )
    args, kwargs = ExampleCall(recorded).inputs(96, 128, 6, CPU)
    added = {"text_embeds": torch.zeros(6, 1280), "time_ids": torch.zeros(6, 6, dtype=torch.int64)}
    assert flatten_call(args, kwargs, CPU).signature == signature(
        latent(6, 96, 128),
        torch.tensor(3),
        encoder_hidden_states=torch.zeros(6, 77, 64),
        timestep_cond=None,
        added=added,
        flag=True,
    )


def test_the_length_of_the_prompt_and_of_its_mask_is_exchanged():
    def call(rows, tokens):
        prompt, mask = torch.zeros(rows, tokens, 64), torch.ones(rows, tokens, dtype=torch.int64)
        # those of an IP-Adapter's image, and the pooled prompt, have no length that follows
        others = [torch.zeros(rows, 4, 64), torch.zeros(rows, 1280)]
        return (latent(rows), torch.tensor(3), prompt, mask, others)

    recorded = ExampleCall(signature(*call(2, 77)))
    assert recorded.tokens == 77
    args, _ = recorded.inputs(64, 64, 1, CPU, tokens=154)
    assert flatten_call(args, {}, CPU).signature == signature(*call(1, 154))
    assert ExampleCall(signature(latent())).tokens is None


@pytest.mark.parametrize("dims", [(0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0), (0, 1, 3, 2)])
def test_the_memory_format_of_an_input_is_kept(dims):
    def formatted(x):
        return x.permute(dims).contiguous().permute([dims.index(d) for d in range(4)])

    recorded = signature(formatted(latent()), torch.tensor(3), mask=latent())
    args, kwargs = ExampleCall(recorded).inputs(96, 128, 6, CPU)
    assert args[0].stride() == formatted(latent(6, 96, 128)).stride()
    assert flatten_call(args, kwargs, CPU).signature == signature(
        formatted(latent(6, 96, 128)), torch.tensor(3), mask=latent(6, 96, 128)
    )


def test_the_recorded_size_gives_the_recorded_call():
    recorded = signature(latent(2, 65, 33), 7, torch.zeros(2, 77, 64), 0.5)
    call = ExampleCall(recorded)
    assert (call.rows, call.height, call.width) == (2, 65, 33)
    args, kwargs = call.inputs(65, 33, 2, CPU)
    assert flatten_call(args, kwargs, CPU).signature == recorded
    assert type(args[1]) is int and type(args[3]) is float and kwargs == {}


@pytest.mark.parametrize("level", range(5))
def test_feature_maps_of_a_controlnet_follow(level):
    def maps(rows, height, width):
        side = [-(-each // 2**level) for each in (height, width)]
        return [torch.zeros(rows, 320, *side), torch.zeros(1, 320, *side)]

    args, _ = ExampleCall(signature(latent(2, 65, 33), maps(2, 65, 33))).inputs(97, 50, 4, CPU)
    assert [each.shape for each in args[1]] == [each.shape for each in maps(4, 97, 50)]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"odd": torch.zeros(2, 3, 7, 7)}, "odd"),
        ({"odd": [torch.zeros(154, 64)]}, r"odd\[0\]"),
        ({"odd": {"inner": torch.zeros(3)}}, "odd.inner"),
    ],
)
def test_what_does_not_follow_is_refused_by_name(more, named):
    with pytest.raises(UnknownInput, match=named):
        ExampleCall(signature(latent(), **more)).inputs(96, 96, 2, CPU)


def test_a_call_without_a_latent_is_refused():
    with pytest.raises(UnknownInput, match="latent"):
        ExampleCall(signature(torch.zeros(2, 320, 64, 64), torch.zeros(2, 77, 64)))


def test_torch_s_random_state_is_left_alone_and_values_are_no_constants():
    before = torch.get_rng_state()
    args, _ = ExampleCall(signature(latent())).inputs(64, 64, 2, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert args[0].dtype is HALF and float(args[0].float().std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_is_called_under_the_recorded_modes(dtype):
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        recorded = signature(latent())
    call = ExampleCall(recorded)
    # whatever the thread that asks is at
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None), call.surroundings():
        assert not torch.is_grad_enabled()
        assert flatten_call((latent(),), {}, CPU).signature == recorded
