from __future__ import annotations

import copy
import inspect
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import sfast_ext
from sfast_ext import Config, Hooks, accelerate, accelerator_of
from sfast_ext.behaviour import key
from sfast_ext.kernels.backend import precompile
from sfast_ext.plans.payback import REJECTED_FOR
from sfast_ext.plans.plan import DROPPED
from sfast_ext.runtime import plan_builder, plan_finder, verify
from sfast_ext.weights.arena import WeightArena

CPU = Config(allow_cpu=True)
# fp32 sums in another order
EXACT = 1e-4


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.time = nn.Linear(1, 8)
        self.out = nn.Conv2d(8, 4, 3, padding=1)
        self.gain = 1.0

    def forward(self, x, t, scale: float = 1.0):
        t = t if torch.is_tensor(t) else torch.tensor(t)
        emb = self.time(t.float().reshape(-1, 1))
        h = nn.functional.silu(self.norm(self.conv(x) + emb[:, :, None, None]))
        return self.out(h) * scale * self.gain


def net(seed=0):
    torch.manual_seed(seed)
    return Net().eval()


def picture(n=2, size=8):
    return torch.randn(n, 4, size, size)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def run_twice(module, *args, **kwargs):
    """The first call is the original's; the second is the plan's."""
    module(*args, **kwargs)
    return module(*args, **kwargs)


def counters(acc):
    return acc.report.as_dict()["counters"]


def reasons(acc):
    return " | ".join(acc.report.as_dict()["reasons"])


@pytest.mark.parametrize("name", ["sd15", "sd15-inpaint", "sd21", "sdxl", "sdxl-refiner"])
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
    x, t, context = picture(), torch.tensor([3.0, 3.0]), torch.randn(2, 7, 16)
    expected = unet(x, t, context=context)
    acc = accelerate(unet, CPU)
    close(run_twice(unet, x, t, context=context), expected)
    assert counters(acc) == {"captures": 1, "eager_runs": 1}


@pytest.mark.parametrize("first", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor([7, 7])])
def test_no_timestep_is_baked_in(first):
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = picture()
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
    x = picture()
    first = run_twice(module, x, 1)
    kept = first.clone()
    second = module(x * 2, 1)
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, kept)
    assert first.stride() == net()(x, 1).stride()


def test_weights_changed_in_any_way_are_seen_without_a_new_capture():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = picture()
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
    x = picture()
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
    x = picture()
    for gain in (1.0, 2.0, 1.0, 2.0):
        module.gain = plain.gain = gain
        close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["captures"] == 2


def test_a_host_that_tells_generations_gets_the_cheap_key_between():
    module = net()
    acc = accelerate(module, CPU)
    x = picture()
    acc.new_generation()
    run_twice(module, x, 1)
    module.gain = 2.0
    acc.new_generation()
    close(run_twice(module, x, 1), module.__class__.forward(module, x, 1))
    assert counters(acc)["captures"] == 2


def test_a_foreign_patch_inside_means_the_original_and_is_named():
    module = net()
    acc = accelerate(module, CPU)
    x = picture()
    run_twice(module, x, 1)
    original = module.conv.forward

    def louder(x):
        return original(x) * 2

    module.conv.forward = louder
    assert torch.equal(module(x, 1), Net.forward(module, x, 1))
    assert "conv has a foreign forward" in reasons(acc) and "louder" in reasons(acc)
    del module.conv.forward
    close(module(x, 1), Net.forward(module, x, 1))
    assert counters(acc) == {"captures": 1, "eager_runs": 2, "fallbacks": 1, "misspeculated": 1}


def test_a_class_patched_by_foreign_code_with_state_in_its_closure_means_the_original(monkeypatch):
    module = net()
    acc = accelerate(module, CPU)
    x, state = picture(), {"k": 1.0}
    run_twice(module, x, 1)
    source = "def make(f, state):\n    return lambda self, x: f(self, x) * state['k']\n"
    exec(compile(source, "/webui/scripts/zz_scaler.py", "exec"), scope := {"__name__": "zz_scaler"})
    with monkeypatch.context() as patched:
        patched.setattr(nn.GroupNorm, "forward", scope["make"](nn.GroupNorm.forward, state))
        for state["k"] in (1.0, 2.0, 3.0):
            assert torch.equal(module(x, 1), Net.forward(module, x, 1))
    assert "zz_scaler.make.<locals>.<lambda> in scripts/zz_scaler.py" in reasons(acc)
    close(module(x, 1), Net.forward(module, x, 1))
    assert counters(acc) == {"captures": 1, "eager_runs": 2, "fallbacks": 3, "misspeculated": 1}


