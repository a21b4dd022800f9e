"""Text encoders as the WebUIs build them, each against a twin that the extension never sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from hosts.standins import text_encoders as standin
from sfast_ext.accelerator import accelerator_of
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import open_clip_towers
from sfast_ext.hosts.text_encoders import TextEncoders, layers_of
from sfast_ext.report import Report
from sfast_ext.ui.settings_table import HostConfig

pytestmark = pytest.mark.usefixtures("text_plans_at_once")

MAKERS: dict[str, Callable[..., Any]] = {
    "CLIP-L": standin.clip_l,
    "OpenCLIP-H": lambda seed, **more: standin.open_clip(seed, "FrozenOpenCLIPEmbedder", **more),
    "OpenCLIP-G": standin.open_clip,
}


@pytest.fixture(autouse=True)
def packages() -> Iterator[None]:
    with standin.packages():
        yield


class Pair:
    """A text encoder, followed, and its twin."""

    def __init__(self, made: Any, twin: Any, **config: Any) -> None:
        self.made, self.twin, self.report = made, twin, Report()
        self.config = HostConfig(allow_cpu=True, **config)
        self.encoders = TextEncoders(lambda module: Hooks(), self.report)
        self.image()

    def image(self) -> None:
        """Before an image."""
        self.encoders.follow([self.made], self.config)

    def did(self, *args: Any, **kwargs: Any) -> str:
        """Reads a prompt by both and compares. What it was."""
        names = {"text_captures": "prepared", "text_eager_runs": "plan", "text_fallbacks": "bypassed"}
        before = {name: self.report.counter(name) for name in names}
        found = standin.read(self.made, *args, **kwargs)
        expected = standin.read(self.twin, *args, **kwargs)
        same(found, expected)
        return next((what for name, what in names.items() if self.report.counter(name) > before[name]), "original")

    def prompt(self, *args: Any, **kwargs: Any) -> str:
        """As the first of an image."""
        self.image()
        return self.did(*args, **kwargs)

    @property
    def bypassed(self) -> list[str]:
        return [str(each["message"]) for each in self.report.as_dict()["events"] if each["stage"] == "bypassed"]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert type(one) is type(other)
        error = float((one.float() - other.float()).norm() / other.float().norm())
        assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[one.dtype], error


@pytest.fixture(params=["CLIP-L", "OpenCLIP-G"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make = MAKERS[request.param]
    pair = Pair(make(1, fixes=True), make(1, fixes=True))
    yield pair
    pair.encoders.release()
    assert not any("forward" in vars(module) for module in pair.made.modules())
    assert pair.report.as_dict()["last_error"] is None


def warm(pair: Pair, tokens: torch.Tensor | None = None, **more: Any) -> None:
    given = standin.ids(1) if tokens is None else tokens
    assert [pair.prompt(given, **more) for _ in range(3)] == ["original", "prepared", "plan"]


@pytest.mark.parametrize("pair", MAKERS, indirect=True)
def test_the_second_prompt_prepares_and_the_third_is_read_by_a_plan(pair):
    assert [pair.prompt(standin.ids(seed)) for seed in range(5)] == ["original", "prepared", "plan", "plan", "plan"]
    (status,) = [each for attachment in pair.encoders.attachments for each in attachment.status()]
    assert status["plans"][0]["label"] == "text encoder, 77 tokens" and status["steps"] is False
    assert status["name"] == "text encoder" and status["idle"] is None


def test_no_plan_is_made_while_it_does_not_pay(pair, monkeypatch):
    from sfast_ext.hosts import text_encoders

    monkeypatch.setattr(text_encoders, "GAIN", 0.7)
    assert {pair.prompt(standin.ids(seed)) for seed in range(8)} == {"original"}
    assert pair.report.counter("text_captures") == 0


def test_chunks_of_a_long_prompt_have_one_plan(pair):
    pair.image()
    assert [pair.did(standin.ids(seed)) for seed in range(4)] == ["original", "prepared", "plan", "plan"]
    assert pair.prompt(standin.ids(9)) == "plan" and pair.report.counter("text_captures") == 1


def test_prompts_that_are_read_together_have_another_plan(pair):
    warm(pair)
    for rows in (2, 4):
        warm(pair, standin.ids(rows, rows))
    labels = [plan["label"] for each in pair.encoders.attachments[0].status() for plan in each["plans"]]
    assert labels == ["text encoder, 77 tokens"] + [f"text encoder, 77 tokens, {n} prompts" for n in (2, 4)]


def test_at_most_one_plan_is_made_for_an_image(pair):
    pair.image()
    did = [pair.did(standin.ids(rows, rows)) for rows in (1, 2, 1, 2, 2)]
    assert did == ["original", "original", "prepared", "original", "original"]
    assert pair.prompt(standin.ids(2, 2)) == "prepared"


@pytest.mark.parametrize(
    "fixes", [[[(0, 3)]], [[(5, 1), (40, 8)]], [[(74, 6)]], [[(10, 77)]], [[]], [[(1, 2), (4, 2), (70, 5)]]]
)
def test_textual_inversion_is_in_what_a_plan_reads(pair, fixes):
    warm(pair)
    plain = standin.read(pair.made, standin.ids(1))
    vectors = [
        [(offset, torch.randn(n, standin.WIDTH, generator=torch.Generator().manual_seed(n))) for offset, n in row]
        for row in fixes
    ]
    assert pair.prompt(standin.ids(1), fixes=vectors) == "plan"
    found = standin.read(pair.made, standin.ids(1), fixes=vectors)
    assert torch.equal(plain[0], found[0]) == (not any(fixes))
    assert pair.prompt(standin.ids(1)) == "plan"


@pytest.mark.parametrize("skip", [1, 2, 3, 4, 5])
def test_layers_are_skipped(skip):
    pair = Pair(standin.clip_l(3), standin.clip_l(3))
    warm(pair, skip=skip)
    # the number itself is read by nobody: hidden states are given or not
    assert pair.report.counter("text_captures") == 1
    pair.encoders.release()


def test_weights_that_change_are_followed(pair):
    warm(pair)
    both = (pair.made, pair.twin)
    for model in both:
        linear = next(m for m in model.modules() if type(m) is nn.Linear)
        linear.weight.data.mul_(1.5)
    assert pair.prompt(standin.ids(1)) == "plan"
    for model in both:
        attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
        if attention is None:
            attention = next(m for m in model.modules() if isinstance(m, standin.Attention)).q_proj
        name = "in_proj_weight" if hasattr(attention, "in_proj_weight") else "weight"
        was = getattr(attention, name)
        setattr(attention, name, nn.Parameter(was.detach() * 0.5 + 0.01, requires_grad=False))
    assert pair.prompt(standin.ids(1)) == "plan"
    for model in both:
        norm = [m for m in model.modules() if isinstance(m, nn.LayerNorm)][1]
        norm.bias.data.add_(0.3)
    assert pair.prompt(standin.ids(1)) == "plan" and pair.report.counter("text_captures") == 1


def test_embeddings_that_change_are_the_hosts_own(pair):
    warm(pair)
    for model in (pair.made, pair.twin):
        next(m for m in model.modules() if isinstance(m, nn.Embedding)).weight.data.mul_(-1)
        model.hijack.fixes = None
    assert pair.prompt(standin.ids(1)) == "plan"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_means_other_plans(pair, dtype):
    warm(pair)
    for model in (pair.made, pair.twin):
        model.to(dtype)
    if dtype is torch.float64:
        found = standin.read(pair.made, standin.ids(1))
        assert torch.allclose(found[0], standin.read(pair.twin, standin.ids(1))[0])
    else:
        assert pair.prompt(standin.ids(1)) in ("original", "bypassed")
        assert "plan" in [pair.prompt(standin.ids(1)) for _ in range(4)]
    for model in (pair.made, pair.twin):
        model.float()
    assert "plan" in [pair.prompt(standin.ids(1)) for _ in range(4)]


def test_weights_that_lie_elsewhere_are_followed(pair):
    warm(pair)
    for _ in range(2):
        state = {name: value.clone() for name, value in pair.made.state_dict().items()}
        for parameter in pair.made.parameters():
            parameter.data = parameter.data.clone()
        assert pair.prompt(standin.ids(1)) == "plan"
        assert all(torch.equal(value, state[name]) for name, value in pair.made.state_dict().items())


def test_with_gradients_the_original_runs(pair):
    warm(pair)
    tokens = standin.ids(1)
    for parameter in pair.made.parameters():
        parameter.requires_grad_(True)
    if hasattr(pair.made, "model"):
        found = pair.made.encode_with_transformer(tokens)
        found = found["last"] if isinstance(found, dict) else found
    else:
        found = pair.made.transformer(input_ids=tokens).last_hidden_state
    assert found.grad_fn is not None
    assert any("gradients" in reason for reason in pair.bypassed)
    for parameter in pair.made.parameters():
        parameter.requires_grad_(False)
    assert pair.prompt(tokens) == "plan"


def test_while_it_trains_it_draws_as_it_did(pair):
    warm(pair)
    for model in (pair.made, pair.twin):
        model.train()
    found = []
    for model in (pair.made, pair.twin):
        torch.manual_seed(5)
        found.append(standin.read(model, standin.ids(1)))
    same(*found)
    for model in (pair.made, pair.twin):
        model.eval()
    assert "plan" in [pair.prompt(standin.ids(1)) for _ in range(3)]


def test_a_patched_layer_is_bypassed_with_its_name(pair):
    warm(pair)
    layer = next(m for m in pair.made.modules() if isinstance(m, (standin.Mlp, nn.Sequential)))
    own = layer.forward
    layer.forward = lambda x: -own(x)
    before = standin.read(pair.twin, standin.ids(1))
    pair.image()
    found = standin.read(pair.made, standin.ids(1))
    assert not torch.allclose(found[0], before[0], atol=1e-2)
    assert pair.report.counter("text_fallbacks") == 1 and "text encoder" in pair.bypassed[-1]
    del layer.forward
    assert pair.prompt(standin.ids(1)) == "plan"


def test_a_hook_on_a_layer_runs(pair):
    warm(pair)
    seen: list[Any] = []
    norm = next(m for m in pair.made.modules() if isinstance(m, nn.LayerNorm))
    handle = norm.register_forward_hook(lambda module, args, result: seen.append(1))
    assert pair.prompt(standin.ids(1)) == "bypassed" and seen
    handle.remove()
    assert pair.prompt(standin.ids(1)) == "plan"


def test_switched_off_it_is_given_back_and_runs_as_it_did(pair):
    warm(pair)
    pair.config = HostConfig(allow_cpu=True, text_encoders=False)
    assert [pair.prompt(standin.ids(1)) for _ in range(2)] == ["original", "original"]
    assert all(accelerator_of(module) is None for module in pair.made.modules())
    assert pair.encoders.attachments[0].status() == []
    pair.config = HostConfig(allow_cpu=True)
    warm(pair)


def test_another_model_of_the_kind_takes_its_plans(pair):
    warm(pair)
    kind = type(pair.made).__name__
    pair.encoders.suspend(pair.made)
    pair.made.to("meta")
    pair.made, pair.twin = (
        standin.clip_l(7, True) if kind == "SimpleEmbedder" else standin.open_clip(7, kind, True) for _ in range(2)
    )
    assert pair.prompt(standin.ids(1)) == "plan" and pair.report.counter("text_captures") == 1


def test_a_copy_of_it_runs_its_layers(pair):
    from copy import deepcopy

    warm(pair)
    copy = deepcopy(pair.made)
    for parameter in copy.parameters():
        parameter.data = parameter.data * 0.5
    other = deepcopy(pair.twin)
    for parameter in other.parameters():
        parameter.data = parameter.data * 0.5
    same(standin.read(copy, standin.ids(1)), standin.read(other, standin.ids(1)))
    assert pair.prompt(standin.ids(1)) == "plan"


def test_attention_weights_are_given_if_they_are_asked_for():
    pair = Pair(standin.clip_l(2), standin.clip_l(2))
    tokens = standin.ids(2, 2)
    with torch.no_grad():
        for _ in range(4):
            pair.image()
            found, expected = (
                each.transformer(tokens, output_attentions=True, output_hidden_states=True)
                for each in (pair.made, pair.twin)
            )
            same([*found.attentions, *found.hidden_states], [*expected.attentions, *expected.hidden_states])
    pair.encoders.release()


def test_hidden_states_are_made_only_if_they_are_asked_for():
    pair = Pair(standin.clip_l(2), standin.clip_l(2))
    with torch.no_grad():
        for _ in range(4):
            pair.image()
            assert pair.made.transformer(standin.ids(1)).hidden_states is None
    (status,) = pair.encoders.attachments[0].status()
    assert status["plans"] and pair.report.counter("text_eager_runs") == 2
    pair.encoders.release()


# what OpenCLIP's embedders are


def test_the_method_of_the_class_is_the_packages_own_again():
    import sys

    kind = sys.modules["sgm.text_standin"].FrozenOpenCLIPEmbedder2
    own = vars(kind)[open_clip_towers.METHOD]
    pair = Pair(standin.open_clip(1), standin.open_clip(1))
    assert vars(kind)[open_clip_towers.METHOD] is not own
    warm(pair)
    pair.encoders.release()
    assert vars(kind)[open_clip_towers.METHOD] is own


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_embedders_choice_of_a_layer_is_followed_at_once(layer):
    make = MAKERS["OpenCLIP-H"]
    pair = Pair(make(1), make(1))
    warm(pair)
    for model in (pair.made, pair.twin):
        model.layer_idx = layer
    assert pair.did(standin.ids(1)) == ("plan" if layer == 1 else "original")
    assert pair.prompt(standin.ids(1)) == ("plan" if layer == 1 else "prepared")
    assert pair.prompt(standin.ids(1)) == "plan"
    pair.encoders.release()


def test_blocks_of_another_model_run_at_once_and_are_followed():
    pair = Pair(standin.open_clip(1), standin.open_clip(1))
    warm(pair)
    for model in (pair.made, pair.twin):
        model.model.transformer = standin.open_clip(5).model.transformer
    assert pair.did(standin.ids(1)) == "original"
    assert "plan" in [pair.prompt(standin.ids(1)) for _ in range(3)]
    pair.encoders.release()


def test_blocks_that_are_added_or_exchanged_are_seen():
    pair = Pair(standin.open_clip(1), standin.open_clip(1))
    warm(pair)
    for model in (pair.made, pair.twin):
        model.model.transformer.resblocks[0] = standin.open_clip(6).model.transformer.resblocks[1]
    pair.prompt(standin.ids(1))
    for model in (pair.made, pair.twin):
        model.model.transformer.resblocks.append(standin.open_clip(8).model.transformer.resblocks[0])
    assert pair.did(standin.ids(1)) != "plan"
    assert "plan" in [pair.prompt(standin.ids(1)) for _ in range(4)]
    pair.encoders.release()


def test_a_method_on_the_embedder_itself_is_called():
    pair = Pair(standin.open_clip(1), standin.open_clip(1))
    warm(pair)
    for model in (pair.made, pair.twin):
        own = type(model).text_transformer_forward.__get__(model)
        model.text_transformer_forward = lambda x, attn_mask=None, own=own: {k: 2 * v for k, v in own(x).items()}
    twice = standin.read(pair.made, standin.ids(1))
    same(twice, standin.read(pair.twin, standin.ids(1)))
    pair.encoders.release()


def test_a_method_that_another_package_put_on_the_class_is_left_alone():
    import sys

    kind = sys.modules["sgm.text_standin"].FrozenOpenCLIPEmbedder2
    own = kind.text_transformer_forward
    kind.text_transformer_forward = lambda self, x, attn_mask=None: {k: 3 * v for k, v in own(self, x).items()}
    pair = Pair(standin.open_clip(1), standin.open_clip(1))
    assert [pair.prompt(standin.ids(1)) for _ in range(3)] == ["original"] * 3
    assert pair.encoders.attachments[0].accelerators() == []
    pair.encoders.release()


def test_a_method_that_is_put_on_the_class_later_is_called_and_calls_the_plan():
    import sys

    kind = sys.modules["sgm.text_standin"].FrozenOpenCLIPEmbedder2
    pair = Pair(standin.open_clip(1), standin.open_clip(1))
    warm(pair)
    below = kind.text_transformer_forward
    kind.text_transformer_forward = lambda self, x, attn_mask=None: {
        k: 3 * v for k, v in below(self, x, attn_mask=attn_mask).items()
    }
    assert pair.prompt(standin.ids(1)) == "plan"
    pair.encoders.release()
    assert pair.did(standin.ids(1)) == "original"


def test_a_method_that_reads_more_of_the_embedder_is_left_alone():
    pair = Pair(standin.open_clip(1, "ScaledEmbedder"), standin.open_clip(1, "ScaledEmbedder"))
    assert [pair.prompt(standin.ids(1)) for _ in range(3)] == ["original"] * 3
    pair.encoders.release()


# what is no text encoder


@pytest.mark.parametrize(
    "module",
    [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), standin.WithFixes(nn.Embedding(3, 3), None)],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_are_left_alone(module):
    encoders = TextEncoders(lambda module: Hooks(), Report())
    assert encoders.follow([module, None, "text"], HostConfig(allow_cpu=True)) == []
    assert layers_of(module) is None


@pytest.mark.parametrize(("kept", "graphs"), [(16, True), (8, True), (7, False), (4, False)])
def test_graphs_are_for_images_if_few_are_kept_and_sums_and_products_stay_exact(kept, graphs):
    encoders = TextEncoders(lambda module: Hooks(), Report())
    (found,) = encoders.follow([standin.clip_l(1)], HostConfig(max_graphs=kept, faster_sums=True, eight_bits=True))
    assert found.config.cuda_graphs == graphs and found.config.rare_calls
    assert not found.config.faster_sums and not found.config.eight_bits
    encoders.release()
    (found,) = encoders.follow([standin.clip_l(1)], HostConfig(cuda_graphs=False))
    assert not found.config.cuda_graphs
    encoders.release()


def test_one_encoder_that_is_named_twice_has_one_accelerator():
    encoder = standin.clip_l(1)
    encoders = TextEncoders(lambda module: Hooks(), Report())
    found = encoders.follow([encoder, nn.ModuleList([encoder]), encoder.transformer], HostConfig(allow_cpu=True))
    assert [each.module for each in found] == [encoder.transformer.text_model.encoder]
    encoders.release()


def test_a_text_model_that_records_by_hooks_is_one_plan_unless_its_embeddings_are_replaced():
    pytest.importorskip("transformers.utils.output_capturing", reason="hidden states are recorded by hooks since 5")
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CLIPTextModelWithProjection(CLIPTextConfig(vocab_size=standin.WORDS, projection_dim=16, **sizes))
    assert layers_of(model.text_model) is model.text_model and layers_of(model) is None
    embeddings = model.text_model.embeddings
    embeddings.token_embedding = standin.WithFixes(embeddings.token_embedding, None)
    assert layers_of(model.text_model) is None
    encoders = TextEncoders(lambda module: Hooks(), Report())
    assert encoders.follow([model], HostConfig(allow_cpu=True)) == []


def test_a_class_that_is_derived_from_torchs_embedding_may_do_more():
    from transformers import CLIPTextConfig, CLIPTextModel

    class Embedding(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return -super().forward(ids)

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CLIPTextModel(CLIPTextConfig(vocab_size=standin.WORDS, **sizes))
    text = getattr(model, "text_model", model)
    text.embeddings.token_embedding = Embedding(standin.WORDS, 16)
    assert layers_of(text) is not text


@pytest.mark.parametrize("part", ["embeddings", "encoder", "final_layer_norm"])
def test_a_model_without_one_of_its_parts_is_none(part):
    text = standin.clip_l(1).transformer.text_model
    assert layers_of(text) is text.encoder
    setattr(text, part, None)
    assert layers_of(text) is None


def test_an_encoder_that_writes_to_its_argument_as_comfyuis_is_left_alone():
    class InPlace(nn.Module):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x, mask=None, intermediate_output=None):
            for layer in self.layers:
                x += layer(x, mask, None)[0]
            return x, None

    text = standin.clip_l(1).transformer.text_model
    text.encoder = InPlace(text.encoder.layers)
    assert layers_of(text) is None


def test_layers_of_another_kind_are_left_alone():
    text = standin.clip_l(1).transformer.text_model
    text.encoder.layers[1] = nn.Linear(3, 3)
    assert layers_of(text) is None
    text.encoder.layers = nn.ModuleList()
    assert layers_of(text) is None
