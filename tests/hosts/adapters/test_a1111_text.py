"""Text encoders in AUTOMATIC1111's stand-in: prompts are read as an untouched twin reads them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
pytest.importorskip("transformers")
from hosts.adapters.test_text_encoders import same
from hosts.standins import a1111 as standin
from hosts.standins import text_encoders as texts
from sfast_ext import accelerator_of
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.hosts.a1111.lora import LoraLayers

pytestmark = pytest.mark.usefixtures("text_plans_at_once")


class Custom(nn.Module):
    """The WebUI's wrapper around an embedder, for emphasis and long prompts."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.wrapped = wrapped


class Conditioner(nn.Module):
    """That of SDXL."""

    def __init__(self, *embedders: nn.Module) -> None:
        super().__init__()
        self.embedders = nn.ModuleList(embedders)


def embedders(model: str, seed: int) -> list[Any]:
    made = {
        "SD 1": lambda: [texts.clip_l(seed, True)],
        "SD 2": lambda: [texts.open_clip(seed, "FrozenOpenCLIPEmbedder", True)],
        "SDXL": lambda: [texts.clip_l(seed, True), texts.open_clip(seed, fixes=True)],
    }[model]()
    for i, each in enumerate(made):
        standin.name_layers(each, f"{i}_te")
    return made


class Running:
    """The host with the extension, a model with text encoders, and twins of these."""

    def __init__(self, host: Any, model: str) -> None:
        self.host, self.kind = host, model
        a1111.start("test")
        self.model = host.load(1)
        self.made, self.twins = embedders(model, 3), embedders(model, 3)
        if model == "SDXL":
            self.model.conditioner = self.model.cond_stage_model = Conditioner(*map(Custom, self.made))
        else:
            self.model.cond_stage_model = Custom(self.made[0])
        host.fire("model_loaded", self.model)

    @property
    def session(self) -> Any:
        return a1111.A1111Session.running

    def counter(self, name: str) -> int:
        return self.session.report.counter(name)

    def read(self, seed: int = 1, rows: int = 1, skip: int = 1, fixes: Any = None) -> list[str]:
        """Reads a prompt by each text encoder, as in the WebUI with its Lora, and compares."""
        did = []
        names = {"text_captures": "prepared", "text_eager_runs": "plan", "text_fallbacks": "bypassed"}
        for made, twin in zip(self.made, self.twins):
            before = {name: self.counter(name) for name in names}
            found = texts.read(made, texts.ids(seed, rows), skip, fixes)
            did.append(next((what for name, what in names.items() if self.counter(name) > before[name]), "original"))
            same(found, texts.read(twin, texts.ids(seed, rows), skip, fixes))
        return did

    def image(self, **more: Any) -> set[str]:
        """An image of a prompt: the prompt is read in the request, before the first step."""
        self.session._before_images(lambda: None)
        did = self.read(**more)
        self.host.request()
        return set(did)


@pytest.fixture(params=["SD 1", "SD 2", "SDXL"])
def on(request: pytest.FixtureRequest) -> Iterator[Running]:
    with texts.packages(), standin.running(sfast_allow_cpu=True) as host:
        on = Running(host, request.param)
        yield on
        report = on.session.report
        a1111.A1111Session.stop()
        assert host.errors == [] and report.counter("errors") == 0, report.as_dict()["last_error"]
        assert not any("forward" in vars(m) for each in on.made for m in each.modules())


def warm(on: Running, **more: Any) -> None:
    assert [on.image(**more) for _ in range(3)] == [{"original"}, {"prepared"}, {"plan"}]


@pytest.mark.long(but=[0, 2])
def test_the_second_image_prepares_and_the_prompt_of_the_third_is_read_by_a_plan(on):
    warm(on)
    found = [each for each in on.session.status()["accelerators"] if each["name"] == "text encoder"]
    assert len(found) == len(on.made) and not any(each["steps"] for each in found)
    assert {plan["label"] for each in found for plan in each["plans"]} == {"text encoder, 77 tokens"}


