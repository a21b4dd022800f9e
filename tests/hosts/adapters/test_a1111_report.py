"""What the report says under AUTOMATIC1111 while the WebUI or an extension does what cannot be accelerated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from ldm.modules.attention import SpatialTransformer
from ldm.modules.diffusionmodules.openaimodel import TimestepBlock
from ldm.modules.diffusionmodules.util import timestep_embedding

from hosts.adapters.test_a1111 import count, host, reference, same, started, status, unet_of  # noqa: F401
from hosts.standins import a1111 as standin
from sfast_ext import accelerator_of

SCALER = """
class Scaler(torch.nn.Module):
    def __init__(self, scale, block):
        super().__init__()
        self.scale, self.block = scale, block

    def forward(self, x, *args):
        return self.block(torch.nn.functional.interpolate(x, scale_factor=self.scale), *args)
"""


def scaler():
    """The class that kohya-hiresfix exchanges blocks for, from the folder that it lies in."""
    scope = {"torch": torch, "__name__": "khrfix.py"}
    exec(compile(SCALER, "/webui/extensions/sd-webui-kohya-hiresfix/scripts/khrfix.py", "exec"), scope)
    return scope["Scaler"]


def rescaled(host, until, **options):  # noqa: F811
    """An image under kohya-hiresfix, which scales what the blocks get in the first steps."""
    unet, kind = unet_of(host), scaler()

    def lay(params):
        for blocks, scale in ((unet.input_blocks, 0.5), (unet.output_blocks, 2.0)):
            place = 1 if blocks is unet.input_blocks else len(blocks) - 2
            laid = type(blocks[place]) is kind
            if params.denoiser.step < until and not laid:
                blocks[place] = kind(scale, blocks[place])
            elif params.denoiser.step < until:
                # smooth scaling
                blocks[place].scale = scale
            elif laid:
                blocks[place] = blocks[place].block

    # after ours, as it registers for each image
    host.callbacks["cfg_denoiser"].append(lay)
    try:
        return host.generate(**options)
    finally:
        host.callbacks["cfg_denoiser"].remove(lay)


def test_a_change_of_the_first_steps_costs_those_and_no_others(host):  # noqa: F811
    with standin.running() as other:
        other.load(1)
        expected = rescaled(other, 2, steps=7, size=16)
    started(host)
    for _ in range(2):
        before, calls = count("plans run"), count("fallbacks")
        assert same(rescaled(host, 2, steps=7, size=16), expected)
        assert count("fallbacks") == calls + 2
        # the first of all is the original's, from which the plan is made
        assert count("plans run") - before == (4 if not before else 5)
    assert all("Scaler.forward of the extension sd-webui-kohya-hiresfix" in reason for reason in status()["reasons"])


def test_reasons_are_of_the_last_images(host):  # noqa: F811
    started(host)
    host.shared.loaded_hypernetworks = [SimpleNamespace(name="anime")]
    for _ in range(4):
        host.generate()
    ((reason, calls),) = status()["reasons"].items()
    assert "anime" in reason and calls == 6
    host.shared.loaded_hypernetworks = []
    host.generate()
    assert list(status()["reasons"].values()) == [3]
    host.generate()
    assert status()["reasons"] == {} and list(status()["reasons_since_start"].values()) == [12]


def test_an_error_that_the_webui_meets_itself_is_none_of_ours(host, monkeypatch):  # noqa: F811
    started(host)
    host.generate()
    apply = host._apply_lora

    def failing(layer):
        if len(host.networks.loaded_networks) and getattr(layer, "network_layer_name", None):
            # as 1.10.1 does, once a LoRA with a bias was used before another
            raise RuntimeError("no backup bias found and current bias are not unchanged")
        apply(layer)

    monkeypatch.setattr(host, "_apply_lora", failing)
    monkeypatch.setattr(host.networks, "network_apply_weights", failing)
    host.lora(biased=1.0)
    with pytest.raises(RuntimeError, match="no backup bias"):
        host.generate()
    host.lora()
    assert same(host.generate(), reference(1))
    assert status()["last_error"] is None and count("errors") == 0
    assert not [event for event in status()["events"] if "no backup bias" in event["message"]]


def test_an_attribute_that_vanished_is_one_event(host, monkeypatch):  # noqa: F811
    started(host)
    host.generate()
    before = len(status()["events"])
    options = host.opts
    del host.shared.__dict__["opts"]
    for _ in range(5):
        assert same(host.generate(), reference(1))
    host.shared.__dict__["opts"] = options
    events = status()["events"][before:]
    assert len(events) == 1 and "no attribute 'opts'" in events[0]["message"]
    assert len(host.errors) == 5
    host.errors.clear()


def test_a_setting_given_as_text_is_what_the_status_says(host):  # noqa: F811
    unet = started(host)
    for text, on in (("false", False), ("true", True), ("false", False), ("perhaps", False)):
        host.opts.data["sfast_enabled"] = text
        assert same(host.generate(), reference(1))
        assert status()["enabled"] == on and (accelerator_of(unet) is not None) == on
    (message,) = [event["message"] for event in status()["events"] if event["stage"] == "settings"]
    told = "sfast_enabled (Make images faster with Stable Fast) = 'perhaps' is not valid; False stays in use."
    assert message.startswith(told)


def merge_tokens(model, ratio):
    """As the WebUI does by tomesd: classes made anew, and a note that stays when they are gone."""
    unet = model.model.diffusion_model
    for module in unet.modules():
        if hasattr(module, "_tome_info"):
            for hook in module._tome_info["hooks"]:
                hook.remove()
            module._tome_info["hooks"].clear()
        if type(module).__name__ == "ToMeBlock":
            module.__class__ = module._parent
    model.applied_token_merged_ratio = ratio
    if not ratio:
        return
    note = unet._tome_info = {"size": None, "hooks": [], "args": {"ratio": ratio, "generator": None}}

    def look(module, args):
        note["size"] = tuple(args[0].shape[2:])

    note["hooks"].append(unet.register_forward_pre_hook(look))
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            parent = type(module)
            half = {"_parent": parent, "_forward": lambda self, x, *a: x + ratio * self._parent._forward(self, x, *a)}
            module.__class__ = type("ToMeBlock", (parent,), half)
            module._tome_info = note


def test_plans_are_found_again_when_token_merging_is_taken_away(host):  # noqa: F811
    started(host)
    expected = [host.generate(size=size) for size in (8, 16)]
    captures = count("captures")
    for ratio in (0.5, 0.3):
        merge_tokens(host.model_data.sd_model, ratio)
        before = count("plans run")
        merged = host.generate()
        assert count("plans run") == before and not same(merged, expected[0], 0.01)
        assert any("token merging is on" in reason for reason in status()["reasons"])
        merge_tokens(host.model_data.sd_model, 0)
        for size, image in zip((8, 16), expected):
            assert same(host.generate(size=size), image)
        assert count("captures") == captures and count("plans run") == before + 6


def cached(host, run, **options):  # noqa: F811
    """An image under a forward like DeepCache's: it runs the layers of the blocks, or takes what they gave last."""
    unet, kept = unet_of(host), {}

    def forward(x, timesteps=None, context=None):
        emb = unet.time_embed(timestep_embedding(timesteps, unet.model_channels, repeat_only=False))
        h, hs = x, []
        for i, block in enumerate(unet.input_blocks):
            if i <= 1 or i not in kept:
                kept[i] = run(block, h, emb, context)
            h = kept[i]
            hs.append(h)
        if "middle" not in kept:
            kept["middle"] = run(unet.middle_block, h, emb, context)
        h = kept["middle"]
        for block in unet.output_blocks:
            h = run(block, torch.cat([h, hs.pop()], dim=1), emb, context)
        return unet.out(h)

    forward.__module__ = "deepcache"
    before = unet.forward
    unet.forward, unet._deepcache_hooked = forward, True
    try:
        return host.generate(**options)
    finally:
        unet.forward, unet._deepcache_hooked = before, False


