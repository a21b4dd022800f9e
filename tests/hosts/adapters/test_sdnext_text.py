"""Text encoders in SD.Next: transformers' own, against untouched twins."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from hosts.standins.sdnext import Host, hosted, tiny_unet
from sfast_ext import accelerator_of
from sfast_ext.tools.lib import models

pytestmark = pytest.mark.usefixtures("text_plans_at_once")
WORDS = 120


def text_model(kind: str, seed: int = 1) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        projection_dim=32, bos_token_id=0, eos_token_id=WORDS - 1,
    )  # fmt: skip
    return models.randomise(getattr(transformers, kind)(config), seed).eval().requires_grad_(False)


def ids(seed: int, rows: int = 1) -> torch.Tensor:
    found = torch.randint(0, WORDS - 1, (rows, 77), generator=torch.Generator().manual_seed(seed))
    found[:, 40] = WORDS - 1
    return found


class Running:
    """SD.Next with a pipeline of two text encoders, and their twins."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.pipe = SimpleNamespace(
            unet=tiny_unet(), sd_checkpoint_info=SimpleNamespace(name="tiny"),
            text_encoder=text_model("CLIPTextModel"), text_encoder_2=text_model("CLIPTextModelWithProjection", 2),
        )  # fmt: skip
        self.twins = [copy.deepcopy(each) for each in self.made]
        host.sd_models.load_model(self.pipe)

    @property
    def made(self) -> list[Any]:
        return [self.pipe.text_encoder, self.pipe.text_encoder_2]

    def counter(self, name: str) -> int:
        return self.host.session.report.counter(name)

    @torch.no_grad()
    def image(self, tokens: torch.Tensor | None = None, **options: Any) -> list[str]:
        """A job: its prompt is read by both, and compared."""
        tokens = ids(1) if tokens is None else tokens
        self.host.session._before_process(SimpleNamespace(batch_size=1))
        self.host.shared.state.begin("TE Encode")
        did, names = [], {"text_captures": "prepared", "text_eager_runs": "plan", "text_fallbacks": "bypassed"}
        for made, twin in zip(self.made, self.twins):
            before = {name: self.counter(name) for name in names}
            found, expected = made(tokens, **options), twin(tokens, **options)
            did.append(next((what for name, what in names.items() if self.counter(name) > before[name]), "original"))
            assert type(found) is type(expected) and list(found.keys()) == list(expected.keys())
            for one, other in zip(flat(found), flat(expected), strict=True):
                assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
                assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)
        return did

    def warm(self, **options: Any) -> None:
        did = [self.image(**options) for _ in range(4)]
        # the first of all leaves hooks on the layers if hidden states are asked for
        assert did[-1] == ["plan", "plan"], (did, self.host.session.report.as_dict()["events"])


def flat(output: Any) -> list[torch.Tensor]:
    found = []
    for value in output.values():
        found += value if isinstance(value, tuple) else [value]
    return found


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for host in hosted(monkeypatch):
        yield Running(host)
        assert host.session is None or host.session.report.counter("errors") == 0


HIDDEN = {"output_hidden_states": True}


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("options", [{}, HIDDEN, {"attention_mask": torch.ones(1, 77, dtype=torch.long), **HIDDEN}])
def test_prompts_are_read_by_plans(on, options):
    on.warm(**options)
    assert on.image(ids(7), **options) == ["plan", "plan"]
    found = [each for each in on.host.status()["accelerators"] if each["name"] == "text encoder"]
    assert len(found) == 2 and all(each["plans"][-1]["label"] == "text encoder, 77 tokens" for each in found)


def test_a_mask_of_a_shorter_prompt_is_an_input(on):
    masks = [torch.ones(2, 77, dtype=torch.long) for _ in range(3)]
    masks[1][:, 30:] = 0
    masks[2][0, 50:] = 0
    for mask in (masks[0], masks[0], masks[0], masks[1], masks[2], masks[0]):
        on.image(ids(3, 2), attention_mask=mask, **HIDDEN)
    assert on.image(ids(4, 2), attention_mask=masks[1], **HIDDEN) == ["plan", "plan"]