@pytest.mark.long(but=[1])
def test_what_is_said_of_the_steps_does_not_count_them(on):
    warm(on)
    status = on.session.status()
    assert status["last_pass"] == {"accelerated": 3, "bypassed": 0, "prepared": 0}
    assert status["badge"]["state"] == "on" and status["counters"]["captures"] == 1


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize(
    ("on", "loras"),
    [("SD 1", {"a": 1.0}), ("SD 2", {"a": 0.5, "b": -1.0}), ("SDXL", {"a": -0.3}), ("SDXL", {"b": 2.0})],
    indirect=["on"],
    ids=str,
)
def test_loras_are_in_what_a_plan_reads_and_gone_afterwards(on, loras):
    warm(on)
    plain = texts.read(on.made[-1], texts.ids(1))
    on.host.lora(**loras)
    assert on.image() == {"plan"}
    assert not torch.allclose(texts.read(on.made[-1], texts.ids(1))[0], plain[0], atol=1e-3)
    on.host.lora()
    assert on.image() == {"plan"}
    same(texts.read(on.made[-1], texts.ids(1)), plain)


@pytest.mark.long(but=[0])
def test_a_lora_that_is_there_before_the_first_plan(on):
    on.host.lora(a=0.7)
    warm(on)
    on.host.lora()
    assert on.image() == {"plan"}
    on.host.lora(a=0.7)
    assert on.image() == {"plan"}


@pytest.mark.long(but=[1])
def test_a_bias_that_a_lora_brings_means_another_plan(on):
    if on.kind != "SD 1":
        pytest.skip("the same for all")
    for each in (on.made[0], on.twins[0]):
        for layer in each.transformer.text_model.encoder.layers:
            layer.mlp.fc1.bias = None
    warm(on)
    on.host.lora(biased=0.5)
    assert on.image() != {"plan"}
    on.host.lora()
    assert on.image() == {"plan"}


def test_loras_inside_of_layers_are_bypassed(on):
    warm(on)
    on.host.lora(a=1.0)
    on.host.opts.data["lora_functional"] = True
    assert on.image() == {"bypassed"}
    assert any("LoRA is computed inside the layers" in str(each["message"]) and "text encoder" in str(each["message"])
               for each in on.session.report.as_dict()["events"])  # fmt: skip
    on.host.opts.data["lora_functional"] = False
    assert on.image() == {"plan"}


@pytest.mark.long(but=[0])
def test_what_is_of_the_unet_alone_does_not_stop_them(on):
    warm(on)
    on.host.shared.loaded_hypernetworks.append(SimpleNamespace(name="h"))
    on.host.sd_unet.current_unet = SimpleNamespace(option=SimpleNamespace(label="another"))
    assert on.image() == {"plan"}
    on.host.sd_unet.current_unet = None
    on.host.shared.loaded_hypernetworks.clear()
    on.host.devices.fp8 = True
    assert on.image() == {"bypassed"}
    on.host.devices.fp8 = False
    assert on.image() == {"plan"}


@pytest.mark.long(but=[2])
@pytest.mark.parametrize(
    ("on", "skip"), [("SD 1", 1), ("SD 1", 4), ("SD 2", 2), ("SDXL", 3)], indirect=["on"], ids=str
)
def test_the_number_of_skipped_layers_needs_no_plan(on, skip):
    warm(on)
    assert on.image(skip=skip) == {"plan"}
    assert on.counter("text_captures") == len(on.made)


@pytest.mark.long(but=[2])
def test_300_tokens_are_read_chunk_by_chunk_with_vectors(on):
    warm(on)
    vectors = [[(3, torch.randn(4, texts.WIDTH))]]
    on.session._before_images(lambda: None)
    for seed in range(4):
        assert set(on.read(seed, fixes=vectors if seed % 2 else [[]])) == {"plan"}
    warm(on, rows=2)


@pytest.mark.long(but=[1])
def test_another_checkpoint_in_the_same_modules(on):
    warm(on)
    for made in (on.made, on.twins):
        for each, other in zip(made, embedders(on.kind, 9)):
            each.load_state_dict(other.state_dict())
    on.host.switch(2)
    assert on.image() == {"plan"} and on.counter("text_captures") == len(on.made)


@pytest.mark.long(but=[1])
def test_switched_off_they_are_released_before_the_next_image(on):
    warm(on)
    on.host.opts.data["sfast_text_encoders"] = False
    on.host.request()
    assert not any(accelerator_of(m) for each in on.made for m in each.modules())
    assert on.read() == ["original"] * len(on.made) and on.session.loaded() is not None
    on.host.opts.data["sfast_text_encoders"] = True
    warm(on)


def test_a_layer_of_torchs_attention_is_left_to_the_attention():
    attention = nn.MultiheadAttention(8, 2)
    tree = nn.ModuleList([attention, nn.Linear(8, 8)])
    standin.name_layers(tree, "te")
    with standin.running():
        layers = LoraLayers(tree.modules())
        assert [each() for each in layers._layers] == [attention, tree[1]]
