"""The modes of SD.Next's offload, and its settings that take effect at once, in the layouts of two releases."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hosts.standins.sdnext import HAS_GROUPS, STANDINS, Host, close, diffusers, hosted, network
from hosts.standins.sdnext import pipeline as any_pipeline
from sfast_ext.tools.lib import models

accelerate = pytest.importorskip("accelerate")
pipeline = functools.partial(any_pipeline, levels=1)
needs_groups = pytest.mark.skipif(not HAS_GROUPS, reason="this diffusers cannot offload by groups")

AT_ONCE = {
    "diffusers_offload_never": "UNet2DConditionModel",
    "diffusers_offload_always": "UNet2DConditionModel",
    "diffusers_offload_min_gpu_memory": 0.5,
    "diffusers_offload_max_gpu_memory": 0.9,
    "diffusers_offload_pre": False,
}
"""Settings of balanced offload, and another value of each."""


@pytest.fixture(params=STANDINS)
def host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Host]:
    yield from hosted(monkeypatch, request.param)


@pytest.fixture
def august(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from hosted(monkeypatch, "august")


def tiny_vae() -> Any:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return models.randomise(vae, 1).eval()


def hooked(module: nn.Module) -> bool:
    """Whether diffusers has hooks on its layers."""
    return any(vars(m).get("_diffusers_hook") and vars(m)["_diffusers_hook"].hooks for m in module.modules())


def unet_of(host: Host) -> Any:
    return host.modeldata.model_data.sd_model.unet


def accelerated(host: Host, **job: Any) -> torch.Tensor:
    """An image that plans made."""
    runs = host.runs()
    image = host.image(**job)
    assert host.runs() > runs, host.reasons()
    return image


def bypassed(host: Host, words: str, **job: Any) -> torch.Tensor:
    """An image that the host made by itself, with a reason."""
    runs = host.runs()
    image = host.image(**job)
    assert host.runs() == runs and words in host.reasons(), host.reasons()
    return image


def to_mode(host: Host, mode: str) -> None:
    """Another mode, and the model loaded anew under it."""
    host.opts.diffusers_offload_mode = mode
    host.sd_models.reload_model_weights(pipeline)


def test_the_function_is_wrapped_where_it_is_looked_up(host: Host) -> None:
    assert not host.session.installation.lost
    split = hasattr(host.sd_offload, "reapply_offload")
    owner = importlib.import_module("modules.sd_offload_balanced") if split else host.sd_offload
    assert hasattr(owner.move_module_to_cpu, "__wrapped__")
    if split:
        assert not hasattr(host.sd_offload, "move_module_to_cpu")
    host.adapter.SDNextSession.stop()
    assert not hasattr(owner.move_module_to_cpu, "__wrapped__")


def another_signature(move: Any) -> Any:
    def moved(what: Any, op: str = "", force: bool = False) -> None:
        move(what, op=op, force=force)

    moved.__module__ = move.__module__
    return moved


@pytest.mark.long(but=[0])
def test_an_offload_that_is_not_known_is_bypassed_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.adapter.SDNextSession.stop()
    split = hasattr(host.sd_offload, "reapply_offload")
    owner = importlib.import_module("modules.sd_offload_balanced") if split else host.sd_offload
    monkeypatch.setattr(owner, "move_module_to_cpu", another_signature(owner.move_module_to_cpu))
    host.adapter.start("0.0")
    assert [feature.name for feature in host.session.installation.lost] == ["offload"]
    assert not hasattr(accelerate.dispatch_model, "__wrapped__")
    host.sd_models.load_model(pipeline())
    expected = host.stock()
    close(accelerated(host), expected)
    to_mode(host, "balanced")
    close(bypassed(host, "offload mode 'balanced' works in a way that is not known"), expected)
    to_mode(host, "none")
    close(accelerated(host), expected)


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("mode", ["none", "balanced"])
def test_an_image_and_a_lora(host: Host, mode: str) -> None:
    host.opts.diffusers_offload_mode = mode
    host.sd_models.load_model(pipeline())
    layers = network(unet_of(host))
    jobs = [{"network": layers, "multiplier": m} for m in (0.0, 1.0, 0.0)]
    for job, expected in [(job, host.stock(**job)) for job in jobs]:
        close(accelerated(host, **job), expected)
    assert host.captures() == 1


@needs_groups
def test_group_offload_is_bypassed_and_left(host: Host) -> None:
    host.opts.diffusers_offload_mode = "group"
    host.sd_models.load_model(pipeline())
    assert hooked(unet_of(host))
    expected = host.stock()
    close(bypassed(host, "offload mode 'group'"), expected)
    assert not host.status()["accelerators"]
    to_mode(host, "none")
    close(accelerated(host), expected)


def test_without_hooks_of_a_group_the_mode_does_not_matter(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    expected = host.stock()
    # as set in the page: it takes effect when the model is loaded
    host.opts.diffusers_offload_mode = "group"
    close(accelerated(host), expected)


def test_sequential_offload_is_bypassed(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    expected = accelerated(host)
    host.opts.diffusers_offload_mode = "sequential"
    close(bypassed(host, "offload mode 'sequential'"), expected)
    assert not host.status()["accelerators"]


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_setting_of_balanced_offload_that_takes_effect_at_once(august: Host, name: str) -> None:
    august.opts.diffusers_offload_mode = "balanced"
    august.sd_models.load_model(pipeline())
    unet = unet_of(august)
    layers = network(unet)
    expected = [august.stock(network=layers, multiplier=m) for m in (1.0, 0.5)]
    close(accelerated(august, network=layers, multiplier=1.0), expected[0])
    hook = unet._hf_hook
    setattr(august.opts, name, AT_ONCE[name])
    august.sd_offload.reapply_offload()
    assert unet._hf_hook is not hook
    for multiplier, image in zip((1.0, 0.5), expected):
        close(accelerated(august, network=layers, multiplier=multiplier), image)
    assert august.captures() == 1


def test_hooks_made_anew_between_the_steps(august: Host) -> None:
    august.opts.diffusers_offload_mode = "balanced"
    august.sd_models.load_model(pipeline())
    expected = august.stock(steps=5)

    def anew(_pipe: Any, step: int) -> None:
        if step in (0, 1, 3):
            august.sd_offload.reapply_offload()

    accelerated(august, steps=5)
    for _ in range(2):
        close(accelerated(august, steps=5, each_step=anew), expected)
    assert august.captures() == 1


@pytest.mark.long(but=[1])
@needs_groups
@pytest.mark.parametrize("never", ["unet", "UNet2DConditionModel", "vae unet"])
def test_a_resident_unet_is_accelerated_under_group_offload(august: Host, never: str) -> None:
    august.opts.diffusers_offload_mode = "group"
    august.opts.diffusers_offload_never = never
    august.sd_models.load_model(pipeline())
    assert not hooked(unet_of(august))
    close(accelerated(august), august.stock())


def change(august: Host, **settings: Any) -> None:
    """Settings, and what the host does after they were changed."""
    for name, value in settings.items():
        setattr(august.opts, name, value)
    august.sd_offload.reapply_offload()


@needs_groups
def test_group_offload_comes_and_goes_without_a_load(august: Host) -> None:
    august.opts.diffusers_offload_mode = "balanced"
    august.sd_models.load_model(pipeline())
    unet = unet_of(august)
    layers = network(unet)
    job: dict[str, Any] = {"network": layers, "multiplier": 1.0}
    expected = august.stock(**job)
    close(accelerated(august, **job), expected)
    change(august, diffusers_offload_mode="group")
    # laid over the forward that was there: it is released in the next image
    assert hooked(unet)
    for _ in range(2):
        close(bypassed(august, "offload mode 'group'", **job), expected)
    assert not august.status()["accelerators"]
    change(august, group_offload_type="block_level")
    close(bypassed(august, "offload mode 'group'", **job), expected)
    change(august, diffusers_offload_never="unet")
    assert not hooked(unet) and any("_diffusers_hook" in vars(m) for m in unet.modules())
    close(accelerated(august, **job), expected)
    change(august, diffusers_offload_never="")
    close(bypassed(august, "offload mode 'group'", **job), expected)
    change(august, diffusers_offload_mode="balanced")
    for multiplier in (1.0, 0.0, 1.0):
        job["multiplier"] = multiplier
        close(accelerated(august, **job), august.stock(**job))
    august.stock()
    assert august.adapter.accelerator_of(unet) is None


@needs_groups
def test_hooks_of_a_group_in_the_middle_of_an_image(august: Host) -> None:
    august.sd_models.load_model(pipeline())
    expected = august.stock(steps=5)
    accelerated(august, steps=5)

    def in_groups(_pipe: Any, step: int) -> None:
        if step == 2:
            change(august, diffusers_offload_mode="group")

    close(august.image(steps=5, each_step=in_groups), expected)
    close(bypassed(august, "offload mode 'group'", steps=5), expected)


def test_what_is_brought_for_each_call_is_bypassed(august: Host) -> None:
    august.sd_models.load_model(pipeline())
    expected = accelerated(august)
    group = importlib.import_module("modules.sd_offload_group")
    group.add_hook_to_module(unet_of(august), group.OnDemandHook())
    unet_of(august).sdnext_ondemand = True
    close(bypassed(august, "offload mode 'group'"), expected)
    unet_of(august).sdnext_ondemand = False
    close(accelerated(august), expected)


@needs_groups
@pytest.mark.usefixtures("vae_plans_at_once")
def test_a_vae_that_is_brought_on_demand_runs_by_itself_beside_an_accelerated_unet(august: Host) -> None:
    august.opts.diffusers_offload_mode = "group"
    august.opts.diffusers_offload_never = "unet"
    pipe = pipeline()
    pipe.vae = tiny_vae()
    august.sd_models.load_model(pipe)
    assert pipe.vae.sdnext_ondemand
    expected = august.stock()
    for _ in range(3):
        close(accelerated(august), expected)
    assert [each["name"] for each in august.status()["accelerators"]] == ["unet"]
    change(august, diffusers_offload_never="unet vae")
    for _ in range(3):
        close(accelerated(august), expected)
    assert len(august.status()["accelerators"]) > 1


NOTES = ("sdnext_group_offload_sig", "sdnext_group_offload_pin", "sdnext_group_offload_pin_limit", "sdnext_ondemand")


@pytest.mark.long(but=[1, 2])
@pytest.mark.parametrize("name", NOTES)
def test_what_the_offload_notes_on_modules_needs_no_new_plan(august: Host, name: str) -> None:
    august.sd_models.load_model(pipeline())
    accelerated(august)
    for value in (None, False, 0.0, None):
        setattr(unet_of(august), name, value)
        setattr(unet_of(august).mid_block, name, value)
        accelerated(august)
    assert august.captures() == 1


def kinds_of_attention() -> dict[str, Callable[..., torch.Tensor]]:
    exact = torch._C._nn.scaled_dot_product_attention

    def doubled(q: Any, k: Any, v: Any, mask: Any = None, **more: Any) -> torch.Tensor:
        return exact(q, k, 2 * v, mask, **more)

    def halved(q: Any, k: Any, v: Any, mask: Any = None, **more: Any) -> torch.Tensor:
        return exact(q, k, 0.5 * v, mask, **more)

    return {"doubled": doubled, "halved": halved}


@pytest.fixture
def attention(august: Host) -> Iterator[Any]:
    module = importlib.import_module("modules.attention")
    yield module
    module.install_router()


def test_the_router_of_attention(august: Host, attention: Any) -> None:
    august.sd_models.load_model(pipeline())
    kinds = kinds_of_attention().items()
    entries = {name: attention.Entry(lambda q, *_: q.shape[-1] > 1, call) for name, call in kinds}
    expected = []
    for name in ("doubled", "halved"):
        attention.install_router(entries[name])
        expected.append(august.stock())
        close(accelerated(august), expected[-1])
    attention.install_router()
    close(accelerated(august), august.stock())
    attention.install_router(entries["doubled"], entries["halved"])
    close(accelerated(august), expected[0])
    attention.install_router(entries["halved"])
    close(accelerated(august), expected[1])
    assert (expected[0] - expected[1]).abs().max() > 0.01


def test_a_router_passes_on_what_none_of_its_kinds_takes(august: Host, attention: Any) -> None:
    august.sd_models.load_model(pipeline())
    expected = august.stock()
    close(accelerated(august), expected)
    for call in kinds_of_attention().values():
        attention.install_router(attention.Entry(lambda q, *_: q.shape[-2] > 1 << 20, call))
        close(accelerated(august), expected)


def test_sparse_attention_is_bypassed_while_it_is_on(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    expected = host.stock()
    close(accelerated(host), expected)
    host.opts.sparse_attention_enabled = True
    unet_of(host).sdnext_layout_hook = unet_of(host).register_forward_pre_hook(
        lambda _module, _args, _kwargs: None, with_kwargs=True
    )
    close(bypassed(host, "sparse attention"), expected)
    host.opts.sparse_attention_enabled = False
    # the hook stays
    close(accelerated(host), expected)
    assert host.captures() == 1


def of_sdnq(module: str) -> type:
    return type("SDNQLinear", (nn.Linear,), {"__module__": module})


@pytest.mark.parametrize("module", ["sdnq.layers", "modules.sdnq.layers", "sdnq.layers.linear"])
def test_a_layer_of_sdnq_is_told_by_its_class(host: Host, module: str) -> None:
    host.sd_models.load_model(pipeline())
    layer = unet_of(host).mid_block.attentions[0].proj_in
    kind = type(layer)
    base = kind if issubclass(kind, nn.Module) else nn.Linear
    layer.__class__ = type(f"SDNQ{base.__name__}", (base,), {"__module__": module})
    expected = host.stock()
    close(bypassed(host, "the model is quantised (SDNQ, "), expected)
    layer.__class__ = kind
    close(accelerated(host), expected)


@pytest.mark.parametrize("module", ["sdnq_tools", "mysdnq.layers", "modules.other"])
def test_another_package_is_not_sdnq(host: Host, module: str) -> None:
    refusals = importlib.import_module("sfast_ext.hosts.sdnext.refusals")
    layer = of_sdnq(module)(2, 2)
    assert refusals.model_bypass_reason(layer, SimpleNamespace(diffusers_offload_mode="none")) is None