def test_hidden_states_are_given_with_and_without_in_turns(on):
    for _ in range(3):
        on.warm()
        on.warm(**HIDDEN)


@pytest.mark.long
def test_attention_weights_are_given_if_they_are_asked_for(on):
    for each in (*on.made, *on.twins):
        each.set_attn_implementation("eager")
    for _ in range(4):
        on.image(output_attentions=True, **HIDDEN)
    on.warm(**HIDDEN)


def test_tokens_that_are_added_for_textual_inversion(on):
    on.warm(**HIDDEN)
    for each in (*on.made, *on.twins):
        torch.manual_seed(4)
        each.resize_token_embeddings(WORDS + 3)
        each.get_input_embeddings().weight.data[-3:] = torch.arange(3 * 32).reshape(3, 32) / 32
    tokens = ids(1)
    tokens[0, 5:8] = torch.arange(WORDS, WORDS + 3)
    assert on.image(tokens, **HIDDEN) != ["plan", "plan"]
    assert ["plan", "plan"] in [on.image(tokens, **HIDDEN) for _ in range(4)]


def test_weights_that_a_network_changes_are_followed(on):
    on.warm(**HIDDEN)
    for scale in (1.5, -1.0):
        for models_ in (on.made, on.twins):
            for each in models_:
                layer = next(m for n, m in each.named_modules() if n.endswith("mlp.fc1"))
                layer.weight = torch.nn.Parameter(layer.weight * scale, requires_grad=False)
        assert on.image(**HIDDEN) == ["plan", "plan"]


def test_networks_of_diffusers_are_bypassed_with_a_reason(on):
    peft = pytest.importorskip("peft")
    on.warm(**HIDDEN)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for models_ in (on.made, on.twins):
        for i, each in enumerate(models_):
            torch.manual_seed(i)
            each.add_adapter(config)
    assert on.image(**HIDDEN) == ["bypassed", "bypassed"]
    events = [str(each["message"]) for each in on.host.session.report.as_dict()["events"]]
    assert any("text encoder: LoRA is loaded by diffusers" in event for event in events)


def test_with_gradients_the_original_runs(on):
    on.warm()
    found = on.pipe.text_encoder.requires_grad_(True)(ids(1))
    assert found.last_hidden_state.grad_fn is not None
    on.pipe.text_encoder.requires_grad_(False)
    assert on.image() == ["plan", "plan"]


def test_switched_off_they_are_released_before_the_next_job(on):
    on.warm(**HIDDEN)
    on.host.opts.sfast_text_encoders = False
    assert on.image(**HIDDEN) == ["original", "original"]
    assert not any(accelerator_of(m) for each in on.made for m in each.modules())
    on.host.opts.sfast_text_encoders = True
    on.warm(**HIDDEN)


def test_another_checkpoint_of_the_architecture(on):
    on.warm(**HIDDEN)
    captures = on.counter("text_captures")
    on.pipe.text_encoder, on.pipe.text_encoder_2 = text_model("CLIPTextModel", 8), text_model(
        "CLIPTextModelWithProjection", 9
    )
    on.twins = [copy.deepcopy(each) for each in on.made]
    assert "plan" in {what for _ in range(4) for what in on.image(**HIDDEN)}
    assert on.counter("text_captures") <= captures + 2


def test_unloading_gives_them_back(on):
    on.warm(**HIDDEN)
    on.host.sd_models.unload_model_weights()
    assert not any(accelerator_of(m) for each in on.made for m in each.modules())


def test_a_text_encoder_that_is_quantised_is_left_alone(on):
    on.pipe.text_encoder.quantization_method = "sdnq"
    on.image(**HIDDEN)
    on.image(**HIDDEN)
    assert accelerator_of(on.pipe.text_encoder) is None
    assert accelerator_of(on.pipe.text_encoder_2.text_model) is not None