def by_layers(block, h, emb, context):
    for layer in block:
        if isinstance(layer, TimestepBlock):
            h = layer(h, emb)
        else:
            h = layer(h, context) if isinstance(layer, SpatialTransformer) else layer(h)
    return h


def as_a_whole(block, h, emb, context):
    return block(h, emb, context)


def expected_of(run):
    with standin.running() as other:
        other.load(1)
        return cached(other, run, steps=4)


def unet_status():
    (unet,) = [each for each in status()["accelerators"] if each["name"] == "unet"]
    return unet


def test_under_a_forward_that_calls_no_block_the_report_says_that_nothing_is_accelerated(host):  # noqa: F811
    started(host)
    plain = host.generate()
    before = count("plans run")
    assert same(cached(host, by_layers, steps=4), expected_of(by_layers))
    assert count("plans run") == before
    (reason,) = status()["reasons"]
    assert reason.startswith("deepcache.") and "replaces the model's forward and calls none of its blocks" in reason
    # the last step is told of by the first of the next image
    assert status()["reasons"][reason] == 3 and unet_status()["idle"] == reason
    assert [part["calls"] for part in unet_status()["parts"]] == [0] * len(unet_status()["parts"])
    assert not any("its blocks are accelerated" in event["message"] for event in status()["events"])
    assert same(host.generate(), plain)
    assert count("plans run") == before + 3 and count("captures") == 1
    assert status()["reasons"] == {reason: 4} and unet_status()["idle"] is None


def test_a_forward_that_calls_the_models_own_is_no_reason(host):  # noqa: F811
    started(host)
    plain = host.generate()

    unet = host.shared.sd_model.model.diffusion_model
    original = unet.forward
    unet.forward = lambda *args, **kwargs: original(*args, **kwargs)
    try:
        ran = count("plans run")
        assert same(host.generate(), plain)
    finally:
        unet.forward = original
    assert count("plans run") > ran and status()["reasons"] == {} and unet_status()["idle"] is None


def test_under_a_forward_that_calls_blocks_their_counters_are_in_the_status(host):  # noqa: F811
    started(host)
    for _ in range(2):
        assert same(cached(host, as_a_whole, steps=4), expected_of(as_a_whole))
    assert status()["reasons"] == {} and unet_status()["idle"] is None
    calls = {part["name"]: part["calls"] for part in unet_status()["parts"]}
    assert calls["unet.input_blocks.1"] == calls["unet.output_blocks.0"] == 8
    assert calls["unet.middle_block"] == 2, "what is cached is called once an image"
    for part in unet_status()["parts"]:
        assert part["replays"] == part["calls"] - part["plans"] and part["plans"] == 1
    assert count("plans run") == sum(part["replays"] for part in unet_status()["parts"])
