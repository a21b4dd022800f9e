"""Kernels of Triton that other sizes of image launch are compiled ahead; a stand-in of its compiler is enough."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.support import finish
from sfast_ext import kernels
from sfast_ext.kernels.backend import precompile, size_prediction, triton_runtime
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import group_norm, one_pass, portable, two_pass
from sfast_ext.kernels.linear import linear_geglu
from sfast_ext.kernels.pointwise import geglu, layer_norm

from .test_precompile import GPU, NORMED, graph_of
from .test_size_prediction import add, family, unet

pytestmark = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs Triton, and TRITON_INTERPRET unset"
)


TRITON = (
    geglu.geglu_kernel,
    layer_norm.layer_norm_kernel,
    group_norm.group_norm_looped_statistics_kernel,
    one_pass.group_norm_one_pass_kernel,
    one_pass.group_norm_part_statistics_kernel,
    two_pass.group_norm_normalise_kernel,
)
BESIDE = "sfast: further sizes"


class Compiler:
    """A stand-in of Triton's: what it is asked for, in order, and how it answers."""

    def __init__(self):
        self.ahead = []  # keys of what the caller of `precompile` waits for
        self.beside = []  # and of what is compiled beside all else
        self.answer = lambda kernel: None

    def of(self, kernel):
        def warmup(*args, grid, **constants):
            asked = self.beside if threading.current_thread().name == BESIDE else self.ahead
            asked.append(size_prediction.key(precompile.Launch(kernel, args, constants)))
            self.answer(kernel)
            return object()

        return warmup


@pytest.fixture
def triton(nvrtc_calls, monkeypatch):
    """Stand-ins of Triton's compiler, and of those for CUDA C++."""
    compiler = Compiler()
    monkeypatch.setattr(two_pass, "multiprocessors", lambda device: 132)
    for kernel in TRITON:
        monkeypatch.setattr(kernel, "warmup", compiler.of(kernel), raising=False)
        monkeypatch.setattr(kernel, "device_caches", {0: None}, raising=False)
    yield compiler
    compiler.answer = lambda kernel: None
    precompile._background._due = 0
    finish()


def images(height, width, *more):
    """Norms of two levels, and of the lower one's pixels."""
    below = halved(height, 2), halved(width, 2)
    return graph_of(
        *more,
        (torch.neg, (2, 4, height, width)),
        (group_norm.launch, (2, 320, height, width), 32, None, None, 1e-5),
        (group_norm.launch, (2, 1280, *below), 32, None, None, 1e-5),
        (layer_norm.launch, (2, below[0] * below[1], 1280), None, None, 1e-5),
    )