def test_a_host_can_vouch_for_a_patch():
    module = net()
    acc = accelerate(module, CPU, hooks=Hooks(recognised=lambda m, kind, f: kind == "forward"))
    original = module.conv.forward
    module.conv.forward = lambda x: original(x) * 2
    x = picture()
    close(run_twice(module, x, 1), Net.forward(module, x, 1))
    assert counters(acc) == {"captures": 1, "eager_runs": 1}


@pytest.mark.parametrize("transparent", [False, True])
def test_a_plan_outlasts_the_exchange_of_transparent_forwards_alone(transparent):
    module = net()
    vouch = lambda m, kind, f: kind == "forward"
    acc = accelerate(module, CPU, hooks=Hooks(recognised=vouch, transparent=vouch if transparent else None))
    original, x = module.conv.forward, picture()
    for factor in (1, 1) if transparent else (2, 3):
        module.conv.forward = lambda x, factor=factor: original(x) * factor
        close(run_twice(module, x, 1), Net.forward(module, x, 1))
    assert counters(acc)["captures"] == (1 if transparent else 2)


def test_hooks_of_the_host_are_asked_at_each_call():
    state = {"reason": None, "key": 1, "prepared": 0}

    def prepare():
        state["prepared"] += 1
        module.conv.bias.fill_(state["prepared"])

    module, plain = net(), net()
    hooks = Hooks(bypass_reason=lambda: state["reason"], prepare=prepare, key=lambda: state["key"])
    acc = accelerate(module, CPU, hooks=hooks)
    x = picture()
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


def test_a_plan_that_differs_is_discarded_and_the_original_goes_on(monkeypatch):
    def spoil(gm, ctx):
        node = next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(torch.mul, (node, 1.5))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        gm.recompile()
        return {"spoil": 1}

    monkeypatch.setattr(plan_builder, "run_passes", spoil)
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = picture()
    for _ in range(3):
        assert torch.equal(module(x, 1), plain(x, 1))
    assert "differs from the original" in reasons(acc) and not acc.plans
    assert counters(acc) == {"captures": 1, "fallbacks": 2}


def test_a_plan_whose_known_error_is_over_a_new_tolerance_is_used_no_more():
    module = net()
    acc = accelerate(module, CPU)
    args = picture(), torch.tensor([1, 2])
    run_twice(module, *args)
    (plan,) = acc.plans.values()
    plan.error = 0.01
    run = counters(acc)["eager_runs"]
    acc.configure(replace(CPU, tolerance=0.01, max_graphs=3))
    module(*args)
    assert counters(acc)["eager_runs"] == run + 1 and plan.state != DROPPED
    # who trusts every plan is not asked
    for config in (replace(CPU, check="never", tolerance=0.001), replace(CPU, tolerance=0.001)):
        acc.configure(config)
        assert (plan.state == DROPPED) == (config.check != "never")
        close(module(*args), Net.forward(module, *args))
    assert counters(acc)["eager_runs"] == run + 2 and "0.01, more than the tolerance of 0.001" in reasons(acc)
    # what it would be under a larger one is found out anew
    acc.configure(CPU)
    run_twice(module, *args)
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == run + 3


def test_always_checking_catches_a_plan_gone_wrong_later():
    module, plain = net(), net()
    acc = accelerate(module, Config(allow_cpu=True, check="always"))
    x = picture()
    run_twice(module, x, 1)
    (plan,) = acc.plans.values()
    run = plan._function
    plan._function = lambda *a: [o * 2 for o in run(*a)]
    close(module(x, 1), plain(x, 1))
    close(module(x, 1), plain(x, 1))
    assert "differs from the original" in reasons(acc)
    assert plan.state == DROPPED


