"""Transformers in SD.Next and in Forge Neo, as stand-ins of both run them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantised_layer import Layer
from small_transformers import KINDS, inputs, transformer
from torch import nn

from hosts.standins import forge as standin
from hosts.standins.forge_transformer import NextDiT
from hosts.standins.sdnext import HAS_GROUPS, Host, hosted
from sfast_ext.accelerator import accelerator_of
from sfast_ext.hosts.forge import adapter as forge
from sfast_ext.tools.lib import transformers

TOLERANCE = 1e-5
needs_groups = pytest.mark.skipif(not HAS_GROUPS, reason="diffusers without offload by groups")


@pytest.fixture
def sdnext(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from hosted(monkeypatch)


def pipeline(kind: str, seed: int = 0) -> Any:
    info = SimpleNamespace(name=f"{kind} {seed}")
    return SimpleNamespace(transformer=transformer(kind, seed), sd_checkpoint_info=info)


def image(host: Host, size: tuple[int, int] = (8, 8), prompts: tuple[int, ...] = (5, 3), together: bool = False) -> Any:
    """The sum of the predictions of a few steps, guidance in two calls or in one; prompts by their tokens."""
    host.script_callbacks.fire("before_process", SimpleNamespace(batch_size=1))
    host.shared.state.begin("Inference")
    return predicted(host.modeldata.model_data.sd_model.transformer, size, prompts, together)


def predicted(
    model: Any, size: tuple[int, int] = (8, 8), prompts: tuple[int, ...] = (5, 3), together: bool = False
) -> Any:
    """What the model predicts in the steps of `image`."""
    total: Any = 0
    with torch.no_grad():
        for step in range(3):
            for tokens in [prompts] if together else [(n,) for n in prompts]:
                args, kwargs = inputs(model, size, tokens, timestep=0.9 - 0.2 * step, seed=step)
                total = total + transformers.result_of(model(*args, **kwargs)).sum(0)
    return total


def without(host: Host, **options: Any) -> Any:
    host.opts.sfast_enabled = False
    try:
        return image(host, **options)
    finally:
        host.opts.sfast_enabled = True


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).norm() / theirs.norm()) < TOLERANCE


@pytest.mark.long(but=[0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_sdnext_runs_plans(sdnext: Host, kind: str) -> None:
    sdnext.sd_models.load_model(pipeline(kind))
    more = ({"together": True, "prompts": (5, 5)}, {"prompts": (7,)}) if kind == KINDS[0] else ()
    for options in ({}, {"size": (8, 12)}, *more, {}):
        expected = without(sdnext, **options)
        runs = sdnext.runs()
        for _ in range(2):
            assert close(image(sdnext, **options), expected)
        assert sdnext.runs() > runs, sdnext.reasons()
    assert sdnext.status()["last_error"] is None


def test_sdnext_keeps_to_known_classes(sdnext: Host) -> None:
    class Other(nn.Linear):
        pass

    for unknown in (nn.Linear(2, 2), Other(2, 2), None, object()):
        sdnext.modeldata.model_data.sd_model = SimpleNamespace(transformer=unknown)
        sdnext.session.follow()
        assert "has no UNet, and no transformer that is accelerated" in sdnext.reasons()
    assert not sdnext.status()["accelerators"]


def test_sdnext_names_what_quantised_a_transformer(sdnext: Host) -> None:
    pipe = pipeline(KINDS[0])
    pipe.transformer.quantization_method = "quanto"
    sdnext.modeldata.model_data.sd_model = pipe
    sdnext.session.follow()
    assert "quanto" in sdnext.reasons() and accelerator_of(pipe.transformer) is None


@needs_groups
def test_sdnext_that_streams_a_transformer_runs_it_itself(sdnext: Host) -> None:
    sdnext.opts.diffusers_offload_mode = "group"
    sdnext.sd_models.load_model(pipeline(KINDS[0]))
    twin = transformer(KINDS[0])
    assert close(image(sdnext), predicted(twin)) and "offload mode 'group'" in sdnext.reasons()
    assert not sdnext.status()["accelerators"]


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("known", [True, False])
def test_sdnext_runs_known_layers_of_sdnq_in_a_transformer(sdnext: Host, known: bool) -> None:
    pipes = [pipeline(KINDS[0]) for _ in range(2)]
    for pipe in pipes:
        torch.manual_seed(3)
        layer = Layer(192, 48, bias=False, dtype=torch.float32)
        if not known:
            layer.sdnq_dequantizer = SimpleNamespace(**{**vars(layer.sdnq_dequantizer), "use_hadamard": True})
        pipe.transformer.layers[0].feed_forward.linear_2 = layer
    sdnext.sd_models.load_model(pipes[0])
    for _ in range(2):
        assert close(image(sdnext), predicted(pipes[1].transformer))
    assert (sdnext.runs() > 0) == known, sdnext.reasons()
    assert known or "SDNQ" in sdnext.reasons()


def test_sdnext_follows_a_lora_in_layers_of_diffusers(sdnext: Host) -> None:
    peft = pytest.importorskip("peft")
    sdnext.sd_models.load_model(pipeline(KINDS[0]))
    model, twin = sdnext.modeldata.model_data.sd_model.transformer, transformer(KINDS[0])
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-9:-1]
    assert close(image(sdnext, prompts=(5,)), predicted(twin, prompts=(5,)))

    def add(each: Any, adapter: str) -> None:
        each.add_adapter(peft.LoraConfig(r=2, lora_alpha=3, target_modules=names), adapter_name=adapter)
        for name, weight in each.eval().named_parameters():
            if f".{adapter}." in name:
                torch.manual_seed(len(name))
                weight.data.copy_(torch.randn_like(weight) / 4)

    changes: list[Any] = [
        lambda each: add(each, "one"),
        lambda each: each.set_adapters(["one"], [0.4]),
        lambda each: (add(each, "two"), each.set_adapters(["one", "two"], [-0.5, 0.8])),
        lambda each: each.disable_adapters(),
    ]
    last = predicted(twin, prompts=(5,))
    for i, change in enumerate(changes):
        change(model), change(twin)
        wanted, runs = predicted(twin, prompts=(5,)), sdnext.runs()
        for _ in range(2):
            assert close(image(sdnext, prompts=(5,)), wanted), i
        assert not close(wanted, last) and sdnext.runs() > runs, (i, sdnext.reasons())
        last = wanted
    assert sdnext.status()["last_error"] is None


def test_sdnext_follows_weights_that_a_lora_changes(sdnext: Host) -> None:
    sdnext.sd_models.load_model(pipeline(KINDS[0]))
    model, twin = sdnext.modeldata.model_data.sd_model.transformer, transformer(KINDS[0])
    image(sdnext)
    for strength in (0.5, 1.0, 0.0, -1.0):
        for each in (model, twin):
            for seed, layer in enumerate(m for m in each.modules() if isinstance(m, nn.Linear)):
                torch.manual_seed(seed)
                change = 0.01 * strength * torch.randn_like(layer.weight)
                layer.weight = nn.Parameter(layer.weight.detach() + change, requires_grad=False)
        assert close(image(sdnext), predicted(twin))
    # of two prompts
    assert sdnext.captures() <= 2


@pytest.fixture
def neo() -> Iterator[Any]:
    with standin.running(sfast_allow_cpu=True) as host:
        yield host
        forge.ForgeSession.stop()
        assert host.errors == []


def made(seed: int) -> NextDiT:
    torch.manual_seed(seed)
    return NextDiT()


def expected_of(loras: dict[str, float], seed: int = 1, **options: Any) -> torch.Tensor:
    with standin.running() as other:
        other.load(1, unet=made(seed))
        other.lora(everywhere=True, **loras)
        return other.generate(**options)


def test_forge_neo_runs_plans() -> None:
    cases: list[tuple[dict[str, float], dict[str, Any]]] = [
        ({}, {}), ({"a": 1.0}, {}), ({"a": 0.5, "b": 1.0}, {}), ({}, {"size": 16}), ({}, {}),
    ]  # fmt: skip
    expected = [expected_of(loras, **options) for loras, options in cases]
    with standin.running(sfast_allow_cpu=True) as host:
        forge.start("test")
        host.load(1, unet=made(1))
        for (loras, options), wanted in zip(cases, expected):
            host.lora(everywhere=True, **loras)
            for _ in range(2):
                assert close(host.generate(**options), wanted)
        session = forge.ForgeSession.running
        assert session is not None
        status = session.status()
        assert status["last_error"] is None and not status["reasons"]
        assert session.report.counter("captures") == 2
        assert session.report.counter("eager_runs") >= 2 * len(cases) * 3 - 2
        forge.ForgeSession.stop()


def test_forge_neo_runs_the_original_with_lora_inside_layers(neo: Any) -> None:
    forge.start("test")
    neo.load(1, unet=made(1))
    neo.lora(online=True, everywhere=True, a=1.0)
    neo.generate()
    session = forge.ForgeSession.running
    assert session is not None
    assert any("LoRA is computed inside the layers" in reason for reason in session.status()["reasons"])
    assert session.report.counter("captures") == 0


def test_other_forges_keep_to_unets() -> None:
    from sfast_ext.hosts.forge.programs import CLASSIC, FORGE, NEO, REFORGE

    assert all(len(program.networks) == 1 for program in (CLASSIC, FORGE, REFORGE)) and len(NEO.networks) == 5
