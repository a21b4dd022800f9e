"""The A1111 adapter against a stand-in that raises the WebUI's events in its order, around ldm's real UNet."""

from __future__ import annotations

import functools
import gc
import json
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.standins import a1111 as standin
from sfast_ext import accelerator_of
from sfast_ext.hosts.a1111 import adapter as a1111

# relative L2, fp32 against fp32: only the order of additions differs, over three steps of a net with random weights
TOLERANCE = 1e-3


@pytest.fixture
def host() -> Iterator[Any]:
    with standin.running(sfast_allow_cpu=True) as host:
        yield host
        a1111.A1111Session.stop()
        # what a callback raises, the WebUI swallows: here it must not
        assert host.errors == []


def unet_of(host: Any) -> Any:
    return host.model_data.sd_model.model.diffusion_model


def status() -> dict[str, Any]:
    assert a1111.A1111Session.running is not None
    return a1111.A1111Session.running.status()


def count(name: str) -> int:
    names = ("replays", "eager_runs") if name == "plans run" else (name,)
    return sum(status()["counters"].get(n, 0) for n in names)


def same(image: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return float((image - expected).norm() / expected.norm()) < tolerance


def untouched(seed: int, channels: int = 32, loras: dict[str, float] | None = None, **options: Any) -> torch.Tensor:
    """The image as the WebUI makes it without us, with the code that there is now."""
    with standin.running() as other:
        other.load(seed, channels)
        other.lora(**(loras or {}))
        return other.generate(**options)


def reference(seed: int, channels: int = 32, loras: dict[str, float] | None = None, **options: Any) -> torch.Tensor:
    """The same, made once: for tests that have patched nothing."""
    return _reference(seed, channels, tuple((loras or {}).items()), tuple(options.items()))


@functools.lru_cache(maxsize=None)
def _reference(
    seed: int, channels: int, loras: tuple[tuple[str, float], ...], options: tuple[tuple[str, Any], ...]
) -> torch.Tensor:
    return untouched(seed, channels, dict(loras), **dict(options))


def started(host: Any, seed: int = 1) -> Any:
    a1111.start("test")
    host.load(seed)
    return unet_of(host)


def test_detects_the_host_and_nothing_else(host):
    assert a1111.detect()
    sys.modules["modules_forge"] = standin._module("modules_forge")
    try:
        assert not a1111.detect()
    finally:
        del sys.modules["modules_forge"]


def test_does_not_detect_what_is_not_there():
    assert not a1111.detect()


def test_a_generation_runs_plans_and_gives_the_same_image(host, capsys):
    unet = started(host)
    assert capsys.readouterr().out.count("\n") == 1
    assert accelerator_of(unet) is not None
    assert same(host.generate(), reference(1))
    assert count("captures") == 1 and count("plans run") == 2
    assert same(host.generate(), reference(1))
    assert count("captures") == 1 and count("plans run") == 5


def test_a_model_loaded_before_the_scripts_is_found_at_the_first_step(host):
    host.load(1)
    a1111.start("test")
    assert accelerator_of(unet_of(host)) is None
    assert same(host.generate(), reference(1))
    assert count("plans run") == 2


def test_settings_are_there_before_the_model_and_hold_what_the_file_said():
    with standin.running(sfast_enabled=False) as host:
        a1111.start("test")
        host.load(1)
        assert accelerator_of(unet_of(host)) is None
        assert "sfast_tolerance" in host.opts.data_labels
        a1111.A1111Session.stop()


def test_the_status_has_every_part(host):
    started(host)
    host.generate()
    found = json.loads(json.dumps(status(), default=str))
    own = {"version", "host", "environment", "busy", "no_gpu", "enabled", "model", "job"} | {
        "unserved", "accelerators", "badge", "eight_bits",
    }  # fmt: skip
    reported = {"preparing", "last_pass", "reasons", "reasons_since_start", "reasons_listed"}
    assert set(found) == own | reported | {"counters", "events", "last_error"}
    assert found["host"] == {"name": "AUTOMATIC1111 WebUI", "version": "v1.10.1", "remarks": []}
    assert found["model"] == "seed 1" and found["enabled"] and len(found["accelerators"]) == 1


def test_lora_is_brought_up_to_date_and_keeps_the_plans(host):
    started(host)
    plain = host.generate()
    captures = count("captures")
    for loras in ({"a": 1.0}, {"a": 0.5}, {"a": 0.5, "b": 1.0}, {"b": 1.0}, {}):
        host.lora(**loras)
        image = host.generate()
        assert same(image, reference(1, loras=loras)), loras
        assert same(image, plain) == (not loras)
    assert count("captures") == captures and status()["reasons"] == {}


def test_a_lora_from_the_very_first_image(host):
    started(host)
    host.lora(a=1.0)
    assert same(host.generate(), reference(1, loras={"a": 1.0}))
    host.lora()
    assert same(host.generate(), reference(1))


def test_a_lora_that_brings_a_bias_is_seen_and_its_leaving_too(host):
    started(host)
    host.generate()
    for loras in ({"biased": 1.0}, {}, {"biased": 0.5}, {}):
        host.lora(**loras)
        before = count("plans run")
        assert same(host.generate(), reference(1, loras=loras)), loras
        assert count("plans run") > before


def test_a_checkpoint_into_the_same_modules_keeps_the_plans(host):
    started(host)
    host.generate()
    host.switch(2)
    assert same(host.generate(), reference(2))
    host.switch(1)
    assert same(host.generate(), reference(1))
    assert count("captures") == 1


def test_a_checkpoint_under_a_lora(host):
    started(host)
    host.lora(a=1.0)
    host.generate()
    host.switch(2)
    assert same(host.generate(), reference(2, loras={"a": 1.0}))
    assert count("captures") == 1


def test_another_model_takes_over_and_the_first_is_given_back(host):
    first = started(host)
    host.generate()
    host.load(3, channels=64)
    assert "forward" not in vars(first) and accelerator_of(unet_of(host)) is not None
    assert same(host.generate(), reference(3, channels=64))
    assert len(status()["accelerators"]) == 1


def test_a_model_that_was_loaded_already_comes_without_a_callback(host):
    first = started(host)
    host.generate()
    one = host.model_data.sd_model
    two = host.load(2, limit=2)
    host.generate()
    captures = count("captures")
    for model, seed in ((one, 1), (two, 2), (one, 1)):
        host.reuse(model)
        assert same(host.generate(), reference(seed))
    # both stay where they are, so both keep their plans
    assert count("captures") == captures and accelerator_of(first) is not None
    assert len(status()["accelerators"]) == 2


def test_models_sent_to_the_cpu_for_the_gpus_memory_keep_nothing(host):
    first = started(host)
    host.generate()
    host.shared.device = torch.device("cuda")
    host.load(2, limit=2)
    host.generate()
    assert accelerator_of(first) is None and len(status()["accelerators"]) == 1


def test_unloading_through_the_api_gives_everything_back(host):
    unet = started(host)
    host.generate()
    module = sys.modules["modules.sd_models"]
    original = module.unload_model_weights.__wrapped__
    module.unload_model_weights()
    assert status()["accelerators"] == [] and "forward" not in vars(unet)
    assert same(host.generate(), reference(1))
    a1111.A1111Session.running.release()
    assert module.unload_model_weights is original


def test_the_refiner_switches_within_a_generation(host):
    started(host)
    image = host.generate(steps=6, refiner=lambda: host.switch(2))
    with standin.running() as other:
        other.load(1)
        assert same(image, other.generate(steps=6, refiner=lambda: other.switch(2)))
    assert count("captures") == 1 and count("plans run") == 5


def test_the_refiner_as_a_model_of_its_own(host):
    started(host)
    one, two = host.model_data.sd_model, host.load(2, channels=64, limit=2)
    host.reuse(one)
    image = host.generate(steps=6, refiner=lambda: host.reuse(two))
    a1111.A1111Session.running.release()
    host.forget_callbacks()
    host.reuse(one)
    assert same(image, host.generate(steps=6, refiner=lambda: host.reuse(two)))
    assert count("plans run") == 4


def test_sizes_and_prompt_lengths_have_plans_of_their_own(host):
    started(host)
    for size, tokens in ((8, 7), (16, 7), (8, 14), (8, 7)):
        assert same(host.generate(size=size, tokens=tokens), reference(1, size=size, tokens=tokens))
    assert count("captures") == 3


def test_a_forward_laid_over_ours_is_left_alone(host):
    unet = started(host)
    host.generate()
    ours = unet.forward
    unet.forward = lambda x, timesteps=None, context=None: torch.zeros_like(x)
    before = count("plans run")
    host.generate()
    assert count("plans run") == before and unet.forward is not ours
    assert any("replaces the model's forward" in event["message"] for event in status()["events"])
    unet.forward = ours
    assert same(host.generate(), reference(1))
    assert count("plans run") == before + 3 and count("captures") == 1


def test_a_forward_that_was_there_first_is_waited_for(host):
    a1111.start("test")
    unet = host.load(1).model.diffusion_model
    a1111.A1111Session.running.release_models()
    foreign = lambda x, timesteps=None, context=None: torch.zeros_like(x)
    unet.forward = foreign
    host.generate()
    assert unet.forward is foreign
    del unet.forward
    assert same(host.generate(), reference(1))
    assert count("plans run") == 2


def test_our_forward_put_back_after_we_are_gone_goes_on_to_the_original(host):
    unet = started(host)
    host.generate()
    stored = unet.forward
    unet.forward = lambda *a, **k: stored(*a, **k)
    host.opts.data["sfast_enabled"] = False
    before = count("plans run")
    assert same(host.generate(), reference(1), 1e-6)
    assert count("plans run") == before
    unet.forward = stored
    assert same(host.generate(), reference(1), 1e-6)
    assert count("plans run") == before
    host.opts.data["sfast_enabled"] = True
    assert same(host.generate(), reference(1))
    assert count("plans run") > before


def test_an_sdunet_runs_instead_and_our_memory_goes(host):
    unet = started(host)
    host.generate()
    host.sd_unet.current_unet = SimpleNamespace(option=SimpleNamespace(label="[TRT] engine"))
    before = count("plans run")
    host.generate()
    assert count("plans run") == before and "forward" not in vars(unet)
    host.sd_unet.current_unet = None
    assert same(host.generate(), reference(1))
    assert count("plans run") > before


def test_an_sdunet_that_comes_within_a_pass_is_seen_at_the_call(host):
    started(host)
    hooks = a1111.A1111Hooks(unet_of(host))
    assert hooks.bypass_reason() is None
    host.sd_unet.current_unet = SimpleNamespace(option=SimpleNamespace(label="[TRT] engine"))
    assert "[TRT] engine" in str(hooks.bypass_reason())


def hypertile(host: Any, unet: Any = None) -> None:
    layer = (unet or unet_of(host)).middle_block[1].transformer_blocks[0].attn1
    params = SimpleNamespace(enabled=True, forward=layer.forward)
    setattr(layer, "__webui_hypertile_params", params)

    @functools.wraps(params.forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return params.forward(*args, **kwargs)

    layer.forward = wrapper


def hypernetwork(host: Any) -> None:
    host.shared.loaded_hypernetworks.append(SimpleNamespace(name="anime"))


def functional_lora(host: Any) -> None:
    host.lora(a=1.0)
    host.opts.data["lora_functional"] = True


def lowvram(host: Any) -> None:
    host.model_data.sd_model.lowvram = host.shared.cmd_opts.lowvram = True


REASONS = {
    "lowvram": (lowvram, "--lowvram"),
    "fp8": (lambda host: setattr(host.devices, "fp8", True), "FP8"),
    "hypernetwork": (hypernetwork, "hypernetwork is active: anime"),
    "functional lora": (functional_lora, "LoRA is computed"),
    "token merging": (
        lambda host: setattr(host.model_data.sd_model, "applied_token_merged_ratio", 0.5),
        "token merging",
    ),
    "hypertile": (hypertile, "Hypertile"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_not_understood_goes_to_the_original_with_a_reason(host, name):
    switch_on, words = REASONS[name]
    started(host)
    host.generate()
    before = count("plans run")
    switch_on(host)
    assert same(host.generate(), reference(1), 1e-6)
    assert count("plans run") == before
    (reason,) = status()["reasons"]
    assert words in reason and status()["reasons"][reason] == 3


def test_medvram_is_no_reason_to_bypass(host):
    started(host)
    host.model_data.sd_model.lowvram = True
    for _ in range(2):
        assert same(host.generate(), reference(1))
    assert count("plans run") == 5 and not status()["reasons"]


def test_hypertile_that_is_off_again_is_no_patch(host):
    unet = started(host)
    hypertile(host)
    vars(unet.middle_block[1].transformer_blocks[0].attn1)["__webui_hypertile_params"].enabled = False
    assert same(host.generate(), reference(1))
    assert count("plans run") == 2


@pytest.mark.parametrize("kind", [a1111.A1111Hooks, a1111.A1111TextHooks])
def test_what_is_known_of_a_network_keeps_none_of_its_layers(host, kind):
    started(host)
    unet = standin.make_unet(3)
    standin.name_layers(unet)
    hypertile(host, unet)
    hooks = kind(unet)
    hooks.new_pass()
    host.lora(a=1.0)
    hooks.prepare()
    left = [weakref.ref(layer) for layer in unet.modules()]
    del unet
    gc.collect()
    assert not [layer for each in left if (layer := each()) is not None]
    assert hooks.bypass_reason() is None
    # no layer is there to be changed
    hooks.prepare()


def test_an_unknown_patch_on_a_layer_goes_to_the_original(host):
    unet = started(host)
    host.generate()
    layer = unet.middle_block[1].transformer_blocks[0].attn1
    was = layer.forward
    layer.forward = lambda *args, **kwargs: 0 * was(*args, **kwargs)
    before = count("plans run")
    changed = host.generate()
    assert count("plans run") == before and not same(changed, reference(1))
    del layer.forward
    assert same(host.generate(), reference(1))


def test_another_attention_is_another_behaviour(host):
    from ldm.modules.attention import CrossAttention

    started(host)
    host.generate()
    own = CrossAttention.forward
    try:
        CrossAttention.forward = standin.halved(own)
        changed = host.generate()
        assert same(changed, untouched(1))
    finally:
        CrossAttention.forward = own
    assert count("captures") == 2
    assert same(host.generate(), reference(1))
    assert count("captures") == 2


def test_a_class_that_a_script_of_the_users_patches_goes_to_the_original(host):
    from ldm.modules.attention import BasicTransformerBlock

    started(host)
    host.generate()
    own, state, before = BasicTransformerBlock.forward, {"k": 1.0}, count("plans run")
    try:
        BasicTransformerBlock.forward = lambda self, *x, **k: own(self, *x, **k) * state["k"]
        images = [host.generate() for state["k"] in (1.0, 3.0)]
        assert same(images[1], untouched(1), 1e-5)
    finally:
        BasicTransformerBlock.forward = own
    assert not same(*images) and count("plans run") == before
    (reason,) = status()["reasons"]
    assert "has a foreign forward of its class" in reason and "in adapters/test_a1111.py" in reason
    assert same(host.generate(), reference(1)) and count("captures") == 1


def test_a_setting_takes_effect_at_the_next_generation(host):
    unet = started(host)
    host.generate()
    parameters = {name: p.detach().clone() for name, p in unet.named_parameters()}
    host.opts.data["sfast_enabled"] = False
    before = count("plans run")
    assert torch.equal(host.generate(), reference(1))
    assert count("plans run") == before and status()["accelerators"] == [] and status()["enabled"] is False
    assert "forward" not in vars(unet)
    for name, parameter in unet.named_parameters():
        assert torch.equal(parameter, parameters[name])
        # in memory of its own, not a view into what was packed
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    host.opts.data["sfast_enabled"] = True
    host.opts.data["sfast_check"] = "always"
    assert same(host.generate(), reference(1))
    assert accelerator_of(unet).config.check == "always"


def test_unloading_and_loading_scripts_again(host):
    unet = started(host)
    host.generate()
    host.fire("script_unloaded")
    assert "forward" not in vars(unet)
    host.forget_callbacks()
    a1111.start("again")
    assert status()["version"] == "again"
    assert same(host.generate(), reference(1))
    assert count("plans run") == 2


def test_scripts_loaded_again_without_the_unload(host):
    unet = started(host)
    host.generate()
    host.forget_callbacks()
    a1111.start("again")
    assert accelerator_of(unet) is None
    assert same(host.generate(), reference(1))


def test_a_fault_of_ours_goes_to_the_report_and_the_image_goes_on(host, monkeypatch):
    started(host)

    def fault(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(a1111.Attachment, "follow", fault)
    assert same(host.generate(), reference(1))
    assert "broken on purpose" in status()["last_error"]["message"]
    host.errors.clear()


def test_without_the_lora_extension(host):
    del sys.modules["networks"]
    started(host)
    assert same(host.generate(), reference(1))
    assert count("plans run") == 2
