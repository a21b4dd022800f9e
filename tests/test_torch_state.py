"""States of torch around a call: which have the original run, which are part of a plan's key, which change nothing."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sfast_ext import Config, accelerate, torch_state
from sfast_ext.runtime import plan_finder


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(F.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2))


class Around(nn.Module):
    def __init__(self, net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


def latent(seed=0):
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def pair(cls=Net):
    """An accelerated module, its accelerator, and an untouched twin."""
    torch.manual_seed(0)
    ours, twin = cls().eval().requires_grad_(False), cls().eval().requires_grad_(False)
    twin.load_state_dict(ours.state_dict())
    return ours, accelerate(ours, Config(allow_cpu=True, drop_slower=False)), twin


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def reasons(accelerator):
    return " ".join(accelerator.report.as_dict()["reasons"])


def runs(accelerator):
    return accelerator.report.counter("eager_runs")


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 1.5 if function is F.linear else out


class Watches(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 1.001 if function is torch.ops.aten.convolution.default else out


def under(*modes):
    def use(net, x):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return net(x)

    return use


def dual(net, x):
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x + 1)))
        return torch.cat([primal, tangent])


def flops(net, x):
    with FlopCounterMode(display=False) as counter:
        out = net(x)
    assert counter.get_total_flops() > 0
    return torch.cat([out.flatten(), torch.tensor([float(counter.get_total_flops())])])


def fake(net, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = net(mode.from_tensor(x))
    assert type(out).__name__ == "FakeTensor"
    return torch.zeros(out.shape)


def made_fx(**options):
    def use(net, x):
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(lambda z: net(z), **options)(latent(5))(x)

    return use


def traced(net, x):
    return torch.jit.trace(Around(net), latent(5), check_trace=False)(x)


def symbolic(net, x):
    return torch.fx.symbolic_trace(Around(net))(x)


def symbolic_constant(net, x):
    """The network is called with a tensor, and the trace records its parameters all the same."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, y):
            return y + self.net(x)

    return torch.fx.symbolic_trace(Constant())(torch.zeros(()))


def functional(transform):
    def use(net, x):
        return transform(lambda z: net(z), x)

    return use


@contextlib.contextmanager
def registered(operator, key, function, space="aten", schema=None):
    """A kernel of Python code, as long as the `with` block lasts."""
    kept = torch.library.Library(space, "IMPL" if schema is None else "DEF")
    try:
        if schema is not None:
            kept.define(schema)
        kept.impl(operator, function, key)
        yield
    finally:
        if hasattr(kept, "_destroy"):
            kept._destroy()
        # before, the end of the object was that of its kernels
        del kept


def library(operator, key, result):
    def use(net, x):
        with registered(operator, key, result):
            return net(x)

    return use


OBSTACLES = {
    "function mode": (under(Functions), "Functions (TorchFunctionMode)"),
    "function mode that watches": (under(Watches), "Watches (TorchFunctionMode)"),
    "function mode under a default device": (under(lambda: torch.device("cpu"), Functions), "Functions"),
    "two function modes": (under(Watches, Functions), "TorchFunctionMode"),
    "dispatch mode": (under(Operators), "Operators (TorchDispatchMode)"),
    "modes of both kinds": (under(Operators, Functions), "Functions"),
    "flop counter": (flops, "is active around the call"),
    "fake tensors": (fake, "FakeTensorMode"),
    "make_fx": (made_fx(), "is active around the call"),
    "make_fx on fake tensors": (made_fx(tracing_mode="fake", _allow_non_fake_inputs=True), "is active around the call"),
    "make_fx with symbolic shapes": (
        made_fx(tracing_mode="symbolic", _allow_non_fake_inputs=True), "is active around the call"
    ),
    "make_fx above autograd": (made_fx(pre_dispatch=True), "is active around the call"),
    "jit.trace": (traced, "torch.jit.trace"),
    "fx": (symbolic, "torch.fx records"),
    "fx with a constant": (symbolic_constant, "torch.fx records"),
    "dual tensors": (dual, "forward mode"),
    "vmap": (functional(lambda f, x: torch.vmap(f)(torch.stack([x, x + 1]))), "vmap"),
    "vmap in vmap": (functional(lambda f, x: torch.vmap(torch.vmap(f))(x.expand(2, 3, *x.shape))), "vmap"),
    "jvp": (functional(lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1]), "jvp"),
    "jacfwd": (functional(lambda f, x: torch.func.jacfwd(lambda z: f(z).sum(), randomness="same")(x)), "torch.func"),
    "functionalize": (functional(lambda f, x: torch.func.functionalize(f)(x)), "functionalize"),
    "torch function is off": (under(torch._C.DisableTorchFunction), "DisableTorchFunction"),
    "parametrisations are cached": (under(parametrize.cached), "parametrize.cached"),
    "another silu": (
        library("silu", "CPU", lambda x: x.sigmoid().mul(x).mul(1.001)), "torch.library replaces torch's own silu"
    ),
    "another linear": (
        library("linear", "CompositeImplicitAutograd", lambda x, w, b: x.matmul(w.t()) * 1.3 + b),
        "torch.library replaces torch's own linear",
    ),
}