@pytest.mark.parametrize(
    ("room", "stage"),
    [
        (plan_builder, "capture"),
        (key, "fingerprint"),
        (plan_finder, "flatten_call"),
        (plan_builder, "run_passes"),
        (verify, "relative_errors"),
        (verify, "milliseconds"),
    ],
)
def test_an_exception_of_ours_never_ends_a_generation(room, stage, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError(f"injected in {stage}")

    module, plain = net(), net()
    monkeypatch.setattr(room, stage, broken)
    acc = accelerate(module, CPU)
    x = picture()
    for _ in range(3):
        close(module(x, 1), plain(x, 1))
    assert "injected" in str(acc.report.as_dict()["last_error"]["message"])
    monkeypatch.undo()
    acc.configure(Config(allow_cpu=True, triton=False))
    close(run_twice(module, x, 1), plain(x, 1))
    assert counters(acc)["eager_runs"] == 1


def test_an_exception_in_a_replay_goes_to_the_original(monkeypatch):
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = picture()
    run_twice(module, x, 1)
    (plan,) = acc.plans.values()

    def broken(*args):
        raise RuntimeError("injected")

    plan._function = broken
    for _ in range(2):
        close(module(x, 1), plain(x, 1))
    assert "injected" in reasons(acc)


def test_the_originals_own_exception_is_the_hosts():
    module = net()
    accelerate(module, CPU)
    with pytest.raises(RuntimeError, match="channels"):
        module(torch.randn(1, 3, 8, 8), 1)


@pytest.mark.parametrize("fails", ["both", "the host's hook", "another way"])
def test_what_the_hosts_own_forward_raises_too_is_no_error_of_ours(fails):
    class Failing(Net):
        def forward(self, x, t, scale: float = 1.0):
            if broken and fails != "the host's hook":
                raise RuntimeError("no backup bias found") if fails == "both" else KeyError("x")
            return super().forward(x, t, scale)

    def prepare():
        if broken:
            raise RuntimeError("no backup bias found")

    torch.manual_seed(0)
    module, broken = Failing().eval(), False
    acc = accelerate(module, CPU, hooks=Hooks(prepare=prepare))
    args = picture(), torch.tensor([1, 2])
    run_twice(module, *args)
    broken = True
    if fails == "the host's hook":
        close(module(*args), Net.forward(module, *args))
    else:
        with pytest.raises(RuntimeError if fails == "both" else KeyError):
            module(*args)
    broken = False
    close(module(*args), Net.forward(module, *args))
    error = acc.report.as_dict()["last_error"]
    assert error is None if fails == "both" else error["stage"] == "prepare of the host"
    assert counters(acc).get("errors", 0) == (fails != "both") and counters(acc)["eager_runs"] == 2


def test_reasons_are_those_of_the_last_generations():
    module = net()
    acc = accelerate(module, CPU)
    args = picture(), torch.tensor([1, 2])
    module.conv.forward = lambda x: nn.Conv2d.forward(module.conv, x)
    for _ in range(2):
        acc.new_generation()
        run_twice(module, *args)
        assert "conv has a foreign forward" in reasons(acc)
    del module.conv.forward
    for _ in range(2):
        assert "conv has a foreign forward" in reasons(acc)
        acc.new_generation()
        run_twice(module, *args)
    assert reasons(acc) == ""


def test_a_forward_that_branches_on_a_number_gets_it_into_the_signature():
    class Branching(Net):
        def forward(self, x, t, scale: float = 1.0):
            return super().forward(x, t) if scale > 0.5 else x

    torch.manual_seed(0)
    module = Branching().eval()
    acc = accelerate(module, CPU)
    x = picture()
    for scale in (1.0, 1.0, 0.1, 0.1, 1.0, 0.1):
        close(
            module(x, torch.tensor(1), scale=scale),
            Branching.forward(module, x, torch.tensor(1), scale=scale),
        )
    assert counters(acc)["captures"] == 2


def test_a_number_that_changes_at_every_call_ends_the_capturing():
    class Branching(Net):
        def forward(self, x, t, scale: float = 1.0):
            return super().forward(x, t) * scale if scale > 0.5 else x

    module = Branching().eval()
    acc = accelerate(module, CPU)
    x = picture()
    for i in range(10):
        close(
            module(x, torch.tensor(1), scale=1.0 + i),
            Branching.forward(module, x, torch.tensor(1), scale=1.0 + i),
        )
    assert counters(acc)["captures"] < 4 and "an argument changes at each step" in reasons(acc)


def test_what_is_refused_is_not_tried_again():
    class Reading(Net):
        def forward(self, x, t, scale: float = 1.0):
            return x * x.sum().item()

    module = Reading().eval()
    acc = accelerate(module, CPU)
    x = picture()
    for _ in range(4):
        assert torch.equal(module(x, torch.tensor(1)), Reading.forward(module, x, torch.tensor(1)))
    assert reasons(acc).count("reads a value") == 1 and "captures" not in counters(acc)
    assert counters(acc)["fallbacks"] == 3


@pytest.mark.parametrize("ticks", [False, True])
def test_what_was_refused_is_looked_at_again_when_the_behaviour_changes(ticks):
    class Moody(Net):
        def __init__(self):
            super().__init__()
            self.mode = 0

        def forward(self, x, t, scale: float = 1.0):
            return x * x.sum().item() if self.mode == 0 else super().forward(x, t, scale)

    torch.manual_seed(0)
    module = Moody().eval()
    acc = accelerate(module, CPU)
    x = picture()
    for mode in (0, 1, 0, 1):
        module.mode = mode
        if ticks:
            acc.new_generation()
        for _ in range(2):
            close(module(x, torch.tensor(1)), Moody.forward(module, x, torch.tensor(1)))
    assert counters(acc)["captures"] == 1 and counters(acc)["eager_runs"] == 3


REGISTERED = {"activation": nn.functional.silu}
PATCHED = "SFAST_TEST_PATCHED"


def host_function(x):
    """A function that a method calls. The environment, which it reads, is not followed."""
    if PATCHED in os.environ:
        return x * (2 if isinstance(x, FakeTensor) else 3)
    return REGISTERED["activation"](x)


class Layered(Net):
    def forward(self, x, t, scale: float = 1.0):
        return super().forward(host_function(x), t, scale)


def test_a_plan_refused_under_a_patch_is_made_when_the_patch_is_gone(monkeypatch):
    torch.manual_seed(0)
    module = Layered().eval()
    acc = accelerate(module, CPU)
    args = picture(), torch.tensor([1, 2])
    acc.new_generation()
    with monkeypatch.context() as laid:
        laid.setenv(PATCHED, "1")
        run_twice(module, *args)
    assert "differs from the original" in reasons(acc) and not acc.plans
    for _ in range(REJECTED_FOR - 1):
        acc.new_generation()
        close(run_twice(module, *args), Layered.forward(module, *args))
    assert counters(acc)["captures"] == 1
    acc.new_generation()
    close(run_twice(module, *args), Layered.forward(module, *args))
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == 1


def test_what_stays_refused_is_tried_ever_less_often(monkeypatch):
    monkeypatch.setitem(REGISTERED, "activation", lambda x: x * x.sum().item())
    module = Layered().eval()
    acc = accelerate(module, CPU)
    args = picture(), torch.tensor([1, 2])
    tried = []
    for generation in range(4 * REJECTED_FOR):
        acc.new_generation()
        before = len(acc.report.as_dict()["events"])
        run_twice(module, *args)
        if any(event["stage"] == "refused" for event in acc.report.as_dict()["events"][before:]):
            tried.append(generation)
    assert tried == [0, REJECTED_FOR, 3 * REJECTED_FOR] and "reads a value" in reasons(acc)


def test_another_function_in_the_place_of_pytorchs_attention_is_captured_anew(monkeypatch):
    class Attentive(Net):
        def forward(self, x, t, scale: float = 1.0):
            rows = super().forward(x, t, scale).flatten(2)
            return nn.functional.scaled_dot_product_attention(rows, rows, rows)

    torch.manual_seed(0)
    module = Attentive().eval()
    acc = accelerate(module, CPU)
    x, stock = picture(), nn.functional.scaled_dot_product_attention
    functions = {"stock": stock, "another": lambda q, k, v: 2 * stock(q, k, v, scale=1.0)}
    results = {}
    for name in ("stock", "another", "stock", "another"):
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", functions[name])
        results[name] = run_twice(module, x, torch.tensor(1))
        close(results[name], Attentive.forward(module, x, torch.tensor(1)))
    assert (results["another"] - results["stock"]).abs().max() > 0.1
    assert counters(acc)["captures"] == 2 and counters(acc)["eager_runs"] == 6


def test_the_cpu_is_not_used_unless_allowed():
    module = net()
    acc = accelerate(module)
    module(picture(), 1)
    assert "on the CPU" in reasons(acc) and not acc.plans


def test_gradients_go_to_the_original():
    module = net()
    acc = accelerate(module, CPU)
    with torch.enable_grad():
        module(picture(), 1).sum().backward()
    assert module.conv.weight.grad is not None and "gradients" in reasons(acc)


def test_inference_mode_and_autocast():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = picture()
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
    x = picture()
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
        run_twice(module, picture(size=size), 1)
    assert len(acc.plans) == 2
    assert ["[2,4,12,12]" in p["signature"] or "[2,4,16,16]" in p["signature"] for p in acc.status()["plans"]] == [
        True,
        True,
    ]


def test_other_kernels_mean_other_plans_but_a_budget_does_not():
    module = net()
    acc = accelerate(module, CPU)
    run_twice(module, picture(), 1)
    acc.configure(Config(allow_cpu=True, graph_memory_mb=100))
    assert len(acc.plans) == 1
    acc.configure(Config(allow_cpu=True, triton=False))
    assert not acc.plans
    run_twice(module, picture(), 1)
    assert counters(acc)["captures"] == 2


def test_switched_off_is_the_original():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    x = picture()
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
    x = picture()
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
    x = picture()
    close(run_twice(module, x, 1), plain(x, 1) * 2)
    acc.release()
    close(module(x, 1), plain(x, 1) * 2)


def test_a_forward_that_somebody_kept_does_nothing_after_release():
    module, plain = net(), net()
    acc = accelerate(module, CPU)
    kept, x = module.forward, picture()
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
    x = picture()
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
