"""The SD.Next adapter against a stand-in that reproduces the host's order of events around a real UNet."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hosts.standins.sdnext import Host, close, hosted, network, pipeline
from sfast_ext.hosts import gpu_room

accelerate = pytest.importorskip("accelerate")
attention_processor = importlib.import_module("diffusers.models.attention_processor")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from hosted(monkeypatch)


def forwards(unet: nn.Module) -> list[Any]:
    return [(n, m.__dict__.get("forward"), m.__dict__.get("_old_forward")) for n, m in unet.named_modules()]


def test_a_job_goes_on_if_the_host_has_forgotten_its_name(host: Host) -> None:
    queue = importlib.import_module("modules.call_queue")
    assert not host.status()["busy"]
    with queue.queue_lock:
        # as after the end of a part of it
        host.shared.state.job = ""
        assert host.status()["busy"]
    assert not host.status()["busy"]


def test_detects_the_host_by_its_modules(host: Host) -> None:
    assert host.adapter.detect()


def test_who_its_own_api_asks_for_a_password_is_asked_here(host: Host) -> None:
    session = host.adapter.SDNextSession.running
    assert session.api_passwords() == {}
    # as of --auth one:, which its page does not heed
    host.shared.api = SimpleNamespace(credentials={"one": ""})
    assert session.api_passwords() == {"one": ""}


def test_an_image_is_made_by_a_plan_and_is_the_same(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    close(host.image(steps=4), host.stock(steps=4))
    assert host.captures() == 1
    assert host.runs() >= 3
    assert host.status()["model"] == "tiny-0"


def test_lora_changes_reach_the_plan_without_a_new_capture(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    layers = network(host.modeldata.model_data.sd_model.unet)
    jobs = [{"network": layers, "multiplier": m} for m in (0.0, 1.0, 0.5, 0.0)]
    expected = [host.stock(**job) for job in jobs]
    assert (expected[1] - expected[0]).abs().max() > 0.01
    for job, image in zip(jobs, expected):
        close(host.image(**job), image)
    assert host.captures() == 1
    assert host.session.report.counter("weights_copied") > 0


def test_another_size_is_another_plan(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    for size in ((8, 8), (12, 8), (8, 8)):
        job = {"width": size[0], "height": size[1]}
        image = host.image(**job)
        assert image.shape[-2:] == size[::-1]
    assert host.captures() == 2


def test_unticking_gives_the_forward_and_the_weights_back(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    unet = host.modeldata.model_data.sd_model.unet
    host.session.release_models()
    before = forwards(unet), {n: (p.stride(), p.clone()) for n, p in unet.named_parameters()}
    host.image()
    assert host.adapter.accelerator_of(unet) is not None
    runs = host.runs()
    host.stock()
    assert host.runs() == runs
    assert forwards(unet) == before[0]
    storages = [p.untyped_storage().data_ptr() for p in unet.parameters()]
    assert len(set(storages)) == len(storages)
    for name, parameter in unet.named_parameters():
        assert parameter.stride() == before[1][name][0]
        assert torch.equal(parameter, before[1][name][1])
    host.image()
    assert host.runs() > runs


def test_balanced_offload_keeps_plans_under_a_hook_that_comes_and_goes(host: Host) -> None:
    host.opts.diffusers_offload_mode = "balanced"
    # with this off, at each job
    host.opts.diffusers_offload_pre = False
    host.sd_models.load_model(pipeline())
    unet = host.modeldata.model_data.sd_model.unet
    layers = network(unet)
    expected = host.stock(network=layers, multiplier=1.0)
    for _ in range(3):
        close(host.image(network=layers, multiplier=1.0), expected)
        assert "_hf_hook" in unet.__dict__
        assert host.adapter.accelerator_of(unet) is not None
    assert host.captures() == 1
    host.opts.diffusers_offload_mode = "none"
    host.sd_offload.disable_offload(host.modeldata.model_data.sd_model)
    close(host.image(network=layers, multiplier=1.0), expected)
    assert host.captures() == 1
    host.stock()
    assert host.adapter.accelerator_of(unet) is None
    assert getattr(unet.__dict__.get("forward"), "__func__", None) in (None, type(unet).forward)


def test_hooks_that_only_move_arguments_are_vouched_for(host: Host) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    host.sd_models.load_model(pipeline())
    unet = host.modeldata.model_data.sd_model.unet
    for module in unet.modules():
        hook = hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
        hooks.add_hook_to_module(module, hook, append=True)
    close(host.image(), host.stock())
    assert host.runs() > 0
    unet.mid_block._hf_hook.offload = True
    runs = host.runs()
    host.image()
    assert host.runs() == runs and "restart SD.Next" in host.reasons()
    unet.hf_device_map = {"mid_block": "cpu", "": 0}
    host.image()
    assert host.runs() == runs and "do not fit on the GPU" in host.reasons()
    unet.mid_block._hf_hook.offload = False  # it could not be taken off as it is


@pytest.mark.parametrize("room", [0, 64 << 30])
def test_offload_by_models_is_lived_with_if_there_is_room(
    host: Host, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_room, "free_bytes", lambda: room)
    host.opts.diffusers_offload_mode = "model"
    host.sd_models.load_model(pipeline())
    unet = host.modeldata.model_data.sd_model.unet
    hook = accelerate.cpu_offload_with_hook(unet, execution_device="cpu")[1]
    images = []
    for _ in range(2):
        images.append(host.image())
        hook.offload()
    assert (host.runs() > 0) == (room > 0) and ("offload mode 'model'" in host.reasons()) == (room == 0)
    for image in images:
        close(image, host.stock())


@pytest.mark.parametrize("mode", ["none", "balanced"])
@pytest.mark.parametrize("room", [0, 64 << 30])
def test_hooks_of_offload_by_models_outlive_their_mode(
    host: Host, mode: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.opts.diffusers_offload_mode = mode
    host.sd_models.load_model(pipeline())
    expected = host.stock()
    close(host.image(), expected)
    runs = host.runs()
    assert runs > 0
    unet = host.modeldata.model_data.sd_model.unet
    hook = accelerate.cpu_offload_with_hook(unet, execution_device="cpu")[1]
    monkeypatch.setattr(gpu_room, "free_bytes", lambda: room)
    for _ in range(2):
        close(host.image(), expected)
        hook.offload()
    assert (host.runs() > runs) == (room > 0) and ("as offload mode 'model' does" in host.reasons()) == (room == 0)
    if not room:
        assert "restart SD.Next" in host.reasons() and not host.status()["accelerators"]


def free_u(s1: float) -> Callable[[Any], None]:
    def apply(pipe: Any) -> None:
        for block in pipe.unet.up_blocks:
            block.s1, block.s2, block.b1, block.b2 = s1, 0.2, 1.3, 1.4

    return apply


def no_free_u(pipe: Any) -> None:
    for block in pipe.unet.up_blocks:
        block.s1 = block.s2 = block.b1 = block.b2 = None


def test_freeu_is_part_of_the_key(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    for factor in (None, 0.9, 0.5, None, 0.9):
        job = {"apply": no_free_u if factor is None else free_u(factor), "unapply": no_free_u}
        close(host.image(**job), host.stock(**job))


def test_hypertile_runs_the_original(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    host.image()
    runs = host.runs()
    host.image(hypertile_enabled=True)
    assert host.runs() == runs
    assert "HyperTile" in host.reasons()
    host.image()
    assert host.runs() > runs


class StableDiffusionPAGPipeline(SimpleNamespace):
    """Stands for SD.Next's, which is told by its name. Its page sends -1 if PAG is not wanted."""