@pytest.mark.parametrize("state", OBSTACLES)
def test_the_original_runs_after_a_plan_was_made(state):
    use, words = OBSTACLES[state]
    ours, accelerator, twin = pair()
    for seed in range(3):
        ours(latent(seed))
    before = runs(accelerator)
    assert before and not reasons(accelerator)
    for seed in (7, 8):
        torch.testing.assert_close(use(ours, latent(seed)), use(twin, latent(seed)), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == before and words in reasons(accelerator), accelerator.report.as_dict()
    assert len(accelerator.plans) == 1 and accelerator.report.counter("errors") == 0
    # and plans run again at once
    for seed in (9, 10):
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == before + 2


@pytest.mark.parametrize("state", OBSTACLES)
def test_no_plan_is_made(state):
    use, words = OBSTACLES[state]
    ours, accelerator, twin = pair()
    for seed in range(2):
        torch.testing.assert_close(use(ours, latent(seed)), use(twin, latent(seed)), rtol=1e-5, atol=1e-5)
    assert not accelerator.plans and accelerator.report.counter("captures") == 0 and words in reasons(accelerator)
    for seed in range(3):
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert len(accelerator.plans) == 1 and runs(accelerator) == 2


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda z: f(z).sum())(x),
        lambda f, x: torch.func.vjp(f, x)[1](f(x) * 0 + 1)[0],
        lambda f, x: torch.func.jacrev(lambda z: f(z).sum())(x),
        lambda f, x: torch.func.hessian(lambda z: f(z).square().sum())(x[:1, :, :2, :2]),
    ],
    ids=["grad", "vjp", "jacrev", "hessian"],
)
def test_derivatives_with_a_plan(transform):
    ours, accelerator, twin = pair()
    for seed in range(3):
        ours(latent(seed))
    with torch.enable_grad():
        expected = transform(twin, latent())
        torch.testing.assert_close(transform(ours, latent()), expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() > 0 and "torch.func transforms the call" in reasons(accelerator)


@pytest.mark.parametrize("state", ["dual tensors", "vmap", "jvp"])
def test_weights_have_their_own_strides_under_a_transform(state):
    """What computes a derivative or a batch may read them, and raise."""
    ours, accelerator, twin = pair()
    ours(latent())
    assert ours.conv.weight.is_contiguous(memory_format=torch.channels_last)
    seen = []
    handle = ours.conv.register_forward_pre_hook(lambda module, _: seen.append(module.weight.stride()))
    try:
        OBSTACLES[state][0](ours, latent())
    finally:
        handle.remove()
    assert set(seen) == {twin.conv.weight.stride()}
    torch.testing.assert_close(ours(latent(2)), twin(latent(2)), rtol=1e-5, atol=1e-5)


def test_later_traces_are_not_disturbed():
    ours, accelerator, twin = pair()
    ours(latent())
    for net in (ours, twin, ours, twin):
        torch.testing.assert_close(traced(net, latent(3)), twin(latent(3)), rtol=1e-5, atol=1e-5)
    # of a shape that has no plan
    for net in (ours, twin):
        small = torch.jit.trace(Around(net), latent()[:1, :, :2, :2], check_trace=False)
        torch.testing.assert_close(small(latent()[:1, :, :2, :2]), twin(latent()[:1, :, :2, :2]))


def test_an_exported_trace_keeps_its_values_when_plans_follow():
    ours, accelerator, twin = pair()
    kept = torch.jit.trace(Around(ours), latent(), check_trace=False)
    for seed in range(4):
        ours(latent(seed))
    torch.testing.assert_close(kept(latent(4)), twin(latent(4)), rtol=1e-5, atol=1e-5)
    accelerator.release()
    torch.testing.assert_close(kept(latent(4)), twin(latent(4)), rtol=1e-5, atol=1e-5)


def test_parts_ask_as_well():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.first(x))

    torch.manual_seed(0)
    whole = Whole().eval().requires_grad_(False)
    accelerator = accelerate(whole, Config(allow_cpu=True, drop_slower=False))
    accelerator.accelerate_parts([("first", whole.first), ("second", whole.second)])
    x = torch.randn(3, 8)
    expected = whole.second(whole.first(x))
    for _ in range(3):
        whole.second(whole.first(x))
    part = accelerator.parts[0]
    assert len(part.plans) == 1
    plain = F.linear(F.linear(x, whole.first.weight, whole.first.bias) * 1.5, whole.second.weight, whole.second.bias)
    with Functions():
        torch.testing.assert_close(whole.second(whole.first(x)), plain * 1.5)
    torch.testing.assert_close(torch.vmap(whole.first)(x), F.linear(x, whole.first.weight, whole.first.bias))
    torch.testing.assert_close(whole.second(whole.first(x)), expected)
    assert "Functions" in reasons(accelerator) and "vmap" in reasons(accelerator) and len(part.plans) == 1