def halved(pixels, times=1):
    return halved((pixels + 1) // 2, times - 1) if times else pixels


def keys(graph):
    return set(precompile.launches(graph, GPU))


def scaled(x, latent, other, weight=False):
    """What a call with `x` for a latent, among images of all levels, has in its place for another."""
    shapes = [
        size_prediction._value(torch.empty(2, 8, *size, device="meta")) for size in size_prediction._levels(latent)
    ]
    operand = size_prediction._value(x, weight)
    (call,) = size_prediction.resized(
        [size_prediction.Call(None, (shapes, operand), {"again": [operand]})], latent, other
    )
    assert call.kwargs == {"again": [call.args[1]]}
    return call.args[1]


def empty(*size):
    return torch.empty(size, dtype=torch.float16, device="meta")


OPERANDS = {
    "image": lambda h, w: empty(2, 4, h, w),
    "channels last": lambda h, w: empty(2, 320, h, w).to(memory_format=torch.channels_last),
    "of a level": lambda h, w: empty(2, 640, halved(h), halved(w)),
    "of the lowest level": lambda h, w: empty(2, 1280, halved(h, 3), halved(w, 3)),
    "half of the channels": lambda h, w: empty(2, 640, h, w)[:, 320:],
    "pixels": lambda h, w: empty(2, halved(h) * halved(w), 640),
    "pixels of an image": lambda h, w: empty(2, 320, h, w).flatten(2).transpose(1, 2),
    "heads": lambda h, w: empty(2, h * w, 320).view(2, h * w, 8, 40).transpose(1, 2),
    "heads one after another": lambda h, w: empty(2, 8, h * w, 40),
    "packed": lambda h, w: empty(2, h * w, 960)[..., 320:640],
    "packed heads": lambda h, w: empty(2, h * w, 960)[..., 640:].view(2, h * w, 8, 40).transpose(1, 2),
    "one image for all": lambda h, w: empty(1, 320, h, w).expand(2, -1, -1, -1),
    "prompt": lambda h, w: empty(2, 77, 768),
    "keys of a prompt": lambda h, w: empty(2, 77, 320).view(2, 77, 8, 40).transpose(1, 2),
    "number of each channel": lambda h, w: empty(2, 320, 1, 1),
    "vector": lambda h, w: empty(320),
    "matrix": lambda h, w: empty(2, 1280),
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize(
    ("latent", "other"),
    [((64, 64), (96, 72)), ((128, 96), (64, 104)), ((113, 65), (120, 64)), ((64, 72), (113, 65))],
    ids=str,
)
def test_an_operand_is_what_it_would_be_at_the_other_size(name, latent, other):
    operand = OPERANDS[name]
    assert scaled(operand(*latent), latent, other) == size_prediction._value(operand(*other))


def test_heads_as_large_as_a_latent_are_no_image():
    def heads(pixels):  # of Stable Diffusion 2.1's lowest level
        return empty(2, pixels, 20 * 64).view(2, pixels, 20, 64).transpose(1, 2)

    assert heads(8 * 8).shape[2:] == (64, 64)
    assert scaled(heads(8 * 8), (64, 64), (96, 72)) == size_prediction._value(heads(12 * 9))


def test_scales_of_rows_follow_the_pixels():
    scales = empty(2, 64 * 64).float()
    assert scaled(scales, (64, 64), (96, 72)) == size_prediction._value(empty(2, 96 * 72).float())
    # an embedding, or another dtype
    assert scaled(empty(2, 1280).float(), (64, 64), (96, 72)).size == (2, 1280)
    assert scaled(empty(2, 64 * 64).half(), (64, 64), (96, 72)).size == (2, 64 * 64)


def test_a_weight_as_large_as_an_image_stays():
    weight = empty(1280, 1280, 3, 3)
    assert scaled(weight, (24, 24), (32, 32), weight=True) == size_prediction._value(weight, True)
    assert scaled(weight, (24, 24), (32, 32)).size == (1280, 1280, 4, 4)


def test_levels_are_only_those_that_images_have():
    few = size_prediction._value(empty(2, 8, 16, 40))  # as an image prompt has
    image, low = size_prediction._value(empty(2, 4, 64, 64)), size_prediction._value(empty(2, 4, 4, 4))
    for given, length in (((image,), 16), ((image, low), 36)):
        (call,) = size_prediction.resized([size_prediction.Call(None, (*given, few), {})], (64, 64), (96, 96))
        assert call.args[-1].size == (2, 8, length, 40)


def test_calls_for_another_size_are_those_of_its_graph():
    graph, other = unet(32), unet(24)
    weight = next(node for node in graph.nodes if node.name == "x_1")
    weight.op = "get_attr"
    found = size_prediction.resized(
        size_prediction.calls(graph), size_prediction.latent(graph), size_prediction.latent(other)
    )
    wanted = size_prediction.calls(other)
    assert [call.function for call in found] == [call.function for call in wanted]
    shapes = [[(x.size, x.stride, x.dtype) for x in call.args] for call in found]
    assert shapes == [[(x.size, x.stride, x.dtype) for x in call.args] for call in wanted]
    assert [x.weight for call in found for x in call.args].count(True) == 1


@pytest.mark.parametrize("latent", [(64, 64), (152, 104), (113, 65), (16, 8)], ids=str)
def test_further_sizes_are_those_that_webuis_offer(latent):
    found = size_prediction.likely_sizes(latent)
    assert found and latent not in found and len(set(found)) == len(found)
    assert all(n % 8 == 0 and n > 0 for size in found for n in size)


def test_the_latent_is_the_largest_image_that_goes_in():
    graph = graph_of((torch.neg, (2, 77, 768)), (torch.neg, (2, 4, 65, 113)), (torch.neg, (2, 320, 33, 57)))
    assert size_prediction.latent(graph) == (65, 113)
    assert size_prediction.latent(graph_of((torch.neg, (2, 4096, 320)))) is None


def test_what_further_sizes_launch_was_compiled_before(triton):
    first = images(64, 64)
    others = [images(64, 72), images(96, 96), images(80, 64), images(128, 128), images(32, 32)]
    new = set().union(*map(keys, others)) - keys(first)
    assert len(new) >= 2
    assert precompile.precompile(first, GPU) == len(keys(first))
    finish()
    compiled = list(triton.beside)
    assert new <= set(compiled) and keys(first).isdisjoint(compiled)
    for graph in others:  # whose own are in Triton's caches by then
        precompile.precompile(graph, GPU)
    finish()
    assert len(set(triton.beside)) == len(triton.beside)


def test_a_size_of_which_all_is_compiled_has_further_ones_all_the_same(triton, monkeypatch):
    first = images(64, 64)
    precompile.precompile(first, GPU)
    finish()
    compiled = triton.beside[:]
    assert precompile.precompile(first, GPU) == 0
    finish()
    assert triton.beside == compiled
    monkeypatch.setattr(precompile, "_background", precompile.BackgroundCompiler())
    assert precompile.precompile(first, GPU) == 0
    finish()
    assert set(compiled) < set(triton.beside[len(compiled) :])


def test_kernels_in_cuda_are_compiled_first(triton, nvrtc_calls):
    order = []

    def note(kind):
        if threading.current_thread().name == BESIDE:
            order.append(kind)
            if order.count("triton") == 1 and kind == "triton":
                add(family(), 0)

    nvrtc_calls.answer, triton.answer = lambda constants: note("cuda") or b"code", lambda kernel: note("triton")
    convolution = conv2d.launch, (2, 640, 64, 64), (640, 640, 3, 3)
    precompile.precompile(images(64, 64, convolution), GPU)
    finish()
    first = order.index("triton")
    assert first > 0 and order[first + 1 : first + 5] == ["cuda"] * 4
    assert set(order[:first]) == {"cuda"} and set(order[first + 5 :]) == {"triton"}


def test_kernels_of_triton_wait_until_first_calls_are_over(triton, nvrtc_calls, monkeypatch):
    monkeypatch.setattr(precompile, "_PAUSE", 3600)
    later, until, now, looked = precompile._background, [], [100.0], threading.Semaphore(0)

    def monotonic():
        if threading.current_thread().name == BESIDE:
            looked.release()
        return now[0]

    def answer(kernel):
        until.append(later._due)
        now[0] = max(now[0], 200.0)

    monkeypatch.setattr(precompile, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    triton.answer = answer
    precompile.precompile(images(64, 64), GPU)
    assert set(until) == {3700.0} and later._due == 3800.0  # from its beginning, and from its end
    add(family(), 0)
    end = time.monotonic() + 300
    while len(nvrtc_calls.asked) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    while looked.acquire(blocking=False):
        pass
    now[0] = 3799.0
    # the thread has nothing else to do, and looks at the clock again and again
    assert all(looked.acquire(timeout=300) for _ in range(3))
    assert len(nvrtc_calls.asked) == 4 and triton.beside == [] and later._thread.is_alive()
    now[0] = 3800.0
    finish()
    assert triton.beside


def test_kernels_in_cuda_that_only_a_further_size_launches_are_compiled_too(triton, nvrtc_calls):
    graph = graph_of(
        (torch.neg, (2, 4, 64, 64)),
        (group_norm.launch, (2, 1280, 8, 8), 32, None, None, 1e-5),
        (linear_geglu.launch, (2, 64, 1280), (10240, 1280), (10240,)),
    )
    assert precompile.precompile(graph, GPU) == 2 and nvrtc_calls.asked == []
    finish()
    every = [linear_geglu.constants(tile, torch.float16) for tile in linear_geglu.TILES]
    assert sorted(map(str, nvrtc_calls.asked)) == sorted(map(str, every))


@pytest.mark.parametrize(("error", "tries"), [(RuntimeError("no such instruction"), 1), (SystemError("disturbed"), 2)])
def test_what_triton_does_not_compile_keeps_nothing_else_from_it(triton, caplog, error, tries):
    def answer(kernel):
        if kernel is two_pass.group_norm_normalise_kernel and threading.current_thread().name == BESIDE:
            raise error

    first = images(64, 64)
    latent, called = size_prediction.latent(first), size_prediction.calls(first)
    wanted = {}
    for size in size_prediction.likely_sizes(latent):
        wanted |= size_prediction.launched(size_prediction.resized(called, latent, size), GPU)
    triton.answer = answer
    precompile.precompile(first, GPU)
    finish()
    failing = {key for key, launch in wanted.items() if launch.kernel is two_pass.group_norm_normalise_kernel} - keys(
        first
    )
    others = set(wanted) - keys(first) - failing
    assert failing and others
    assert all(triton.beside.count(key) == tries for key in failing)
    assert all(triton.beside.count(key) == 1 for key in others)
    assert not caplog.records  # of warnings or worse


def test_what_was_in_another_threads_way_is_compiled_after_all_for_a_further_size(triton):
    asked = []

    def answer(kernel):
        if threading.current_thread().name == BESIDE:
            asked.append(kernel)
            if len(asked) == 1:
                raise SystemError("AST constructor recursion depth mismatch (before=45, after=164)")

    triton.answer = answer
    precompile.precompile(images(64, 64), GPU)
    finish()
    assert [triton.beside.count(key) for key in dict.fromkeys(triton.beside)][:2] == [2, 1]


def test_a_call_that_raises_at_another_size_is_left_out():
    def broken(x):
        raise ValueError(x.shape)

    called = size_prediction.calls(graph_of((layer_norm.launch, NORMED, (320,), (320,), 1e-5)))
    assert len(size_prediction.launched([size_prediction.Call(broken, called[0].args[:1], {}), *called])) == 1


def test_nothing_of_a_model_is_kept_for_further_sizes(triton, monkeypatch):
    monkeypatch.setattr(precompile, "_PAUSE", 3600)
    graph, mode = images(64, 64), FakeTensorMode()
    placeholders = [node for node in graph.nodes if "val" in node.meta]
    for node in placeholders:
        with mode:
            node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=torch.float16)
    placeholders[1].op = "get_attr"
    placeholders[1].meta["val"] = torch.zeros(placeholders[1].meta["val"].shape, dtype=torch.float16)
    kept = [weakref.ref(x) for x in (graph, mode, *(node.meta["val"] for node in placeholders))]
    assert precompile.precompile(graph, GPU)
    assert len(precompile._background._needs_gil) == 4
    del graph, mode, placeholders, node
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


@pytest.mark.long(but=[0])
@pytest.mark.parametrize(("pause", "printed"), [(0, ["begun", "done"]), (3600, [])])
def test_python_ends_after_the_kernel_of_triton_at_hand(pause, printed):
    script = f"""
        import contextlib, threading, time
        import torch
        from sfast_ext.kernels.backend import precompile, size_prediction, triton_runtime
        begun = threading.Event()
        class Kernel:
            arg_names = ("x",)
            def warmup(self, *args, grid, **constants):
                print("begun", flush=True)
                begun.set()
                while threading.main_thread().is_alive():  # ends beside this compilation
                    time.sleep(0.01)
                print("done", flush=True)
        kernel = Kernel()
        def launch(x):
            triton_runtime.launch_kernel(kernel, (1,), x, N=x.shape[-1])
        torch.cuda.device = lambda device: contextlib.nullcontext()
        precompile._PAUSE = {pause}
        x = size_prediction.Shape((2, 4, 64, 64), (16384, 4096, 64, 1), torch.float16)
        calls = [size_prediction.Call(launch, (x,), {{}})]
        precompile._background.add([], torch.device("cuda", 0), calls, (64, 64))
        begun.wait(0 if precompile._PAUSE else None)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and not ran.stderr
    assert ran.stdout.split() == printed


@pytest.mark.parametrize(("name", "value"), [("AVAILABLE", False), ("INTERPRETED", True)])
def test_without_triton_nothing_is_compiled_for_further_sizes(triton, monkeypatch, name, value):
    started = []
    monkeypatch.setattr(precompile.BackgroundCompiler, "_work", lambda self: started.append(self))
    monkeypatch.setattr(triton_runtime, name, value)
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 132)
    # without Triton the kernels in CUDA C++ are compiled: three of group norm, and layer norm
    assert precompile.precompile(images(64, 64), GPU) == (0 if value else 4)
    assert len(started) == (not value) and triton.ahead == []
