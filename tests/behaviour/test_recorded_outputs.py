"""The hooks that transformers leaves on layers to record hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("transformers.utils.output_capturing", reason="hidden states are recorded by hooks since 5")
import transformers

from sfast_ext import Config, accelerate
from sfast_ext.behaviour.recorded_outputs import collects, inside_collectors, written_there
from sfast_ext.report import Report
from sfast_ext.tools.lib import models

IDS = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(1))
HIDDEN = {"output_hidden_states": True}


def model(kind: str = "CLIPTextModelWithProjection") -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, bos_token_id=0, eos_token_id=59,
    )  # fmt: skip
    return models.randomise(getattr(transformers, kind)(config), 1).eval().requires_grad_(False)


def played(root: nn.Module, whole: Any, **options: Any) -> Report:
    report = Report()
    accelerator = accelerate(root, Config(allow_cpu=True), report=report)
    expected = model(type(whole).__name__)
    with torch.no_grad():
        for _ in range(5):
            found, other = whole(IDS, **options), expected(IDS, **options)
            for one, two in zip(found.hidden_states or (), other.hidden_states or (), strict=True):
                assert torch.allclose(one, two, atol=1e-5)
            assert torch.allclose(found.last_hidden_state, other.last_hidden_state, atol=1e-5)
    accelerator.release()
    return report


@pytest.mark.parametrize("kind", ["CLIPTextModelWithProjection", "CLIPTextModel"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_forward_that_makes_the_list_is_captured_with_its_hooks(kind, asked_before):
    whole = model(kind)
    if asked_before:
        whole(IDS, **HIDDEN)
    assert played(whole, whole, **HIDDEN).counter("eager_runs") >= 3


def test_the_text_model_inside_is_captured_as_well():
    whole = model()
    whole(IDS, **HIDDEN)
    assert played(whole.text_model, whole, **HIDDEN).counter("eager_runs") == 4


@pytest.mark.parametrize("inside", ["encoder", "encoder.layers.0", "encoder.layers.1"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_what_is_inside_of_that_forward_runs_as_it_did(inside, asked_before):
    whole = model()
    if asked_before:
        whole(IDS, **HIDDEN)
    report = played(whole.text_model.get_submodule(inside), whole, **HIDDEN)
    assert report.counter("eager_runs") == 0
    assert any("output_capturing_hook" in reason for reason in report.as_dict()["reasons_since_start"])


def test_plans_of_what_is_inside_end_with_the_first_hook():
    whole, report = model(), Report()
    accelerator = accelerate(whole.text_model.encoder, Config(allow_cpu=True), report=report)
    with torch.no_grad():
        for _ in range(3):
            assert whole(IDS).hidden_states is None
        assert report.counter("eager_runs") == 2
        for _ in range(3):
            assert len(whole(IDS, **HIDDEN).hidden_states) == 3
    assert report.counter("eager_runs") == 2
    accelerator.release()


def test_another_hook_next_to_them_is_foreign():
    whole, seen = model(), []
    whole(IDS, **HIDDEN)
    whole.text_model.encoder.layers[0].register_forward_hook(lambda *args: seen.append(1))
    report = played(whole, whole, **HIDDEN)
    assert report.counter("eager_runs") == 0 and len(seen) == 5


def test_a_hook_that_only_has_the_name_is_foreign():
    whole = model()

    def output_capturing_hook(*args: Any) -> None:
        """Changes nothing."""

    output_capturing_hook.__module__ = "transformers.utils.output_capturing"
    whole.text_model.encoder.layers[0].register_forward_hook(output_capturing_hook)
    assert played(whole, whole, **HIDDEN).counter("eager_runs") == 0


def test_which_modules_make_the_list():
    whole = model()
    assert collects(whole.text_model) and not collects(whole) and not collects(whole.text_model.encoder)
    inside = inside_collectors(whole)
    assert id(whole.text_model.encoder.layers[0]) in inside and id(whole.text_projection) not in inside
    assert inside_collectors(whole.text_model.encoder) == frozenset()
    assert not written_there(None) and not written_there(print) and not collects(nn.Linear(1, 1))