@pytest.mark.parametrize(
    ("scale", "accelerated"), [(-1.0, True), (0, True), (0.001, False), (3.0, False), (None, False)]
)
def test_only_a_pipeline_that_perturbs_attention_runs_the_original(host: Host, scale: Any, accelerated: bool) -> None:
    host.sd_models.load_model(StableDiffusionPAGPipeline(**vars(pipeline()), _cfg_true=scale))
    close(host.image(), host.stock())
    assert (host.runs() > 0) is accelerated
    assert ("perturbed attention guidance" in host.reasons()) is not accelerated


class TokenMergeAttentionProcessor(attention_processor.AttnProcessor2_0):
    """Stands for ToDo's, which is told by its name."""


def test_token_merging_runs_the_original_and_what_it_leaves_behind_does_not_matter(host: Host) -> None:
    def patch(pipe: Any) -> None:
        pipe.unet._tome_info = info = {"timestep": None}
        pipe.unet.register_forward_pre_hook(lambda _module, args: info.update(timestep=args[1].item()))
        set_processor(pipe, TokenMergeAttentionProcessor())

    def unpatch(pipe: Any) -> None:
        set_processor(pipe, attention_processor.AttnProcessor2_0())

    def set_processor(pipe: Any, processor: Any) -> None:
        for name, module in pipe.unet.named_modules():
            if name.endswith("attn1"):
                module.processor = processor

    host.sd_models.load_model(pipeline())
    host.image(apply=patch, unapply=unpatch, hires=True)
    assert host.runs() == 0
    assert "token merging (ToDo)" in host.reasons()
    for seed in range(3):
        close(host.image(seed=seed), host.stock(seed=seed))
    assert host.runs() >= 3


