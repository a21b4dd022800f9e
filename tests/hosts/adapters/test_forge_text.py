"""The text encoders of all programs called Forge, whose layers cast their weights in each call."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
pytest.importorskip("transformers")
from hosts.adapters.test_forge_programs import Running, each, on
from hosts.adapters.test_text_encoders import same
from hosts.standins import text_encoders as texts
from sfast_ext import accelerator_of

__all__ = ["on"]
pytestmark = pytest.mark.usefixtures("text_plans_at_once")


class Casting(nn.Linear):
    """A linear layer as these programs have it: half the bytes in memory, computed as its input."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.parameters_manual_cast = self.ldm_patched_cast_weights = True
        self.weight_function: list[Any] = []
        self.bias_function: list[Any] = []

    def forward(self, x):
        weight, bias = self.weight.to(device=x.device, dtype=x.dtype), self.bias.to(device=x.device, dtype=x.dtype)
        for function in self.weight_function:
            weight = function(weight)
        return nn.functional.linear(x, weight, bias)


def text_encoder(seed: int) -> Any:
    """One whose layers have weights in bfloat16; embeddings and norms are in float32."""
    made = texts.clip_l(seed, True)
    for module in list(made.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                setattr(module, name, Casting(layer.bfloat16()))
    return made


class Joint(nn.Module):
    """What these programs keep the text encoders of a model in, and move and patch as one."""

    def __init__(self) -> None:
        super().__init__()
        self.clip_l, self.clip_g = text_encoder(3), text_encoder(4)


class Prompts:
    """Prompts in one of the programs, against a twin."""

    def __init__(self, on: Running) -> None:
        self.on = on
        self.joint = Joint()
        self.twin = copy.deepcopy(self.joint)
        self.clip = SimpleNamespace(cond_stage_model=self.joint, patcher=SimpleNamespace(model=self.joint))
        self.model.forge_objects.clip = self.clip

    @property
    def model(self) -> Any:
        return self.on.host.model_data.sd_model

    def image(self, seed: int = 1, **more: Any) -> set[str]:
        session = self.on.session.running
        session._before_images(lambda: None)
        did, names = set(), {"text_captures": "prepared", "text_eager_runs": "plan", "text_fallbacks": "bypassed"}
        for made, twin in ((self.joint.clip_l, self.twin.clip_l), (self.joint.clip_g, self.twin.clip_g)):
            before = {name: session.report.counter(name) for name in names}
            same(texts.read(made, texts.ids(seed), **more), texts.read(twin, texts.ids(seed), **more))
            done = [what for name, what in names.items() if session.report.counter(name) > before[name]]
            did.add(done[0] if done else "original")
        return did

    def warm(self) -> None:
        assert [self.image() for _ in range(3)] == [{"original"}, {"prepared"}, {"plan"}]


@pytest.mark.long(but=[2, 0])
@each
def test_prompts_are_read_by_plans_whose_layers_cast(on):
    prompts = Prompts(on)
    prompts.warm()
    vectors = [[(3, torch.randn(4, texts.WIDTH)), (20, torch.randn(2, texts.WIDTH))]]
    for skip in (1, 2, 3):
        assert prompts.image(seed=skip, skip=skip, fixes=vectors) == {"plan"}
    found = [each for each in on.status()["accelerators"] if each["name"] == "text encoder"]
    assert len(found) == 2 and {len(each["plans"]) for each in found} == {1}


@pytest.mark.long(but=[1, 2])
@each
def test_weights_that_a_lora_changes_are_followed(on):
    prompts = Prompts(on)
    prompts.warm()
    for scale in (1.5, -0.5):
        for joint in (prompts.joint, prompts.twin):
            layer = joint.clip_g.transformer.text_model.encoder.layers[1].mlp.fc1
            # merged in place, or another parameter
            if scale > 0:
                layer.weight.data.mul_(scale)
            else:
                layer.weight = nn.Parameter(layer.weight * scale, requires_grad=False)
        assert prompts.image() == {"plan"}


@pytest.mark.long(but=[0, 3])
@each
def test_a_model_that_stays_in_system_memory_in_part_is_bypassed(on):
    prompts = Prompts(on)
    prompts.warm()
    layer = prompts.joint.clip_l.transformer.text_model.encoder.layers[0].mlp.fc1
    # each program's own mark of it
    layer.prev_parameters_manual_cast = layer.prev_ldm_patched_cast_weights = True
    prompts.joint.model_lowvram = True
    assert "bypassed" in prompts.image()
    assert any("text encoder" in str(e["message"]) and "system memory" in str(e["message"])
               for e in on.session.running.report.as_dict()["events"])  # fmt: skip


@each
@pytest.mark.parametrize("form", [None, "float8_e4m3fn with scales"])
def test_weights_in_eight_bits_are_bypassed(on, form):
    prompts = Prompts(on)
    for joint in (prompts.joint, prompts.twin):
        layer = joint.clip_l.transformer.text_model.encoder.layers[0].mlp.fc1
        layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
        layer.quant_format = form
    assert ["bypassed" in prompts.image() for _ in range(3)] == [True] * 3
    assert any((form or "float8_e4m3fn") in str(e["message"]) for e in on.session.running.report.as_dict()["events"])


@pytest.mark.long(but=[1, 2])
@each
def test_without_the_setting_they_are_the_webui_s_own(on):
    prompts = Prompts(on)
    prompts.warm()
    on.host.opts.data["sfast_text_encoders"] = False
    assert prompts.image() == {"original"}
    assert not any(accelerator_of(module) for module in prompts.joint.modules())
    on.host.opts.data["sfast_text_encoders"] = True
    prompts.warm()


@pytest.mark.long(but=[0, 3])
@each
def test_another_checkpoint_brings_others(on):
    prompts = Prompts(on)
    prompts.warm()
    on.host.load(2)
    others = Prompts(on)
    assert "plan" in {what for _ in range(3) for what in others.image()}
    on.host.load(1)
    prompts.on.session.running._before_images(lambda: None)
    assert not any(accelerator_of(module) for module in prompts.joint.modules())