def test_a_trace_in_another_thread_is_not_ours(monkeypatch):
    """The flag of torch.fx is set for all threads."""
    begun, done = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            begun.set()
            done.wait(30)
            return x

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(Slow()))
    thread.start()
    try:
        assert begun.wait(30) and torch.fx._symbolic_trace._is_fx_tracing_flag
        assert torch_state.obstacle() is None
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def changed(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def in_library():
    return registered("twice", "CPU", lambda x: x * 2, "sfast_test_states", "twice(Tensor x) -> Tensor")


SAME_PLAN = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "old profiler": lambda: torch.autograd.profiler.profile(),
    "record_function": lambda: torch.profiler.record_function("a call"),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "saved tensors on the CPU": torch.autograd.graph.save_on_cpu,
    "random state": torch.random.fork_rng,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
    "no subclasses": getattr(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext),
    "an operator of another library": in_library,
    "threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 1),
    "cudnn.benchmark": lambda: changed(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark, True),
    "no forward mode": lambda: forward_ad._set_fwd_grad_enabled(False),
}


@pytest.mark.parametrize("state", SAME_PLAN)
def test_what_changes_no_result_leaves_the_plan_in_use(state):
    if state == "no subclasses" and not torch._C._is_torch_function_enabled():
        pytest.skip("torch function is off")
    ours, accelerator, twin = pair()
    for seed in range(2):
        ours(latent(seed))
    before = runs(accelerator)
    with SAME_PLAN[state]():
        for seed in (3, 4):
            torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    ours(latent(5))
    if state == "no subclasses":
        return
    assert runs(accelerator) == before + 3 and len(accelerator.plans) == 1, accelerator.report.as_dict()["reasons"]


