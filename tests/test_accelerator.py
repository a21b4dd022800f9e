"""One accelerated network: its plans, its arguments, and its end."""

from __future__ import annotations

import copy
import inspect
import threading
import time

import pytest
import torch
from small_net import (
    CPU,
    EXACT,
    Net,
    close,
    counters,
    image,
    net,
    no_gradients,  # noqa: F401
    reasons,
    run_twice,
)
from torch import nn

import sfast_ext
from sfast_ext import Config, Hooks, accelerate, accelerator_of
from sfast_ext.kernels.backend import precompile
from sfast_ext.weights.arena import WeightArena


@pytest.mark.long(but=[0, 2])
@pytest.mark.parametrize("name", ["sd21", "sdxl", "sdxl-refiner"])
def test_a_real_unet_is_captured_and_its_plan_gives_the_same(name, tiny_unet, unet_inputs):
    unet = tiny_unet(name)
    args, kwargs = unet_inputs(unet)
    expected = unet(*args, **kwargs)[0]
    acc = accelerate(unet, CPU)
    ours = run_twice(unet, *args, **kwargs)[0]
    close(ours, expected)
    assert counters(acc) == {"captures": 1, "eager_runs": 1}
    (plan,) = acc.status()["plans"]
    assert plan["fused"]["packed_linear"] > 0 and plan["error"] < 1e-5
    acc.release()
    assert torch.equal(unet(*args, **kwargs)[0], expected)


def test_the_ldm_unet_is_captured_and_its_plan_gives_the_same():
    openaimodel = pytest.importorskip("ldm.modules.diffusionmodules.openaimodel")
    torch.manual_seed(0)
    unet = openaimodel.UNetModel(
        image_size=8, in_channels=4, out_channels=4, model_channels=32, attention_resolutions=[2, 1],
        num_res_blocks=1, channel_mult=[1, 2], num_heads=2, use_spatial_transformer=True, transformer_depth=1,
        context_dim=16, legacy=False,
    ).eval()  # fmt: skip
    for parameter in unet.parameters():
        # its zero-initialised modules would hide most of the network
        parameter.copy_(torch.randn_like(parameter) * 0.05)
    x, t, context = image(), torch.tensor([3.0, 3.0]), torch.randn(2, 7, 16)
    expected = unet(x, t, context=context)
    acc = accelerate(unet, CPU)
    close(run_twice(unet, x, t, context=context), expected)
    assert counters(acc) == {"captures": 1, "eager_runs": 1}


@pytest.mark.parametrize("first", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor([7, 7])])
def test_no_timestep_is_baked_in(first):
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    module(x, first)
    for step in (3, 11):
        t = torch.full_like(first, step) if torch.is_tensor(first) else type(first)(step)
        close(module(x, t, scale=step / 5), plain(x, t, scale=step / 5))
        module(x, t, scale=step / 6)
    assert counters(acc)["captures"] == 2  # with and without a scale
    assert counters(acc)["eager_runs"] == 3


def test_outputs_are_the_callers_own():
    module = net()
    accelerate(module, CPU)
    x = image()
    first = run_twice(module, x, 1)
    kept = first.clone()
    second = module(x * 2, 1)
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, kept)
    assert first.stride() == net()(x, 1).stride()


def test_weights_changed_in_any_way_are_seen_without_a_new_capture():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)

    def both(change):
        change(module), change(plain)
        close(module(x, 1), plain(x, 1))

    both(lambda m: m.conv.weight.mul_(1.5))
    both(lambda m: setattr(m.conv, "weight", nn.Parameter(m.conv.weight + 1)))
    both(lambda m: m.load_state_dict(net(5).state_dict()))
    both(lambda m: m.load_state_dict(net(6).state_dict(), assign=True))
    both(lambda m: setattr(m.out.bias, "data", m.out.bias.data * 3))
    assert counters(acc)["captures"] == 1 and counters(acc)["eager_runs"] == 6


def test_weights_that_change_their_dtype_bring_a_new_plan():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)
    module.double(), plain.double()

    x = x.double()
    module.time.float(), plain.time.float()
    close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 2
    assert len(acc.plans) == 1


