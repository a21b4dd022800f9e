"""Balanced offload, SD.Next's default, on cards of 8 to 24 GiB: what is accelerated, and who has the memory when."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from faulty import failing
from pairs import one_of
from pretended_card import GPU

from hosts.standins.sdnext import HAS_GROUPS, diffusers, network
from hosts.standins.sdnext_card import SD15, SDXL, STEPS, Proportions, card_host
from sfast_ext import Accelerator
from sfast_ext.hosts import system_memory
from sfast_ext.weights.arena import WeightsAway

with_vae_plans = pytest.mark.usefixtures("vae_plans_at_once")

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def open_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ExitStack() as opened:
        yield lambda *args, **kwargs: opened.enter_context(card_host(monkeypatch, *args, **kwargs))


STAYS, KEPT, BACK = "the UNet stays", "plans keep its weights", "its weights are brought back"
# GiB in use at most, in the stock WebUI and with the extension
TABLE = [
    (SD15, 8, KEPT, 2.3, 3.0),
    (SD15, 16, STAYS, 3.0, 3.2),
    (SDXL, 8, BACK, 6.1, 6.2),
    (SDXL, 12, KEPT, 6.1, 8.3),
    (SDXL, 24, STAYS, 7.6, 9.8),
]


@pytest.mark.long(but=[0, 3])
@with_vae_plans
@pytest.mark.parametrize(("like", "gib", "what", "stock_peak", "peak"), TABLE)
def test_every_job_is_accelerated(
    open_card: Any, like: Proportions, gib: int, what: str, stock_peak: float, peak: float
) -> None:
    on = open_card(gib, like)
    expected = on.stock()
    assert on.peak() == pytest.approx(stock_peak, abs=0.1)
    left = on.used()
    first = on.job(expected)
    assert first["runs"] == STEPS - 1 and first["captures"] == first["graph_captures"] == 1
    assert on.peak() < gib - 0.9
    for _ in range(2 if what == BACK else 1):
        job = on.job(expected)
        assert job["runs"] == STEPS and job["captures"] == 0
        assert job["graph_captures"] == job["memory_given_back"] == (what == BACK)
        assert bool(job["weights_away"]) == (what != STAYS)
        assert on.peak() == pytest.approx(peak, abs=0.1)
    if what == BACK:
        gc.collect()
        assert on.used() < left + 0.05 and on.card.graph_bytes == 0


@with_vae_plans
@pytest.mark.parametrize(("like", "gib"), one_of(0, (SD15, 8), (SDXL, 24)))
def test_settings_that_take_effect_at_once(open_card: Any, like: Proportions, gib: int) -> None:
    on = open_card(gib, like, release="august")
    expected = on.expected()
    on.job(expected)
    on.job(expected)
    opts, offload = on.host.opts, on.host.sd_offload
    always = opts.diffusers_offload_always
    for setting in ("AutoencoderKL", always):
        opts.diffusers_offload_always = setting
        offload.reapply_offload()
        for job in (on.job(expected), on.job(expected)):
            assert job["runs"] == STEPS and job["captures"] == 0
            assert on.peak() < gib - 0.9
        # also on a large card: the VAE, which stays there, has the hook again that moves the others off
        assert job["weights_away"]


@pytest.mark.skipif(not HAS_GROUPS, reason="this diffusers cannot offload by groups")
@pytest.mark.parametrize(("like", "gib"), one_of(1, (SD15, 12), (SDXL, 24)))
def test_a_network_that_stays_under_offload_by_groups(open_card: Any, like: Proportions, gib: int) -> None:
    on = open_card(gib, like, release="august")
    expected = on.expected()
    opts, offload = on.host.opts, on.host.sd_offload
    opts.diffusers_offload_never, opts.diffusers_offload_mode = "unet text_encoder vae", "group"
    offload.reapply_offload()
    on.job(expected)
    for _ in range(2):
        job = on.job(expected)
        assert job["runs"] == STEPS and job["captures"] == job["weights_away"] == 0
    opts.diffusers_offload_mode = "balanced"
    offload.reapply_offload()
    job = on.job(expected)
    assert job["runs"] == STEPS and job["captures"] == 0


@pytest.mark.parametrize(("like", "gib"), [(SDXL, 8)])
def test_in_bfloat16_which_is_the_default(open_card: Any, like: Proportions, gib: int) -> None:
    on = open_card(gib, like, torch.bfloat16)
    # a CPU takes 30 times as long as in float32
    small = {"width": 8, "height": 8}
    expected = on.stock(**small)
    assert on.unet.dtype == expected.dtype == torch.bfloat16
    assert on.job(expected, **small)["captures"] == 1
    job = on.job(expected, **small)
    assert job["runs"] == STEPS and job["captures"] == 0


@with_vae_plans
def test_a_large_image_gets_the_memory_of_plans(open_card: Any) -> None:
    on = open_card(12, SDXL)
    small = on.expected()
    large = on.stock(width=44, height=44)
    assert on.peak() > 6
    on.job(small)
    assert on.job(small)["memory_given_back"] == 0
    assert on.job(large, width=44, height=44)["memory_given_back"] == 1
    # the other size's graph went as well, and returns without a new plan
    job = on.job(small)
    assert (job["runs"], job["captures"], job["graph_captures"]) == (STEPS, 0, 1)
    job = on.job(large, width=44, height=44)
    assert (job["runs"], job["captures"], job["memory_given_back"]) == (STEPS, 0, 1)


@pytest.mark.long
def test_a_hires_pass_is_accelerated_too(open_card: Any) -> None:
    on = open_card(8, SDXL)
    expected = on.expected(hires=True)
    on.job(expected, hires=True)
    job = on.job(expected, hires=True)
    assert (job["runs"], job["captures"]) == (2 * STEPS, 0)


@pytest.mark.parametrize("gib", one_of(0, 8, 12))
def test_lora_is_followed_while_the_weights_come_and_go(open_card: Any, gib: int) -> None:
    on = open_card(gib, SDXL)
    layers = network(on.unet)
    jobs: list[dict[str, Any]] = [{"network": layers, "multiplier": m} for m in (0.0, 1.0, 0.5, 0.0)]
    expected = [on.stock(**job) for job in jobs]
    assert (expected[1] - expected[0]).abs().max() > 0.01
    for job, image in zip(jobs, expected):
        on.job(image, **job)
    assert on.host.captures() == 1


@pytest.mark.long
@pytest.mark.parametrize(("like", "gib"), [(SDXL, 8)])
def test_a_checkpoint_of_the_same_architecture_keeps_the_plans(open_card: Any, like: Proportions, gib: int) -> None:
    on = open_card(gib, like)
    expected = [on.expected(seed) for seed in (0, 1)]
    on.job(expected[0])
    for seed in (1, 0):
        on.host.sd_models.reload_model_weights(lambda seed=seed: on.pipeline(seed))
        for _ in range(2):
            job = on.job(expected[seed])
            assert job["captures"] == 0 and job["runs"] == STEPS
    assert on.host.captures() == 1


@with_vae_plans
@pytest.mark.parametrize("gib", [12])
def test_what_did_not_change_is_not_copied_back(open_card: Any, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on = open_card(gib, SDXL)
    layers = network(on.unet)
    expected = {m: on.stock(network=layers, multiplier=m) for m in (0.0, 1.0)}
    pipeline = on.host.modeldata.model_data.sd_model
    moved = [*pipeline.unet.parameters(), *pipeline.text_encoder.parameters(), *pipeline.vae.parameters()]
    report = on.host.session.report

    def copied(multiplier: float) -> int:
        put_back = report.counter("weights_put_back")
        on.job(expected[multiplier], network=layers, multiplier=multiplier)
        return len(moved) - (report.counter("weights_put_back") - put_back)

    # plans lay weights out; a VAE leaves when the next job begins
    for _ in range(3):
        copied(0.0)
    # SD.Next applies networks while the weights are in system memory
    assert [copied(m) for m in (0.0, 1.0, 1.0, 0.0)] == [0, 0, 0, 0]
    monkeypatch.setattr(system_memory, "available_bytes", lambda: system_memory.RESERVE - 1)
    copied(1.0)
    assert copied(1.0) == len(moved)


@with_vae_plans
@pytest.mark.parametrize("is_off", [False, True])
def test_unloading_frees_copies_in_system_memory(
    open_card: Any, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    on, trimmed = open_card(12, SDXL), []
    expected = on.expected()
    for _ in range(3):
        on.job(expected)
    copies = on.host.session._offload._moves._copies
    # the VAE is on the GPU until the next job begins
    assert copies.bytes
    monkeypatch.setattr(system_memory, "trim", lambda: trimmed.append(copies.bytes))
    on.host.opts.sfast_enabled = not is_off
    on.host.sd_models.unload_model_weights()
    assert copies.bytes == 0 and trimmed[-1] == 0


@with_vae_plans
def test_after_the_host_ran_out_of_memory_nothing_is_kept(open_card: Any) -> None:
    on = open_card(12, SDXL)
    expected = on.expected()
    on.job(expected)
    assert on.job(expected)["memory_given_back"] == 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(on.card.capacity, dtype=torch.uint8, device="cuda")
    # before the first, and as the UNet leaves
    for given in (2, 1):
        job = on.job(expected)
        assert (job["runs"], job["captures"], job["memory_given_back"]) == (STEPS, 0, given)
    assert "SD.Next ran out of GPU memory" in str(on.host.status()["events"])


def test_each_time_the_host_runs_out_of_memory_it_gets_what_plans_hold(open_card: Any) -> None:
    on = open_card(12, SDXL)
    expected = on.expected()
    on.job(expected)
    for _ in range(2):
        assert on.card.graph_bytes > 0
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(on.card.capacity, dtype=torch.uint8, device="cuda")
        on.host.session.follow()
        assert on.card.graph_bytes == 0
        assert on.job(expected)["runs"] == STEPS
        # as if nothing had moved it off the GPU
        on.host.session._offload._release_always = False
        on.job(expected)


@pytest.mark.long
@with_vae_plans
def test_a_model_for_captions_gets_the_memory_of_plans(open_card: Any) -> None:
    on = open_card(12, SDXL)
    expected = on.expected()
    on.job(expected)
    on.job(expected)
    assert on.used() > 6
    aux = on.host.sd_offload_aux
    aux.register_aux("captions", torch.nn.Linear(int(9 * on.scale) // 4, 1, bias=False))
    aux.move_aux_to_gpu("captions")
    assert on.card.refused == 0 and on.used() < 11
    aux.aux_models["captions"].model.to("cpu")
    job = on.job(expected)
    assert (job["runs"], job["captures"], job["graph_captures"]) == (STEPS, 0, 1)


def test_a_unet_that_does_not_fit_is_left_to_the_host(open_card: Any) -> None:
    on = open_card(12, SDXL)
    expected = on.expected()
    on.job(expected)
    on.host.opts.diffusers_offload_max_gpu_memory = 0.3
    for _ in range(2):
        assert on.job(expected)["runs"] == 0
    assert "do not fit on the GPU" in on.host.reasons()
    assert on.peak() < 0.3 * 12 + 1.5
    on.host.opts.diffusers_offload_max_gpu_memory = 0.6
    on.host.sd_offload.apply_balanced_offload(on.host.modeldata.model_data.sd_model, force=True)
    job = on.job(expected)
    assert (job["runs"], job["captures"]) == (STEPS, 0)


@pytest.mark.long
@with_vae_plans
def test_a_controlnet_beside_it(open_card: Any) -> None:
    on = open_card(16, SDXL)
    pipe = on.host.modeldata.model_data.sd_model
    pipe.controlnet = diffusers.ControlNetModel.from_unet(on.unet, conditioning_embedding_out_channels=(4, 4))
    for parameter in pipe.controlnet.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    on.host.sd_offload.apply_balanced_offload(pipe, force=True)
    expected = on.stock()
    on.job(expected)
    on.job(expected)
    job = on.job(expected)
    # each comes when it is called, and the other leaves: both are accelerated nevertheless
    assert job["captures"] == 0 and job["runs"] >= 2 * STEPS - 1
    assert {a["name"] for a in on.host.status()["accelerators"]} == {
        "unet", "controlnet", "VAE decoder", "VAE encoder",
    }  # fmt: skip


@pytest.mark.long(but=[1])
@with_vae_plans
@pytest.mark.parametrize(("like", "gib", "moved"), [(SDXL, 8, True), (SD15, 24, False)])
def test_the_vae_s_plans_hold_nothing_while_it_is_off_the_gpu(
    open_card: Any, like: Proportions, gib: int, moved: bool
) -> None:
    on = open_card(gib, like)
    expected = on.expected()
    counter = on.host.session.report.counter
    for _ in range(2):
        on.job(expected)
    # two jobs in each image, of which the second decodes: one more is needed for the plan
    assert counter("vae_captures") == 1
    decoded, given = counter("vae_eager_runs"), counter("vae_memory_given_back")
    for _ in range(2):
        on.job(expected)
    assert counter("vae_eager_runs") == decoded + 2 and counter("vae_captures") == 1
    assert (counter("vae_memory_given_back") > given) == moved
    vae = on.host.modeldata.model_data.sd_model.vae
    on.host.sd_offload.move_module_to_cpu(vae, op="test") if moved else None
    (decoder,) = [a for a in on.host.session._vaes.among(set(map(id, vae.modules()))) if a.name == "VAE decoder"]
    assert decoder.arena.vacant == moved


@pytest.mark.parametrize("gib", [8])
def test_what_fails_while_weights_are_brought_is_no_failure_of_the_host(
    open_card: Any, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = open_card(gib, SDXL)
    expected = on.expected()
    on.job(expected)
    for kind in (WeightsAway, torch.cuda.OutOfMemoryError):
        with monkeypatch.context() as patch:
            fault = failing(patch, Accelerator, "fetch_weights", kind)
            job = on.job(expected)
            assert fault.times and job["runs"] == STEPS and job["captures"] == 0
    assert "could not be moved to where accelerated steps read them, SD.Next moves them itself: injected" in str(
        on.host.status()["events"]
    )


@pytest.mark.parametrize(("mode", "gib"), [("model", 12), ("model", 16), ("balanced", 12)])
def test_a_unet_that_is_moved_whole_is_not_bypassed_for_what_its_own_plan_holds(
    open_card: Any, mode: str, gib: int
) -> None:
    # balanced: hooks of offload by models are left
    on = open_card(gib, SDXL)
    expected = on.expected()
    on.job(expected)
    pipe, hooks = on.host.modeldata.model_data.sd_model, list[Any]()
    for module in (pipe.text_encoder, pipe.unet, pipe.vae):
        accelerate.hooks.remove_hook_from_module(module, recurse=True)
        module.to("cpu")
        last = hooks[-1] if hooks else None
        hooks.append(accelerate.cpu_offload_with_hook(module, execution_device=GPU, prev_module_hook=last)[1])
    on.host.opts.diffusers_offload_mode = mode
    for _ in range(4):
        job = on.job(expected)
        assert job["runs"] == STEPS and job["captures"] == 0
        for hook in hooks:
            hook.offload()


@with_vae_plans
def test_everything_is_given_back(open_card: Any) -> None:
    on = open_card(12, SDXL)
    dispatch = accelerate.dispatch_model
    pipe = on.host.modeldata.model_data.sd_model
    expected = on.stock()
    left = on.used()
    before = {n: (p.device, p.stride(), p.clone()) for n, p in on.unet.named_parameters()}
    on.job(expected)
    assert pipe.vae.decoder._forward_pre_hooks and pipe.vae.encoder._forward_pre_hooks
    on.stock()
    gc.collect()
    assert not pipe.vae.decoder._forward_pre_hooks and not pipe.vae.encoder._forward_pre_hooks
    assert on.used() == pytest.approx(left, abs=1e-6)
    for name, parameter in on.unet.named_parameters():
        device, stride, value = before[name]
        assert (parameter.device, parameter.stride()) == (device, stride) and torch.equal(parameter, value), name
    on.job(expected)
    on.host.script_callbacks.fire("script_unloaded")
    assert accelerate.dispatch_model is dispatch.__wrapped__ and not pipe.vae.decoder._forward_pre_hooks


@with_vae_plans
def test_a_model_without_a_vae_or_with_another_kind(open_card: Any) -> None:
    on = open_card(12, SD15)
    pipe = on.host.modeldata.model_data.sd_model
    plain = pipe.vae
    pipe.vae = torch.nn.Linear(1, 1)
    on.host.session.follow()
    assert not plain.decoder._forward_pre_hooks
    del pipe.vae
    on.job()
    pipe.vae = plain
    on.job(on.stock())
