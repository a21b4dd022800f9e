"""States of torch that are part of a plan's key, and states that change nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch_states import (
    Net,
    latent,
    no_gradients,  # noqa: F401
    pair,
    reasons,
    registered,
    runs,
)

from sfast_ext import torch_state


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


def test_flash_attention_of_another_package_is_part_of_the_key_and_no_obstacle():
    with registered("_flash_attention_forward", "CUDA", lambda *args, **kwargs: None):
        assert torch_state.obstacle() is None
        assert torch_state.python_kernels.flash == ("aten/_flash_attention_forward/CUDA",)
    assert torch_state.obstacle() is None and torch_state.python_kernels.flash == ()


def test_a_kernel_for_another_device_is_no_obstacle():
    with registered("_foreach_mul.Scalar", "MPS", lambda *args: None):
        assert torch_state.obstacle() is None
    assert torch_state.obstacle() is None