def test_a_scalar_attribute_brings_another_plan_and_the_first_comes_back():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    for gain in (1.0, 2.0, 1.0, 2.0):
        module.gain = plain.gain = gain
        close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 2


def test_a_host_that_tells_generations_gets_the_cheap_key_between():
    module = net()
    acc = accelerate(module, CPU)
    x = image()
    acc.new_generation()
    run_twice(module, x, 1)
    module.gain = 2.0
    acc.new_generation()
    close(run_twice(module, x, 1), module.__class__.forward(module, x, 1))
    assert counters(acc)["captures"] == 2


def test_hooks_of_the_host_are_asked_at_each_call():
    state = {"reason": None, "key": 1, "prepared": 0}

    def prepare():
        state["prepared"] += 1
        module.conv.bias.fill_(state["prepared"])

    module, plain = net(), net()
    hooks = Hooks(bypass_reason=lambda: state["reason"], prepare=prepare, key=lambda: state["key"])
    acc = accelerate(module, CPU, hooks=hooks)
    x = image()
    for _ in range(3):
        ours = module(x, 1)
        plain.conv.bias.fill_(state["prepared"])
        close(ours, plain(x, 1))
    assert state["prepared"] == 3
    state["reason"] = "the host says no"
    module(x, 1)
    assert state["prepared"] == 3 and "the host says no" in reasons(acc)
    state.update(reason=None, key=2)
    module(x, 1)
    assert counters(acc)["captures"] == 2


def test_the_cpu_is_not_used_unless_allowed():
    module = net()
    acc = accelerate(module)
    module(image(), 1)
    assert "on the CPU" in reasons(acc) and not acc.plans


def test_gradients_go_to_the_original():
    module = net()
    acc = accelerate(module, CPU)
    with torch.enable_grad():
        module(image(), 1).sum().backward()
    assert module.conv.weight.grad is not None and "gradients" in reasons(acc)


def test_inference_mode_and_autocast():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    with torch.inference_mode():
        close(run_twice(module, x, 1), plain(x, 1))
    close(module(x, 1), plain(x, 1))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run_twice(module, x, 1), plain(x, 1)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    assert counters(acc)["captures"] == 2


def test_a_numerical_flag_of_torch_gets_a_plan_of_its_own(monkeypatch):
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    close(run_twice(module, x, 1), plain(x, 1))
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", not cudnn.deterministic)
    close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 2 and len(acc.plans) == 2
    monkeypatch.setattr(cudnn, "deterministic", not cudnn.deterministic)
    runs = counters(acc)["eager_runs"]
    close(module(x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == runs + 1


def test_plans_are_kept_up_to_a_number():
    module = net()
    acc = accelerate(module, Config(allow_cpu=True, max_plans=2))
    for size in (8, 12, 16):
        run_twice(module, image(size=size), 1)
    assert len(acc.plans) == 2
    assert ["[2,4,12,12]" in p["signature"] or "[2,4,16,16]" in p["signature"] for p in acc.status()["plans"]] == [
        True,
        True,
    ]


def test_other_kernels_mean_other_plans_but_a_budget_does_not():
    module = net()
    acc = accelerate(module, CPU)
    run_twice(module, image(), 1)
    acc.configure(Config(allow_cpu=True, graph_memory_mb=100))
    assert len(acc.plans) == 1
    acc.configure(Config(allow_cpu=True, triton=False))
    assert not acc.plans
    run_twice(module, image(), 1)
    assert counters(acc)["captures"] == 2


def test_switched_off_is_the_original():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)
    acc.configure(Config(enabled=False, allow_cpu=True))
    close(module(x, 1), plain(x, 1))
    assert counters(acc)["eager_runs"] == 1


def test_release_leaves_the_module_as_it_was(tiny_unet, unet_inputs):
    unet = tiny_unet("sdxl")
    before = {n: (p, p.stride(), p.untyped_storage().nbytes(), p.clone()) for n, p in unet.named_parameters()}
    attributes = dict(unet.__dict__)
    acc = accelerate(unet, CPU)
    args, kwargs = unet_inputs(unet)
    run_twice(unet, *args, **kwargs)
    assert acc.installed() and accelerator_of(unet) is acc
    moved = [n for n, p in unet.named_parameters() if p.untyped_storage().nbytes() != before[n][2]]
    assert moved
    acc.release()
    acc.release()
    assert unet.__dict__.keys() == attributes.keys() and accelerator_of(unet) is None and not acc.installed()
    for name, parameter in unet.named_parameters():
        identity, stride, size, value = before[name]
        assert parameter is identity and parameter.stride() == stride, name
        assert parameter.untyped_storage().nbytes() == size and torch.equal(parameter, value), name


def test_under_accelerates_hook(tiny_unet, unet_inputs):
    hooks = pytest.importorskip("accelerate.hooks")
    unet = tiny_unet("sd15")
    args, kwargs = unet_inputs(unet)
    expected = unet(*args, **kwargs)[0]
    hooks.add_hook_to_module(unet, hooks.ModelHook())
    over = unet.__dict__["forward"]
    acc = accelerate(unet, CPU)
    assert unet.__dict__["forward"] is over and acc.installed()
    close(run_twice(unet, *args, **kwargs)[0], expected)
    hooks.remove_hook_from_module(unet)
    hooks.add_hook_to_module(unet, hooks.ModelHook())
    close(unet(*args, **kwargs)[0], expected)
    assert counters(acc) == {"captures": 1, "eager_runs": 2}
    acc.release()
    hooks.remove_hook_from_module(unet)
    assert torch.equal(unet(*args, **kwargs)[0], expected)


def test_a_copied_module_runs_its_own_weights():
    module = net()
    accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)
    twin = copy.deepcopy(module)
    twin.conv.weight.zero_()
    torch.testing.assert_close(twin(x, 1), Net.forward(twin, x, 1), rtol=0, atol=0)
    assert accelerator_of(twin) is None