class Makes(nn.Module):
    """What it returns depends on the tensors that torch makes, and on autocast, which it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        made = torch.full((4,), 2.0)
        third = torch.arange(1, 2) / 3
        out = self.layer(x) + float(made.element_size()) + (5.0 if made.is_meta else 0.0)
        out = out + (3.0 if torch.is_autocast_enabled() else 0.0)
        return out if made.is_meta else out.double() + third


def default_dtype(dtype):
    return lambda: changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


OF_THE_KEY = {
    "default dtype": (default_dtype(torch.float64), Makes),
    "default dtype, half": (default_dtype(torch.bfloat16), Makes),
    "default device": (lambda: torch.device("meta"), Makes),
    "autocast of another device": (
        lambda: torch.autocast("cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else _cuda_autocast(),
        Makes,
    ),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), Net),
    "oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False), Net),
    "flash attention": (lambda: _attention("flash"), Net),
    "efficient attention": (lambda: _attention("mem_efficient"), Net),
    "attention by products": (lambda: _attention("math"), Net),
    "deterministic": (
        lambda: changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        Net,
    ),
    "cudnn is off": (lambda: torch.backends.cudnn.flags(enabled=False), Net),
    "precision": (
        lambda: changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
        Net,
    ),
}


@contextlib.contextmanager
def _cuda_autocast():
    """`torch.autocast` of a device that is not there switches itself off."""
    set_enabled = torch.set_autocast_enabled
    new = hasattr(torch, "get_autocast_dtype")
    set_enabled(*(("cuda", True) if new else (True,)))
    try:
        yield
    finally:
        set_enabled(*(("cuda", False) if new else (False,)))


def _attention(which):
    backend = torch.backends.cuda
    return changed(getattr(backend, f"{which}_sdp_enabled"), getattr(backend, f"enable_{which}_sdp"), False)


@pytest.mark.parametrize("state", OF_THE_KEY)
def test_what_chooses_how_torch_computes_has_a_plan_of_its_own(state):
    enter, cls = OF_THE_KEY[state]
    ours, accelerator, twin = pair(cls)
    x = latent() if cls is Net else torch.randn(2, 4)
    tolerance = 3e-2 if state == "autocast" else 1e-5

    def check(times):
        for _ in range(times):
            torch.testing.assert_close(ours(x), twin(x), rtol=tolerance, atol=tolerance)

    check(2)
    with enter():
        check(3)
    check(2)
    with enter():
        check(1)
    assert len(accelerator.plans) == 2 and accelerator.report.counter("captures") == 2
    assert runs(accelerator) == 6 and not accelerator.report.as_dict()["reasons"], accelerator.report.as_dict()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_for_the_whole_program_is_served(device):
    ours, accelerator, twin = pair()
    given = [latent(seed) for seed in range(4)]
    torch.set_default_device(device)
    try:
        results = [ours(x) for x in given]
    finally:
        torch.set_default_device(None)
    for x, result in zip(given, results):
        torch.testing.assert_close(result, twin(x), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == 3 and not reasons(accelerator)


def test_weights_of_a_functional_call_are_used_and_given_back():
    ours, accelerator, twin = pair()
    for seed in range(2):
        ours(latent(seed))
    own = dict(ours.named_parameters())
    other = {name: p.detach() * 1.5 for name, p in twin.named_parameters()}
    values = {name: p.clone() for name, p in other.items()}
    for seed in range(3):
        found = torch.func.functional_call(ours, other, (latent(seed),))
        expected = torch.func.functional_call(twin, values, (latent(seed),))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(latent(seed)), twin(latent(seed)), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(other[name], value) for name, value in values.items())
    assert all(dict(ours.named_parameters())[name] is p for name, p in own.items())


def test_an_error_of_the_original_under_a_state_is_its_own():
    ours, accelerator, twin = pair()
    ours(latent())
    with pytest.raises(RuntimeError, match="size|shape|channels"), Watches():
        ours(torch.randn(2, 3, 6, 6))
    assert accelerator.report.counter("errors") == 0
    ours(latent())
    assert runs(accelerator) == 1


def test_flash_attention_of_another_package_is_part_of_the_key_and_no_obstacle():
    with registered("_flash_attention_forward", "CUDA", lambda *args, **kwargs: None):
        assert torch_state.obstacle() is None
        assert torch_state.python_kernels.flash == ("aten/_flash_attention_forward/CUDA",)
    assert torch_state.obstacle() is None and torch_state.python_kernels.flash == ()


def test_a_kernel_for_another_device_is_no_obstacle():
    with registered("_foreach_mul.Scalar", "MPS", lambda *args: None):
        assert torch_state.obstacle() is None
    assert torch_state.obstacle() is None


def test_nothing_around_a_call_is_no_obstacle():
    assert torch_state.obstacle() is None
    assert torch_state.default_device() is None
    assert not torch_state.compiles() and not torch_state.transforms()
    assert not plan_finder.records_graph(torch.device("cpu"))


def test_a_call_within_a_graph_that_the_program_captures_gets_the_original(monkeypatch):
    ours, accelerator, twin = pair()
    for seed in range(2):
        ours(latent(seed))
    before = runs(accelerator)
    monkeypatch.setattr(plan_finder, "records_graph", lambda device: True)
    torch.testing.assert_close(ours(latent(3)), twin(latent(3)), rtol=1e-5, atol=1e-5)
    assert runs(accelerator) == before and "captures a CUDA graph" in reasons(accelerator)


@pytest.mark.parametrize("warm", [False, True], ids=["without a plan", "with a plan"])
def test_weights_that_a_graph_of_the_program_reads_stay_where_and_as_they_are(monkeypatch, warm):
    ours, accelerator, twin = pair()
    for seed in range(2 * warm):
        ours(latent(seed))
    with monkeypatch.context() as patch:
        patch.setattr(plan_finder, "records_graph", lambda device: True)
        ours(latent(3))
    memory = [(p.data_ptr(), p.untyped_storage()._cdata, p.stride()) for p in ours.parameters()]
    plans, before = len(accelerator.plans), runs(accelerator)
    for x in (latent(4), latent(5)[:, :, :4], latent(6)):
        torch.testing.assert_close(ours(x), twin(x), rtol=1e-5, atol=1e-5)
    assert [(p.data_ptr(), p.untyped_storage()._cdata, p.stride()) for p in ours.parameters()] == memory
    assert len(accelerator.plans) == plans and "has captured a CUDA graph of the model" in reasons(accelerator)
    assert runs(accelerator) - before == 2 * warm


@pytest.mark.gpu
def test_a_graph_that_the_program_captures_gets_the_original():
    ours, accelerator, twin = pair()
    ours.cuda(), twin.cuda()
    x = latent().cuda()
    for _ in range(4):
        ours(x)
    before = accelerator.report.counter("replays")
    assert before
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        twin(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(x)
    assert "captures a CUDA graph" in reasons(accelerator)
    x.copy_(latent(5))
    graph.replay()
    torch.testing.assert_close(out, twin(x), rtol=1e-3, atol=1e-3)
    # whatever runs in between, the program's graph finds the weights as they were
    torch.testing.assert_close(ours(x), twin(x), rtol=1e-3, atol=1e-3)
    assert accelerator.report.counter("replays") == before + 1
    ours.train(), ours(x), ours.eval(), ours(x[:, :, :4])
    graph.replay()
    torch.testing.assert_close(out, twin(x), rtol=1e-3, atol=1e-3)