def test_an_adapters_scale_may_change_at_each_step(host: Host) -> None:
    class Scaled(nn.Module):
        """As an IP-Adapter's processor: a module with a scale that the step callback sets."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.scale = inner, [1.0]

        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.inner(attn, hidden_states, *args, **kwargs) * self.scale[0]

    def apply(pipe: Any) -> None:
        for module in pipe.unet.modules():
            if hasattr(module, "set_processor") and module is not pipe.unet:
                module.set_processor(Scaled(module.processor))

    def fade(pipe: Any, step: int) -> None:
        for module in pipe.unet.modules():
            if isinstance(module, Scaled):
                module.scale = [0.0 if step >= 1 else 1.0]

    pipe = pipeline()
    host.sd_models.load_model(pipe)
    host.shared.state.begin("setup")
    apply(pipe)

    job = {"steps": 5, "apply": lambda p: fade(p, 0), "each_step": fade}
    expected = host.stock(**job)
    for _ in range(3):
        close(host.image(**job), expected)
    assert host.runs() > 0


def test_plans_are_kept_for_an_adapter_that_is_loaded_anew(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    jobs = [{"adapter": 3}, {"adapter": 3}, {"adapter": 4}, {}, {"adapter": 3, "scale": 0.3}, {"adapter": 4}, {}]
    stock = [host.stock(**job) for job in jobs]
    assert (stock[2] - stock[0]).abs().max() > 0.01 and (stock[4] - stock[0]).abs().max() > 0.01
    captures = []
    for job, image in zip(jobs, stock):
        close(host.image(**job), image)
        captures.append(host.captures())
    # one with the adapter, one without it, one for each scale
    assert captures == [1, 1, 1, 2, 3, 3, 3]
    close(host.image(adapter=4), host.stock_of(0, adapter=4))


def test_no_object_of_an_adapter_is_held_for_a_model_that_is_gone(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    host.image(adapter=3)
    pipe = host.modeldata.model_data.sd_model
    last = weakref.ref(next(iter(host.session._ip_adapters._last[pipe.unet][True][0].values())))
    assert last() is not None
    host.sd_models.unload_model_weights()
    del pipe
    host.sd_models.load_model(pipeline(1))
    host.image()
    gc.collect()
    assert last() is None


def test_its_own_compile_and_quantised_weights_are_bypassed(host: Host) -> None:
    host.sd_models.load_model(pipeline())
    unet = host.modeldata.model_data.sd_model.unet
    unet.mid_block._compiled_call_impl = lambda *a, **k: None
    host.session.follow()
    assert "SD.Next has compiled this model" in host.reasons()
    del unet.mid_block._compiled_call_impl
    unet.mid_block.attentions[0].proj_in.sdnq_dequantizer = object()
    host.session.follow()
    assert "SDNQ" in host.reasons()
    assert not host.status()["accelerators"]
    host.sd_models_compile.deepcache_worker = object()
    host.session.follow()
    assert "DeepCache" in host.reasons()


def test_a_model_without_a_unet_is_named(host: Host) -> None:
    host.modeldata.model_data.sd_model = SimpleNamespace(transformer=nn.Linear(2, 2))
    host.session.follow()
    assert "has no UNet" in host.reasons()


def test_the_badge_s_questions_are_not_logged(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    log = importlib.import_module("modules.logger").log
    form = "API user=None code=200 http/1.1 GET {} 127.0.0.1 0.01"
    with caplog.at_level("INFO", logger=log.name):
        log.info(form.format("/sfast/v1/status"))
        log.info(form.format("/sdapi/v1/options"))
        host.adapter.SDNextSession.stop()
        log.info(form.format("/sfast/v1/status"))
    assert [record.msg.split()[5] for record in caplog.records] == ["/sdapi/v1/options", "/sfast/v1/status"]