def test_the_forward_still_shows_its_signature():
    module = net()
    plain = inspect.signature(module.forward)
    accelerate(module, CPU)
    assert inspect.signature(module.forward) == plain


def test_another_wrapper_over_ours_survives_release():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    ours = module.forward
    module.forward = lambda *a, **k: ours(*a, **k) * 2
    x = image()
    close(run_twice(module, x, 1), plain(x, 1) * 2)
    acc.release()
    close(module(x, 1), plain(x, 1) * 2)


def test_a_forward_that_somebody_kept_does_nothing_after_release():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    kept, x = module.forward, image()
    run_twice(module, x, 1)
    acc.release()
    for _ in range(3):
        assert torch.equal(kept(x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 1 and acc.status()["weights"]["packed_tensors"] == 0
    acc.install()
    close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 2


def test_two_threads_at_once():
    module, plain = net(), net()
    accelerate(module, CPU)
    wrong = []

    def work(seed):
        with torch.no_grad():
            for i in range(20):
                x = torch.randn(2, 4, 8 + 4 * (i % 3), 8, generator=torch.Generator().manual_seed(seed * 100 + i))
                if not torch.allclose(module(x, i), plain(x, i), rtol=EXACT, atol=EXACT):
                    wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_on_another_device_mean_the_original_for_now(monkeypatch):
    from sfast_ext.weights.arena import WeightsAway

    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = image()
    run_twice(module, x, 1)

    def away(self):
        raise WeightsAway("the weights are elsewhere")

    with monkeypatch.context() as patch:
        patch.setattr(WeightArena, "sync", away)
        close(module(x, 1), plain(x, 1))
    assert len(acc.plans) == 1 and "elsewhere" in reasons(acc)
    close(module(x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 1


def test_each_call_puts_off_compilations_that_hold_the_gil(monkeypatch):
    background = precompile.BackgroundCompiler()
    monkeypatch.setattr(precompile, "_background", background)
    module = Net()
    accelerate(module, CPU)
    for call in range(4):  # the original, a plan, and again
        background._due = 0.0
        module(torch.randn(1, 4, 8, 8), torch.ones(1, 1))
        assert background._due > time.monotonic(), call


def test_the_package_says_its_version():
    assert sfast_ext.__version__
